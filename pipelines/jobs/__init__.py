"""Job files: tables, texts, the plan they mean, and the noise key's place."""
