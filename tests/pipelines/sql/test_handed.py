"""Sums go through a file as they are, and meet others' by the value of their group."""

import contextlib
import os
import shutil
import stat
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.errors import RunError
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.one_shot import Bounded, Totals
from dpstream.dp_transforms.one_shot.groups import Groups
from dpstream.pipelines.sql.handed import (
    hand_over,
    place_of,
    read_counts,
    read_sums,
    sweep,
    write_counts,
    write_sums,
)
from dpstream.state import locks
from tests.pipelines.sql.asking import KEY

NONE = np.zeros(0, np.int64)


@pytest.fixture
def ring() -> KeyRing:
    return KeyRing(bytearray.fromhex(KEY))


def groups(ring: KeyRing, *names: str | None) -> Groups:
    found = Groups(["page"], ["string"], ring.key)
    if names:
        found.codes([pa.chunked_array([pa.array(names, pa.string())])])
    return found


def sums(*units: int) -> Totals:
    some = np.array(units, np.int64)
    return Totals(some, 7 * some, {0: -some, 3: some << 40})


def rows(group: int, value: int) -> Bounded:
    one = np.array([0]), np.array([value]), np.array([5])
    return Bounded(NONE, np.array([group]), NONE, {}, {"m": one})


def test_shards_meet_by_group(tmp_path: Path, ring: KeyRing) -> None:
    write_sums(place_of(tmp_path, 0), groups(ring, "b", None), sums(3, 4), rows(1, 9))
    write_sums(place_of(tmp_path, 1), groups(ring, None, "a", "b"), sums(10, 20, 30), rows(2, 8))
    write_sums(place_of(tmp_path, 2), groups(ring), sums(), rows(0, 0)._replace(
        rows={"m": (NONE, NONE, NONE)}))  # fmt: skip
    assert stat.S_IMODE(place_of(tmp_path, 0).stat().st_mode) == 0o600
    known = groups(ring)
    shards = list(read_sums(tmp_path, 3, known, ["m"]))
    total = shards[0][0].plus(shards[1][0]).plus(shards[2][0])
    assert known.values is not None and known.values["page"].to_pylist() == ["b", None, "a"]
    assert total.units.tolist() == [33, 14, 20] and total.weighted.tolist() == [231, 98, 140]
    assert total.sums[0].tolist() == [-33, -14, -20] and total.sums[3][0] == 33 << 40
    at, value, weight = shards[1][1].rows["m"]
    assert shards[1][1].group[at].tolist() == [0] and (value[0], weight[0]) == (8, 5)


def test_without_groups_there_is_one(tmp_path: Path, ring: KeyRing) -> None:
    none = Groups([], [], ring.key)
    write_sums(place_of(tmp_path, 0), none, sums(3), rows(0, 1)._replace(rows={}))
    [(total, _)] = read_sums(tmp_path, 1, none, [])
    assert total.units.tolist() == [3]


def test_histograms_add_up(tmp_path: Path) -> None:
    for shard in range(3):
        write_counts(place_of(tmp_path, shard), {"a": np.arange(4) * shard, "b": np.ones(2, int)})
    found = read_counts(tmp_path, 3, ["a", "b"])
    assert found["a"].tolist() == [0, 3, 6, 9] and found["b"].tolist() == [3, 3]


@pytest.mark.parametrize("what", ["missing", "cut", "empty"])
def test_what_is_not_there_is_an_error(what: str, tmp_path: Path, ring: KeyRing) -> None:
    path = place_of(tmp_path, 0)
    write_sums(path, groups(ring, "b"), sums(3), rows(0, 9))
    if what == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: 100 if what == "cut" else 0])
    with pytest.raises(RunError, match="handed over"):
        list(read_sums(tmp_path, 1, groups(ring), ["m"]))


def aged(folder: Path) -> None:
    """A week ago."""
    os.utime(folder, (time.time() - 7 * 86_400,) * 2)


def test_a_folder_is_kept_while_its_launcher_lives_and_no_longer(tmp_path: Path) -> None:
    with hand_over(tmp_path) as folder:
        (folder / "shard-0000.arrow").write_bytes(b"private")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        aged(folder)
        sweep(tmp_path)
        assert (folder / "shard-0000.arrow").exists()
    assert not list(tmp_path.iterdir())
    left = tmp_path / ".dpstream-sql-abc"  # of one that was killed a moment ago
    left.mkdir()
    (left / "lock").touch()
    (left / "shard-0000.arrow").write_bytes(b"private")
    sweep(tmp_path)
    assert not left.exists()


def test_who_still_writes_while_a_folder_is_removed_leaves_nothing(tmp_path: Path) -> None:
    """A worker outlives its launcher: its file would stay, and keep the folder from going."""
    real, late = shutil.rmtree, list[str]()

    def slowly(folder: Path, **how: Any) -> None:
        with contextlib.suppress(OSError):
            write_counts(place_of(left, 7), {"a": np.arange(4)})
            late.append("written")
        real(folder, **how)
        with contextlib.suppress(OSError):
            write_counts(place_of(left, 8), {"a": np.arange(4)})
            late.append("written")

    with mock.patch.object(shutil, "rmtree", slowly), hand_over(tmp_path) as left:
        write_counts(place_of(left, 0), {"a": np.arange(4)})
    assert not late and not list(tmp_path.iterdir())


def test_what_was_cut_off_while_it_was_removed_goes_next_time(tmp_path: Path) -> None:
    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with (
        mock.patch.object(shutil, "rmtree", killed), pytest.raises(KeyboardInterrupt),
        hand_over(tmp_path) as left,
    ):  # fmt: skip
        write_counts(place_of(left, 0), {"a": np.arange(4)})
    [gone] = tmp_path.iterdir()
    assert list(gone.glob("shard-*"))
    sweep(tmp_path)
    assert not list(tmp_path.iterdir())


def test_without_a_lock_a_folder_s_age_decides(tmp_path: Path) -> None:
    left = tmp_path / ".dpstream-sql-abc"
    left.mkdir()
    sweep(tmp_path)
    assert left.exists()  # just being made
    aged(left)
    sweep(tmp_path)
    assert not left.exists()
    none = mock.patch.object(locks.fcntl, "flock", side_effect=OSError(95, "not supported"))
    with none, hand_over(tmp_path) as folder:
        sweep(tmp_path)
        assert folder.exists()
        aged(folder)
        sweep(tmp_path)
        assert not folder.exists()
