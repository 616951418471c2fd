"""A first job file, drafted from the schema of a data file."""
