"""Tables in memory and rows of a pipeline."""
