"""Tests of topics of Pub/Sub."""
