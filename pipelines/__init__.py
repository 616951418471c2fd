"""The interface for users: the project file, sources, sinks, generators, the command line."""
