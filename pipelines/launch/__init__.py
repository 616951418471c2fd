"""The launcher of the Dataflow template: for a job, or the batch of a ticket."""
