"""The hash tables against dict and set; ids that share their hash bits stay apart.

Counts of admitted records by (unit, window, key), against a dictionary.

Numbers between numpy and Arrow are as Arrow itself has them, and nobody waits for pandas.

NPZ files that unpack to more than they may, or declare more than they have.
"""

import io
import resource
import subprocess
import sys
import zipfile
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpstream.accounting.arrays import Ids
from dpstream.pipelines.workload.planning import read_workload
from dpstream.state import keycounts
from dpstream.state.idtable import IdTable, PairSet
from dpstream.state.keycounts import KeyCounts, Taken, Wanted
from dpstream.state.npz import DAMAGED, TooLargeError, arrays_of
from dpstream.state.numbers import arrow_numbers, constant, mask, mask_of, valid_of, values_of
from tests.golden.refusals import Refused

#: Few distinct words, so that ids repeat and collide in their low bits.
WORD = st.sampled_from([0, 1, 2, 1023, 1024, 2**32, 2**63, 2**64 - 1])
ID = st.tuples(WORD, WORD)


def array(ids: list[tuple[int, int]]) -> Ids:
    return np.array(ids, np.uint64).reshape(-1, 2)


@given(batches=st.lists(st.lists(ID, max_size=30), max_size=8), unknown=st.lists(ID, max_size=10))
def test_interning_is_a_dict(
    batches: list[list[tuple[int, int]]], unknown: list[tuple[int, int]]
) -> None:
    table, model = IdTable(), dict[tuple[int, int], int]()
    for batch in batches:
        slots = table.intern(array(batch))
        assert slots.tolist() == [model.setdefault(i, len(model)) for i in batch]
        assert table.size == len(model)
        assert [tuple(row) for row in table.ids.tolist()] == list(model)
    assert table.find(array(unknown)).tolist() == [model.get(i, -1) for i in unknown]


def test_interning_many_with_growth() -> None:
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 2**64, (30_000, 2), np.uint64)
    ids[:20_000, 0] = rng.integers(0, 50, 20_000).astype(np.uint64) << np.uint64(40)
    table = IdTable()
    parts = np.split(ids, [1, 2, 1000, 1001, 17_000])
    assert np.concatenate([table.intern(p) for p in parts]).tolist() == list(range(30_000))
    order = rng.permutation(30_000)
    assert (table.intern(ids[order]) == order).all() and table.size == 30_000
    assert (table.find(ids[order]) == order).all()
    assert (table.find(ids ^ np.uint64(1 << 63)) == -1).all()


PAIR = st.tuples(st.integers(0, 5), ID)


@settings(max_examples=50)
@given(batches=st.lists(st.lists(PAIR, max_size=40), max_size=8))
def test_pairs_are_a_set(batches: list[list[tuple[int, tuple[int, int]]]]) -> None:
    pairs, model = PairSet(), set()
    for batch in batches:
        slots = np.array([slot for slot, _ in batch], np.int64)
        fresh = pairs.add(slots, array([unit for _, unit in batch]))
        for pair, new in zip(batch, fresh, strict=True):
            assert new == (pair not in model)
            model.add(pair)
        assert pairs.size == len(model)


def test_pairs_survive_growth_and_only_stale_ones_are_forgotten() -> None:
    rng = np.random.default_rng(2)
    pairs, model = PairSet(), set()
    stale = np.arange(100) % 3 == 0
    forgotten = 0
    for size in (10, 500, 3000, 9000, 40_000):
        slots = rng.integers(0, 100, size)
        units = rng.integers(0, 900, (size, 2)).astype(np.uint64)
        units[:, 1] = 0
        fresh = pairs.add(slots, units, stale)
        for slot, unit, new in zip(slots.tolist(), units[:, 0].tolist(), fresh, strict=True):
            if not stale[slot]:
                assert new == ((slot, unit) not in model)
            elif new and (slot, unit) in model:
                forgotten += 1
            model.add((slot, unit))
    assert forgotten > 0
    live = [(s, u) for s, u in model if not stale[s]]
    slots = np.array([s for s, _ in live])
    units = array([(u, 0) for _, u in live])
    assert not pairs.add(slots, units, stale).any()


