"""Tests of what an audit is designed and judged by."""
