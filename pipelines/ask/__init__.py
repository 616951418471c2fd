"""Questions that are asked once: one sequence of charge, read, draw, commit and show for all."""