def test_pairs_of_other_owners_and_halves_are_other_pairs() -> None:
    pairs = PairSet()
    add = lambda slot, unit: bool(pairs.add(np.array([slot]), array([unit]))[0])  # noqa: E731
    assert add(0, (7, 7)) and not add(0, (7, 7))
    assert add(1, (7, 7)) and add(0, (7, 8)) and add(0, (8, 7))
    # Equal start positions: low ^ slot * constant agrees, the owner tells them apart.
    mix = 0x9E3779B97F4A7C15
    assert add(1, (7 ^ mix, 7)) and add(0, (7 ^ mix ^ mix, 9))


UNITS = 7


class Limits(NamedTuple):
    pairs: int
    per_key: int


class Slow:
    """The same by hand, window by window and record by record."""

    def __init__(self) -> None:
        self.pairs, self.firsts = defaultdict[int, int](int), defaultdict[int, int](int)
        self.of_key = defaultdict[tuple[int, int, int], int](int)

    def admit(
        self, order: np.ndarray, records: Wanted, limits: Limits
    ) -> list[tuple[int, int, int]]:
        out = [(0, 0, 0)] * len(order)
        seen = set[tuple[int, int, int]]()
        for row in order.tolist():
            unit = int(records.unit[row])
            place = (unit, int(records.partition[row]), int(records.offset[row]))
            taken = fresh = 0
            rank = self.firsts[unit]
            for nth in range(0 if place in seen else int(records.wanted[row])):
                key = (unit, int(records.first[row]) + nth, int(records.keys[row]))
                if self.pairs[unit] == limits.pairs or self.of_key[key] == limits.per_key:
                    continue
                indexed = self.of_key[key] == 0 and not int(records.spared[row]) >> nth & 1
                fresh |= indexed << nth
                taken |= 1 << nth
                self.firsts[unit] += indexed
                self.pairs[unit] += 1
                self.of_key[key] += 1
            seen.add(place)
            out[row] = (taken, fresh, rank)
        return out


def wanted(rng: np.random.Generator, rows: int, begin: int, windows: int) -> Wanted:
    """Records of few units and keys; some stand there twice, one behind the other."""
    offset = begin + np.arange(rows) // 2
    same = np.arange(rows) // 2 * 2
    unit = rng.integers(0, UNITS, rows)[same]
    first = rng.integers(0, 5, rows)[same] + begin // 100
    # Keys that differ in no low bit.
    keys = (rng.integers(0, 6, rows) << 40)[same].astype(np.uint64)
    many = rng.integers(0, windows + 1, rows)[same]
    none = np.zeros(rows, np.int32)
    spared = none if windows == 64 else rng.integers(0, 1 << windows, rows).astype(np.int32)[same]
    return Wanted(unit, none, offset, first, many, keys, spared)


def plain(taken: Taken) -> list[tuple[int, int, int]]:
    return list(zip(*(column.tolist() for column in taken), strict=True))


