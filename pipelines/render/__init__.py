"""Charts and pages of reports, sessions and census tables."""
