"""Systems of sources and sinks: a folder each, with both."""
