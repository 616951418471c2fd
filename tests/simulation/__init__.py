"""A seeded world of source, clock, scheduler, store and faults that runs the real transforms."""
