"""The files that workers write for the launcher: sums of a shard's units, in the run's folder.

PRIVATE: only the owner can read the folder, which is removed when the answer is drawn
(`state.locks`).  Sums are exact and by group, without units.  The rows that quantiles are
computed from are (group, value, weight).
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import RunError
from dpstream.dp_transforms.one_shot import Bounded, Totals
from dpstream.dp_transforms.one_shot.groups import Groups
from dpstream.state.durable import PRIVATE, replacing
from dpstream.state.numbers import numbers, values_of

_NONE = np.zeros(0, np.int64)


def place_of(folder: Path, shard: int) -> Path:
    """Return a shard's file; the number of shards is public."""
    return folder / f"shard-{shard:04d}.arrow"


def write_counts(path: Path, counts: dict[str, Int64]) -> None:
    """Write the histograms of a shard."""
    _write(path, [pa.table({"count": numbers(cells)}) for cells in counts.values()])


def read_counts(folder: Path, shards: int, names: Sequence[str]) -> dict[str, Int64]:
    """Return the histograms of all shards, added up.

    Raises:
        RunError: a shard's file is missing.
    """
    out = dict[str, Int64]()
    for shard in range(shards):
        tables = _read(place_of(folder, shard), len(names))
        for name, table in zip(names, tables, strict=True):
            cells = _column(table, "count")
            out[name] = cells + out[name] if name in out else cells
    return out


def write_sums(path: Path, groups: Groups, totals: Totals, rows: Bounded) -> None:
    """Write the sums of a shard by group, and its rows for quantiles."""
    columns = {f"sum_{i}": numbers(part) for i, part in totals.sums.items()}
    columns |= {"units": numbers(totals.units), "weighted": numbers(totals.weighted)}
    values = groups.values
    for i, column in enumerate([] if values is None else values.columns):
        columns[f"group_{i}"] = column
    tables = [pa.table(columns)]
    for at, value, weight in rows.rows.values():
        tables.append(
            pa.table(
                {
                    "group": numbers(rows.group[at]),
                    "value": numbers(value),
                    "weight": numbers(weight),
                }
            )
        )
    _write(path, tables)


def read_sums(
    folder: Path, shards: int, groups: Groups, names: Sequence[str]
) -> Iterator[tuple[Totals, Bounded]]:
    """Yield the sums of each shard by the launcher's codes of groups, to which new ones are added.

    Args:
        names: names of the quantiles columns.

    Raises:
        RunError: a shard's file is missing.
    """
    for shard in range(shards):
        first, *tables = _read(place_of(folder, shard), 1 + len(names))
        by = [name for name in first.column_names if name.startswith("group_")]
        codes = np.zeros(first.num_rows, np.int64)
        if by:
            codes = groups.codes([first.column(name) for name in by])

        def put(name: str, first: pa.Table = first, codes: Int64 = codes) -> Int64:
            out = np.zeros(len(groups.ids), np.int64)
            out[codes] = _column(first, name)
            return out

        sums = [name for name in first.column_names if name.startswith("sum_")]
        column_sums = {int(name.removeprefix("sum_")): put(name) for name in sums}
        rows = {}
        for name, table in zip(names, tables, strict=True):
            parts = [_column(table, part) for part in ("group", "value", "weight")]
            rows[name] = (parts[0], parts[1], parts[2])
        yield (
            Totals(put("units"), put("weighted"), column_sums),
            Bounded(_NONE, codes, _NONE, {}, rows),
        )


def _write(path: Path, tables: Sequence[pa.Table]) -> None:
    with replacing(path, PRIVATE) as draft, open(draft, "wb") as out:
        for table in tables:
            with pa.ipc.new_stream(out, table.schema) as stream:
                stream.write_table(table)


def _read(path: Path, tables: int) -> list[pa.Table]:
    """Read several tables from one file, one after the other."""
    try:
        with pa.memory_map(str(path)) as file:
            return [pa.ipc.open_stream(file).read_all() for _ in range(tables)]
    except (OSError, pa.ArrowInvalid):
        failure = RunError(
            "runner",
            "has not handed over a part of the answer",
            "give workers and this process one folder: the account's",
        )
    raise failure


def _column(table: pa.Table, name: str) -> Int64:
    return np.asarray(values_of(table.column(name)), np.int64)
