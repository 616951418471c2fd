"""Tests of topics of Kafka."""
