"""Workload files as they come; strategies are solved once, and again where a file is damaged."""

import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from dpstream.accounting.errors import DpstreamError, UsageError
from dpstream.accounting.strategies.cells.auto import STRATEGIES, largest
from dpstream.accounting.workloads.workload import over
from dpstream.pipelines.workload import files
from dpstream.pipelines.workload.files import (
    domain_text,
    folder_of,
    read_workload,
    solved,
    solved_purely,
)
from tests.pipelines.workload.survey import DOMAIN, workload, write

ONE = '{"domain": [{"name": "a", "size": 2}], "queries": [{"factors": {"a": %s}}]}'


def test_json_and_arrays(tmp_path: Path) -> None:
    assert read_workload(write(tmp_path / "w.json")).digest == workload().digest
    assert domain_text(workload()) == DOMAIN
    marked = tmp_path / "marked.json"
    marked.write_bytes(b"\xef\xbb\xbf" + (tmp_path / "w.json").read_bytes())
    assert read_workload(marked).digest == workload().digest
    np.savez(tmp_path / "w.npz", W=np.eye(3)[:2])
    assert read_workload(tmp_path / "w.npz").queries == 2


@pytest.mark.parametrize(
    "text",
    ["{", "[1]", '"\ud83d', '{"domain": [], "domain": []}', ONE % '{"matrix": [[NaN, 1]]}',
     ONE % '{"matrix": [[1e400, 1]]}', ONE % '{"matrix": [[0, 0]]}', ONE % '{"matrix": []}',
     ONE % '"all"', "[" * 100_000],
)  # fmt: skip
def test_no_workload(text: str, tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(DpstreamError):
        read_workload(path)


def test_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (tmp_path, tmp_path / "none.json", tmp_path / "none.npz"):
        with pytest.raises(UsageError):
            read_workload(path)
    (tmp_path / "w.npz").write_bytes(b"PK\x03\x04 no archive")
    with pytest.raises(UsageError):
        read_workload(tmp_path / "w.npz")
    np.savez(tmp_path / "o.npz", W=np.array([[object()]]))
    with pytest.raises(UsageError):
        read_workload(tmp_path / "o.npz")
    np.savez(tmp_path / "v.npz", V=np.eye(2))
    with pytest.raises(UsageError):
        read_workload(tmp_path / "v.npz")
    monkeypatch.setattr(files, "MAX_WORKLOAD_TEXT_BYTES", 10)
    with pytest.raises(UsageError, match="too large"):
        read_workload(write(tmp_path / "w.json"))


def test_the_second_time_it_is_read(tmp_path: Path) -> None:
    query_set = over([512], ["range"])
    first, path, cache_hit = solved(query_set, tmp_path / "cache")
    assert not cache_hit and path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    before = time.process_time()
    again, same, cache_hit = solved(query_set, tmp_path / "cache")
    assert cache_hit and same == path and time.process_time() - before < 0.1
    assert (again.error, again.floor, again.strategy.name) == (
        first.error, first.floor, first.strategy.name,
    )  # fmt: skip
    assert again.strategy.error(query_set) == first.strategy.error(query_set)


def test_what_is_damaged_is_solved_again(tmp_path: Path) -> None:
    query_set = over([16], ["prefix"])
    first, path, _ = solved(query_set, tmp_path)
    content = path.read_bytes()
    at = content.index(np.asarray(first.error).tobytes())
    for broken in (content[:-20], b"", content[:at] + b"\0\0" + content[at + 2 :]):
        path.write_bytes(broken)
        again, _, cache_hit = solved(query_set, tmp_path)
        assert not cache_hit and again.error == first.error and path.read_bytes() == content
    other, foreign, _ = solved(over([17], ["prefix"]), tmp_path)
    path.write_bytes(foreign.read_bytes())
    assert solved(query_set, tmp_path)[0].error == first.error != other.error


def test_strategies_for_pure_epsilon_are_kept_too(tmp_path: Path) -> None:
    query_set = over([24], ["range"])
    name, first, cache_hit = solved_purely(query_set, 9, tmp_path)
    [path] = tmp_path.iterdir()
    assert not cache_hit and path.stat().st_mode & 0o777 == 0o600
    with mock.patch.object(files, "pure", side_effect=AssertionError):
        again = solved_purely(query_set, 9, tmp_path)
    assert again[0] == name and again[2] and np.array_equal(again[1].factors[0], first.factors[0])
    content = path.read_bytes()
    for broken in (content[:-9], b""):
        path.write_bytes(broken)
        assert not solved_purely(query_set, 9, tmp_path)[2] and path.read_bytes() == content
    assert not solved_purely(query_set, 5, tmp_path)[2]  # other bits are another lattice


def test_by_name(tmp_path: Path) -> None:
    query_set = over([16], ["range"])
    best = solved(query_set, tmp_path)[0]
    for name in STRATEGIES:
        named_plan = solved(query_set, tmp_path, "total", name)[0]
        assert named_plan.floor == best.floor <= named_plan.error
        assert best.error <= named_plan.error * (1 + 1e-3)
        worst = solved(query_set, tmp_path, "worst", name)[0]
        assert worst.error == pytest.approx(largest(query_set, worst.strategy), rel=1e-3)
    assert len(list(tmp_path.iterdir())) == 2 * len(STRATEGIES)


def test_what_there_is_not(tmp_path: Path) -> None:
    for strategy, objective, message in (
        ("optimun", "total", "'optimun'.*'optimum'. known here: auto, eigen, "),
        ("auto", "mean", "'mean'.*known here: relative, total, worst"),
    ):
        with pytest.raises(UsageError, match=message):
            solved(workload(), tmp_path, objective, strategy)
    with pytest.raises(UsageError, match=r"workload file ages.json: cannot be read"):
        read_workload(tmp_path / "ages.json")
    with pytest.raises(UsageError, match="at most"):
        solved(over([16385], ["prefix"]), tmp_path)


def test_without_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    _, path, cache_hit = solved(workload(), tmp_path / "file" / "below")
    assert not cache_hit and not path.exists()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert folder_of(None) == tmp_path / "dpstream" / "strategies"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert folder_of(None).name == "strategies" and folder_of(tmp_path) == tmp_path
