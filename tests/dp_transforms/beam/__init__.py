"""Tests of the flow's parts that know Beam."""
