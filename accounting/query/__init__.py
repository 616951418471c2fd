"""A query in accounting: its plan, one budget for all of its columns, thresholds, laws."""
