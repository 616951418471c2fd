"""Budgets per record: a space of dimensions, boxes in it, what each has spent, and decisions."""
