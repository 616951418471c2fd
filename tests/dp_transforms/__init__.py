"""Tests of the flow's stages."""
