"""Keyed, exact noise: one draw per named node (mechanism.md section 5)."""
