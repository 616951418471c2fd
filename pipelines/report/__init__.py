"""`dpstream report`: one page about a run."""
