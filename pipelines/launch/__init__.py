"""Launchers of Dataflow's templates: a job, a ticket's batch, census tables."""
