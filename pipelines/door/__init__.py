"""The one door for statements: the connection of Python, routes, and system tables."""
