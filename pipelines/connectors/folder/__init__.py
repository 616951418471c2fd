"""A folder that grows, as a source."""
