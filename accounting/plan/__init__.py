"""The plan of a job: timeline, privacy unit, and the canonical form that names noise."""
