"""The key of a process: read by its reference, bound to a run, ended with it."""

from pathlib import Path

import pytest

from dpstream.accounting.errors import PolicyError, RunError, UsageError
from dpstream.dp_transforms.noise.secret_source import SecretSource, destroy_keys

KEY = "5e" * 32


def test_a_ring_of_a_run_is_the_runs_key_and_ends_with_it() -> None:
    source = SecretSource(None, KEY)
    fingerprint = source.ring().fingerprint
    ring = source.of_run("run", fingerprint).ring()
    assert ring.source_fingerprint([b"a"]) == source.ring().source_fingerprint([b"a"])
    with pytest.raises(PolicyError):
        SecretSource(None, "12" * 32).of_run("run", fingerprint).ring()
    destroy_keys("run")
    with pytest.raises(RunError):
        ring.source_fingerprint([b"a"])


def test_without_a_key_nothing_is_drawn() -> None:
    with pytest.raises(UsageError):
        SecretSource(None).ring()
    assert (
        SecretSource("env:A").kind == "env"
        and SecretSource(None, KEY).kind == "insecure_test_secret"
    )


def test_a_reference_and_a_test_secret_exclude_each_other() -> None:
    with pytest.raises(UsageError) as error:
        SecretSource("env:A", KEY)
    assert error.value.field == "secret"
    for text in ("5e" * 31, "5E" * 32, ""):
        with pytest.raises(UsageError) as error:
            SecretSource(None, text)
        assert error.value.field == "insecure_test_secret"
    assert not SecretSource().given and SecretSource(None, KEY).given


def test_only_a_file_has_a_path_and_starts_from_a_folder(tmp_path: Path) -> None:
    assert SecretSource("file:a").below(tmp_path).file == str(tmp_path / "a")
    for source in (SecretSource("env:A"), SecretSource(None, KEY), SecretSource()):
        assert source.file is None and source.below(tmp_path) == source


def test_a_text_of_it_has_no_secret() -> None:
    assert KEY not in repr(SecretSource(None, KEY)) and KEY not in str(SecretSource(None, KEY))
