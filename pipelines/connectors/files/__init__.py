"""Files: CSV, JSON Lines and Parquet, read as a source and written as a sink."""
