"""Strategies that are kept."""

import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.accounting.workloads.workload import over
from dpstream.pipelines.workload import cache
from dpstream.pipelines.workload.cache import STRATEGIES, folder_of, largest, solved, solved_purely
from tests.pipelines.workload.survey import workload


def test_the_second_time_it_is_read(tmp_path: Path) -> None:
    asked = over([512], ["range"])
    first, path, known = solved(asked, tmp_path / "cache")
    assert not known and path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    before = time.process_time()
    again, same, known = solved(asked, tmp_path / "cache")
    assert known and same == path and time.process_time() - before < 0.1
    assert (again.error, again.floor, again.strategy.name) == (
        first.error, first.floor, first.strategy.name,
    )  # fmt: skip
    assert again.strategy.error(asked) == first.strategy.error(asked)


def test_what_is_damaged_is_solved_again(tmp_path: Path) -> None:
    asked = over([16], ["prefix"])
    first, path, _ = solved(asked, tmp_path)
    whole = path.read_bytes()
    at = whole.index(np.asarray(first.error).tobytes())
    for broken in (whole[:-20], b"", whole[:at] + b"\0\0" + whole[at + 2 :]):
        path.write_bytes(broken)
        again, _, known = solved(asked, tmp_path)
        assert not known and again.error == first.error and path.read_bytes() == whole
    other, foreign, _ = solved(over([17], ["prefix"]), tmp_path)
    path.write_bytes(foreign.read_bytes())
    assert solved(asked, tmp_path)[0].error == first.error != other.error


def test_strategies_for_pure_epsilon_are_kept_too(tmp_path: Path) -> None:
    asked = over([24], ["range"])
    name, first, known = solved_purely(asked, 9, tmp_path)
    [path] = tmp_path.iterdir()
    assert not known and path.stat().st_mode & 0o777 == 0o600
    with mock.patch.object(cache, "pure", side_effect=AssertionError):
        again = solved_purely(asked, 9, tmp_path)
    assert again[0] == name and again[2] and np.array_equal(again[1].factors[0], first.factors[0])
    whole = path.read_bytes()
    for broken in (whole[:-9], b""):
        path.write_bytes(broken)
        assert not solved_purely(asked, 9, tmp_path)[2] and path.read_bytes() == whole
    assert not solved_purely(asked, 5, tmp_path)[2]  # other bits are another lattice


def test_by_name(tmp_path: Path) -> None:
    asked = over([16], ["range"])
    best = solved(asked, tmp_path)[0]
    for name in STRATEGIES:
        found = solved(asked, tmp_path, "total", name)[0]
        assert found.floor == best.floor <= found.error
        assert best.error <= found.error * (1 + 1e-3)
        worst = solved(asked, tmp_path, "worst", name)[0]
        assert worst.error == pytest.approx(largest(asked, worst.strategy), rel=1e-3)
    assert len(list(tmp_path.iterdir())) == 2 * len(STRATEGIES)


def test_what_there_is_not(tmp_path: Path) -> None:
    for strategy, objective in (("best", "total"), ("auto", "mean")):
        with pytest.raises(UsageError):
            solved(workload(), tmp_path, objective, strategy)
    with pytest.raises(PolicyError, match="at most"):
        solved(over([16385], ["prefix"]), tmp_path)


def test_without_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    _, path, known = solved(workload(), tmp_path / "file" / "below")
    assert not known and not path.exists()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert folder_of(None) == tmp_path / "dpstream" / "strategies"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert folder_of(None).name == "strategies" and folder_of(tmp_path) == tmp_path
