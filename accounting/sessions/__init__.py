"""Sessions over a table whose records have budgets of their own: its public model and rules."""
