"""What a person touches: the project file, sources, sinks, generators, the command line."""
