"""Pub/Sub: a subscription as a source, a topic as a sink."""