@pytest.mark.parametrize("windows", [1, 3, 64])
@pytest.mark.parametrize("limits", [Limits(9, 1), Limits(40, 3), Limits(10**6, 2)])
def test_decisions_are_those_of_a_dictionary(
    windows: int, limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over many batches, with a table that grows and loses closed windows, in parts of a batch;
    in between the counts are made again from what was admitted."""
    monkeypatch.setattr(keycounts, "_ROWS_AT_ONCE", 37)
    rng = np.random.default_rng(windows + limits.per_key)
    slow, counts, history = Slow(), KeyCounts(), list[tuple[Wanted, Taken]]()
    pairs, indices = np.zeros(UNITS, np.int32), np.zeros(UNITS, np.int32)
    pair_count = 0
    for begin in range(0, 2000, 100):
        of = wanted(rng, 200, begin, windows)
        order = rng.permutation(100).repeat(2) * 2 + np.tile([0, 1], 100)
        least = begin // 100
        got = counts.admit(order, of, pairs, indices, *limits, least)
        assert plain(got) == slow.admit(order, of, limits)
        assert pairs.tolist() == [slow.pairs[unit] for unit in range(UNITS)]
        assert indices.tolist() == [slow.firsts[unit] for unit in range(UNITS)]
        pair_count += int(np.bitwise_count(got.pairs).sum())
        history.append((of, got))
        if begin % 300 == 0:
            counts = KeyCounts()
            for was, what in history:
                rows = np.flatnonzero(what.pairs)
                first = was.first[rows].astype(np.int32)
                counts.enter(was.unit[rows], first, what.pairs[rows], was.keys[rows])
    assert pair_count > 50


def test_equal_positions_of_two_units_are_two_records() -> None:
    """A source that reuses positions must not let one unit push out another's record."""
    counters, zero = (np.zeros(2, np.int32), np.zeros(2, np.int32)), np.zeros(4, np.int64)
    of = Wanted(np.array([0, 0, 1, 1]), zero.astype(np.int32), zero, zero, zero + 1,
                np.zeros(4, np.uint64), np.zeros(4, np.int32))  # fmt: skip
    taken = KeyCounts().admit(np.arange(4), of, *counters, 9, 9, 0)
    assert taken.pairs.tolist() == [1, 0, 1, 0] and counters[0].tolist() == [1, 1]


def test_closed_windows_leave_the_table() -> None:
    """What is kept is bounded by what windows that can be open hold."""
    counts = KeyCounts()
    pairs, indices = np.zeros(1, np.int32), np.zeros(1, np.int32)
    for window in range(60):
        keys = np.arange(500, dtype=np.uint64)
        rows = np.zeros(500, np.int64)
        none = np.zeros(500, np.int32)
        of = Wanted(
            rows, rows.astype(np.int32), np.arange(500), rows + window, rows + 1, keys, none
        )
        taken = counts.admit(np.arange(500), of, pairs, indices, 10**6, 1, window)
        assert (taken.fresh == 1).all()
        again = counts.admit(np.arange(500), of, pairs, indices, 10**6, 1, window)
        assert (again.pairs == 0).all()
    assert counts.size < 3_000
    assert pairs[0] == indices[0] == 60 * 500


CUTS = st.tuples(st.integers(0, 20), st.integers(0, 20))


@given(st.lists(st.none() | st.integers(-(2**63), 2**63 - 1)), CUTS)
def test_numbers_there_and_back(given: list[int | None], cut: tuple[int, int]) -> None:
    column = pa.array(given, pa.int64())[cut[0] :][: cut[1]]
    valid = valid_of(column)
    assert valid.tolist() == [x is not None for x in column.to_pylist()]
    values = values_of(column)
    assert values[valid].tolist() == [x for x in column.to_pylist() if x is not None]
    again = arrow_numbers(values, ~valid)
    assert again.equals(column) and again.null_count == column.null_count
    halves = pa.chunked_array([column[:3], column[3:]])
    assert values_of(halves)[valid].tolist() == values[valid].tolist()


@given(st.lists(st.none() | st.booleans()), CUTS)
def test_booleans_there_and_back(given: list[bool | None], cut: tuple[int, int]) -> None:
    column = pa.array(given, pa.bool_())[cut[0] :][: cut[1]]
    assert mask_of(column).tolist() == [bool(x) for x in column.to_pylist()]
    assert mask(mask_of(column)).equals(column.fill_null(False))


@pytest.mark.parametrize(
    ("value", "kind"),
    [(3, pa.int64()), (0, pa.bool_()), (1, pa.bool_()), (7, pa.int8()), (0, pa.timestamp("us")),
     (0, pa.date32()), (1, pa.float64()), ("é", pa.string()), (b"\xff", pa.binary()),
     ("", pa.string()), (0, pa.timestamp("ns", "UTC")), (0, pa.decimal128(9, 2)),
     (0, pa.decimal256(50, 2)), (0, pa.uint64())],
    ids=str,
)  # fmt: skip
def test_constants(value: Any, kind: pa.DataType) -> None:
    scalar = constant(value, kind)
    wanted = pa.scalar(bool(value), kind) if pa.types.is_boolean(kind) else pa.scalar(value, kind)
    assert scalar.equals(wanted) and scalar.type == kind


def test_nothing_here_imports_pandas() -> None:
    code = """
import sys
import numpy as np, pyarrow as pa
from dpstream.state.numbers import constant, mask, mask_of, arrow_numbers, valid_of, values_of
values_of(pa.chunked_array([arrow_numbers(np.arange(3)), arrow_numbers(np.arange(4))]))
mask_of(mask(valid_of(arrow_numbers(np.arange(3.0), np.ones(3, bool)))))
for value, kind in ((1, pa.int8()), ("a", pa.string()), (0, pa.timestamp("us"))):
    constant(value, kind)
print("pandas" in sys.modules)
pa.scalar(1)  # the test can fail
print("pandas" in sys.modules)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "True"]


def packed(**arrays: object) -> bytes:
    out = io.BytesIO()
    np.savez_compressed(out, **arrays)  # type: ignore[arg-type]
    return out.getvalue()


def member(shape: tuple[int, ...], data: bytes) -> bytes:
    """A file of one array whose header says more than its bytes are."""
    head, out = io.BytesIO(), io.BytesIO()
    np.lib.format.write_array_header_1_0(
        head, {"shape": shape, "fortran_order": False, "descr": "<f8"}
    )
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", head.getvalue() + data)
    return out.getvalue()


def test_arrays_are_read_back() -> None:
    given = {"a": np.arange(6.0).reshape(2, 3), "b": np.array(["x", "y"]), "c": np.float64(3)}
    out = arrays_of(io.BytesIO(packed(**given)), 1 << 12, 6)
    assert {name: array.tolist() for name, array in out.items()} == {
        name: np.asarray(array).tolist() for name, array in given.items()
    }


def test_what_is_too_large_or_lies_is_refused() -> None:
    zeros = packed(a=np.zeros(1 << 20, np.uint8))
    with pytest.raises(TooLargeError):
        arrays_of(io.BytesIO(zeros), 1 << 20)
    with pytest.raises(TooLargeError):
        arrays_of(io.BytesIO(zeros), 1 << 30, (1 << 20) - 1)
    for lie in (member((1 << 50,), bytes(80)), member((11,), bytes(80)), member((1, 2), b"")):
        with pytest.raises(DAMAGED):
            arrays_of(io.BytesIO(lie), 1 << 62)
    archive = bytearray(packed(a=np.arange(50.0), b=np.arange(3)))
    for at in range(len(archive)):
        broken = bytes([*archive[:at], archive[at] ^ 16, *archive[at + 1 :]])
        try:
            arrays_of(io.BytesIO(broken), 1 << 20)
        except (*DAMAGED, TooLargeError):
            continue


def limited() -> None:
    """At most 2 GiB of memory for what follows."""
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))


def test_a_small_file_takes_little_memory_to_be_refused(tmp_path: Path, refused: Refused) -> None:
    """600 MB of zeros in 600 kB."""
    path = tmp_path / "w.npz"
    path.write_bytes(packed(matrix=np.zeros((1, 600_000_000), np.uint8)))
    assert path.stat().st_size < 1 << 20
    refused(lambda: read_workload(path))
    code = (
        "from pathlib import Path; from dpstream.pipelines.workload.planning import *; import sys\n"
    )
    code += "try: read_workload(Path(sys.argv[1]))\nexcept UsageError: sys.exit(7)"
    command = [sys.executable, "-c", code, str(path)]
    assert subprocess.run(command, preexec_fn=limited, check=False).returncode == 7


@pytest.mark.parametrize("kind", ["int32", "int64", "float64"])
def test_each_kind_of_number(kind: str) -> None:
    values = np.array([1, -2, 3], kind)[::2]  # not in one piece
    assert arrow_numbers(values).equals(pa.array([1, 3], kind))
    assert values_of(pa.array(values)).tolist() == [1, 3]
    assert values_of(pa.nulls(0, kind)).dtype == kind and not len(values_of(pa.chunked_array(
        [], kind)))  # fmt: skip


def test_all_of_a_null_column_is_null() -> None:
    assert not valid_of(pa.nulls(3)).any() and valid_of(pa.array([1, 2])).all()
