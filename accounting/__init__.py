"""Mathematics of privacy: plans, budgets, strategies, thresholds.  No Beam, no database."""
