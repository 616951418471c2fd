"""The key of a process: read by its reference, bound to a run, ended with it."""

import pytest

from dpstream.accounting.errors import PolicyError, RunError, UsageError
from dpstream.dp_transforms.noise.key_source import KeySource, destroy_keys

KEY = "5e" * 32


def test_a_ring_of_a_run_is_the_runs_key_and_ends_with_it() -> None:
    source = KeySource(None, KEY)
    fingerprint = source.ring().fingerprint
    ring = source.of_run("run", fingerprint).ring()
    assert ring.source_fingerprint([b"a"]) == source.ring().source_fingerprint([b"a"])
    with pytest.raises(PolicyError):
        KeySource(None, "12" * 32).of_run("run", fingerprint).ring()
    destroy_keys("run")
    with pytest.raises(RunError):
        ring.source_fingerprint([b"a"])


def test_without_a_key_nothing_is_drawn() -> None:
    with pytest.raises(UsageError):
        KeySource(None).ring()
    assert KeySource("env:A").kind == "env" and KeySource(None, KEY).kind == "insecure_test_key"
