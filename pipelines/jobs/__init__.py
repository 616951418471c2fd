"""Jobs of a project file: their parts, the plan they mean, and the secret's place."""
