"""Statements in GoogleSQL's syntax: parsed, checked and bound to tables; no row is read."""
