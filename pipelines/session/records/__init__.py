"""Records of a table whose records have budgets: read, copied, scanned by boxes."""
