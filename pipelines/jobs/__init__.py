"""Jobs of a project file: their parts, their plan, and the reference to the secret."""
