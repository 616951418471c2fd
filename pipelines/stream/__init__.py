"""Streams: charged when they begin, run from source to sink, and grown by files that join."""
