"""What a job asks for: plan, timeline, privacy unit, and the canonical form that names noise."""
