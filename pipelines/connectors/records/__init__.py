"""Records and releases as rows: what all connectors share of texts, formats and positions."""
