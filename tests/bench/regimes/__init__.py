"""The program beside every rival in every regime: `python -m tests.bench.regimes`."""
