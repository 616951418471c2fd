"""Published census tables held against the truth: public or invented data only."""
