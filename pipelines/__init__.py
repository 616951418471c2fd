"""What a person touches: job files, sources, sinks, generators, the command line."""
