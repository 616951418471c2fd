"""Tests of stores and ledger."""
