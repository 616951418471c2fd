"""Parts of a table, and the manifest of each version."""

import contextlib
import hashlib
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpstream.accounting.regions.space import Budget, Integer
from dpstream.accounting.sessions.table import SessionTable
from dpstream.pipelines.session.records import parts
from dpstream.pipelines.session.records.manifest import (
    MANIFEST,
    Manifest,
    Part,
    check_account,
    commit,
    read_manifest,
    refuse_table,
)
from dpstream.pipelines.session.records.parts import (
    budgets_of,
    checked_paths,
    ids_in,
    read_part,
    reading,
    schema_of,
    table_of,
    tidy,
    write_part,
    writing,
)
from dpstream.state import locks
from tests import accounts
from tests.golden.pinned import check, of_refusals
from tests.golden.refusals import Refused

ID = "1d" * 8


def table(high: int = 9) -> SessionTable:
    dimensions = (Integer(name="a", low=0, high=high, missing="point"), Budget(name="e", most=1.0))
    return SessionTable(name="small", dimensions=dimensions)


TABLE = table()


def manifest(*parts: Part, version: int = 1) -> Manifest:
    return Manifest(1, ID, TABLE.digest, version, "string", "00" * 32, parts)


def test_a_manifest_is_whole_or_refused(tmp_path: Path, refused: Refused) -> None:
    part_manifest = manifest(Part("ab", 3, True))
    commit(tmp_path, part_manifest)
    assert read_manifest(tmp_path, TABLE) == part_manifest
    data = (tmp_path / MANIFEST).read_bytes()
    flipped = [
        data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :]
        for at, bit in itertools.product(range(len(data)), (1, 0x80))  # the second is no UTF-8
    ]
    for damaged in [*flipped, *(data[:size] for size in range(0, len(data), 9))]:
        (tmp_path / MANIFEST).write_bytes(damaged)
        refused(read_manifest, tmp_path, TABLE)


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = {name: tmp_path / name for name in ("empty", "other", "form", "part", "no part")}
    for folder in folders.values():
        folder.mkdir()
    commit(folders["other"], manifest())
    commit(folders["form"], Manifest(2, ID, TABLE.digest, 1, None, None, ()))
    changed, gone = (write_part(folders[name], rows(), True) for name in ("part", "no part"))
    (folders["part"] / changed.name).write_bytes(b"none")
    (folders["no part"] / gone.name).unlink()
    (tmp_path / "file").touch()
    calls: dict[str, Callable[[], object]] = {
        "no table": partial(read_manifest, folders["empty"], TABLE),
        "another table": partial(read_manifest, folders["other"], table(8)),
        "another form": partial(read_manifest, folders["form"], TABLE),
        "a part that was changed": partial(read_part, folders["part"], changed),
        "a part that is gone": partial(checked_paths, folders["no part"], [gone]),
        "a file in the folder's place": lambda: writing(tmp_path / "file").__enter__(),
        "no folder": lambda: reading(tmp_path / "absent").__enter__(),
    }
    text = of_refusals(calls)
    monkeypatch.setattr(locks, "held", lambda path: contextlib.nullcontext(False))
    text += "\n" + of_refusals({"no locks": lambda: writing(tmp_path).__enter__()})
    check(Path(__file__).with_name("refusals_parts.txt"), text.replace(str(tmp_path), "FOLDER"))


def test_one_that_is_made_finds_no_table(tmp_path: Path, refused: Refused) -> None:
    refuse_table(tmp_path, "t")
    commit(tmp_path, manifest())
    refused(refuse_table, tmp_path, "t")


def test_a_table_has_one_account(tmp_path: Path, refused: Refused) -> None:
    own = accounts.of_records(tmp_path / "own.db")
    refused(lambda: check_account(manifest(), own.history()))
    own.name_table(ID)
    check_account(manifest(version=7), own.history())
    own.close()


SCHEMA = schema_of(TABLE.space, named=True)


def rows(count: int = 3) -> pa.Table:
    at = np.stack([np.arange(count), np.arange(count) * 100_000], axis=1)
    ids = np.arange(2 * count, dtype=np.uint64).reshape(-1, 2)
    return table_of(SCHEMA, at, True, ids)


def test_columns_are_as_narrow_as_their_dimension() -> None:
    for high, kind in ((255, pa.uint8()), (256, pa.uint16()), (65_535, pa.uint16()),
                       (65_536, pa.uint32()), ((1 << 32) - 1, pa.uint32()),
                       (1 << 32, pa.int64())):  # fmt: skip
        assert schema_of(table(high).space, named=False).field("x0").type == kind
    assert schema_of(TABLE.space, named=False).names == ["x0", "x1", "usable"]


