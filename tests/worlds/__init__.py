"""One day's records in many files: of other countries, types, dialects and clocks."""
