"""Audits of a job's mechanism as a black box: a lower bound of epsilon beside the claim."""
