"""Tests of the tables of BigQuery."""
