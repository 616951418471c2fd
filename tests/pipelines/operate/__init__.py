"""Tests of what operators see and do."""
