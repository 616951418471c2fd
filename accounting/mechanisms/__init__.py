"""Laws of integer noise and their tables: pure numbers, from which samplers draw."""
