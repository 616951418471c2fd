"""Launchers of the Dataflow template: for a job, the batch of a ticket, or census tables."""
