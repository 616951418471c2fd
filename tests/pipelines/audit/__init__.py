"""Tests of the audit of a job."""
