"""Fuzzers of readers: mutated files of a corpus, and what each reader must make of them."""
