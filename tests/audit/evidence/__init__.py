"""What trials prove of a mechanism: bounds of its trade-off, and designs of the trials."""
