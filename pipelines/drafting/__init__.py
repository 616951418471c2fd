"""A first job, drafted from the schema of a data file."""
