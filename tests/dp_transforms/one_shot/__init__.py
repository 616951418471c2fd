"""Tests of a query's second stage."""
