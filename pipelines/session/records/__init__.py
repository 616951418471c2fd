"""Records of a table in which each has its own budget: read, copied, scanned by boxes."""
