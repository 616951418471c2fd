"""Streams: charged when they begin, run from source to sink, continued when new files are added."""
