"""Run ids are random, and every system draws them in one place."""

import pytest

from dpstream.state.run_ids import new_run_id


def test_run_ids_are_128_bits_that_never_come_twice() -> None:
    drawn = {new_run_id() for _ in range(1_000)}
    assert len(drawn) == 1_000 and all(len(bytes.fromhex(name)) == 16 for name in drawn)


def test_an_environment_fixes_no_run_id(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DPSTREAM_RUN_ID", "RUN_ID", "PYTHONHASHSEED"):
        monkeypatch.setenv(name, "22" * 16)
    assert new_run_id() != new_run_id()
