"""Tests of linear workloads at the command line and of what is behind it."""
