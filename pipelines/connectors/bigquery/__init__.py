"""BigQuery: two tables as a sink."""
