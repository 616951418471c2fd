"""Charts and pages: what reports, sessions and census tables are drawn with."""
