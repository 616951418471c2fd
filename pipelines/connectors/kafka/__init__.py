"""Kafka: a topic as a source, a compacted topic as a sink."""
