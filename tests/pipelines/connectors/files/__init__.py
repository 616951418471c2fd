"""Tests of sources and sinks of files."""
