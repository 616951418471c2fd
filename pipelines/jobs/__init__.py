"""Jobs of a project file: their parts, the plan they mean, and the noise key's place."""
