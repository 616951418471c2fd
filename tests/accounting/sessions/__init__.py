"""Tests of tables with record budgets."""
