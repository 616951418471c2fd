"""Tests of the estimate of a job's size."""
