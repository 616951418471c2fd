"""Questions that are asked once: the one sequence of charge, read, draw, commit and show."""