def test_a_part_is_what_was_written(tmp_path: Path) -> None:
    part = write_part(tmp_path, rows(), True)
    part_rows = read_part(tmp_path, part)
    assert part_rows.schema.equals(SCHEMA) and part_rows.equals(rows())
    assert ids_in(part_rows).tolist() == [[0, 1], [2, 3], [4, 5]]
    assert ids_in(part_rows.slice(1)).tolist() == [[2, 3], [4, 5]]
    both = pa.concat_tables([part_rows.slice(2), part_rows.slice(0, 1)])
    assert ids_in(both).tolist() == [[4, 5], [0, 1]]
    assert checked_paths(tmp_path, [part, part]) == [str(tmp_path / part.name)] * 2


def test_records_of_a_row_group_are_in_the_order_of_their_budgets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "GROUP_ROWS", 4)
    at = np.array([[0, 3], [1, 1], [2, 3], [3, 0], [4, 9], [5, 2]])
    ids = np.arange(12, dtype=np.uint64).reshape(-1, 2)
    given = table_of(SCHEMA, at, True, ids)
    assert budgets_of(TABLE.space) == ("x1",)
    part_rows = read_part(tmp_path, write_part(tmp_path, given, True, budgets_of(TABLE.space)))
    # Equal ones stay in their order, and nobody leaves the row group.
    assert part_rows.column("x0").to_pylist() == [3, 1, 0, 2, 5, 4]
    assert part_rows.column("x1").to_pylist() == [0, 1, 3, 3, 2, 9]
    assert ids_in(part_rows)[:, 0].tolist() == [6, 2, 0, 4, 10, 8]
    assert part_rows.schema.equals(SCHEMA)


def test_the_first_of_two_budgets_counts_before_the_second() -> None:
    rows = pa.table({"x0": [2, 1, 1, 2], "x1": [5, 7, 6, 4]})
    assert parts.ordered(rows, ("x0", "x1")).column("x1").to_pylist() == [6, 7, 4, 5]
    same = pa.table({"x0": [3, 3], "x1": [5, 4]})
    assert parts.ordered(same, ("x0",)) is same
    assert parts.ordered(rows.slice(0, 0), ("x0",)).num_rows == 0


def test_every_byte_of_a_part_counts(tmp_path: Path, refused: Refused) -> None:
    part = write_part(tmp_path, rows(), True)
    path = tmp_path / part.name
    data = path.read_bytes()
    flipped = [data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :] for at in range(0, len(data), 7)]
    for damaged in [*flipped, data[:-1]]:
        path.write_bytes(damaged)
        refused(checked_paths, tmp_path, [part])
    path.write_bytes(data)
    assert checked_paths(tmp_path, [part])


def test_a_part_is_read_once_by_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = write_part(tmp_path, rows(5), True)
    checked_paths(tmp_path, [part])
    monkeypatch.setattr(hashlib, "file_digest", None)
    checked_paths(tmp_path, [part])


def test_what_no_version_names_is_swept_when_nobody_reads(tmp_path: Path) -> None:
    with writing(tmp_path):
        old, new = write_part(tmp_path, rows(), True), write_part(tmp_path, rows(4), True)
        (tmp_path / ".x.0123456789abcdef.dpstream-draft").write_bytes(b"torn")
    new_manifest = manifest(new)
    with reading(tmp_path), reading(tmp_path):
        assert not tidy(tmp_path, new_manifest)
        assert (tmp_path / old.name).exists()
    assert tidy(tmp_path, new_manifest)
    assert not (tmp_path / old.name).exists() and (tmp_path / new.name).exists()
    with writing(tmp_path):
        assert not list(tmp_path.glob(".x.*"))


def test_nobody_has_read_yet(tmp_path: Path) -> None:
    old = write_part(tmp_path, rows(), True)
    assert tidy(tmp_path, manifest()) and not (tmp_path / old.name).exists()


def test_row_groups_know_their_bounds(tmp_path: Path) -> None:
    """Scans leave out comparisons that every record meets."""
    part = write_part(tmp_path, rows(), True)
    meta = pq.read_metadata(tmp_path / part.name)
    statistics = [meta.row_group(0).column(place).statistics for place in (0, 1)]
    assert [(s.min, s.max) for s in statistics] == [(0, 2), (0, 200_000)]
