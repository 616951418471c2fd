"""All keys of a run: how busy each is, and the rows of them that a page holds.

A page holds at most `PAGE_NUMBERS` numbers, so that it stays quick on a phone whatever the run.
Keys are ranked by a column's sum over all windows.  The busiest come first, each with its newest
value; what is left of the numbers goes to every window of the busiest of them.  Everything here is
post-processing of published values, in bounded memory.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.accounting.arrays import Bool, Int64

#: Values and sds on a page; about 10 bytes each.
PAGE_NUMBERS = 100_000
#: Keys held while they are counted; of more, those that were small so far are dropped.
HELD_KEYS = 1_000_000
#: A window's number and a part of its rows, each (window, key) once.
Parts = Iterable[tuple[int, pa.Table]]
_TOTALS = {"_total": "sum", "_windows": "sum", "_newest": "max"}


class Keys(NamedTuple):
    """The keys of a run.

    Attributes:
        ranked: key columns, ``_total``, ``_windows`` (how many have the key) and ``_newest`` (the
            last of them), busiest first: those whose values a page holds.
        rows: ``_key`` (place in ``ranked``), ``_window`` and the parts' other columns, in the
            order (key, window): a key's last row is its newest.
        complete: so many of the first have all their windows in ``rows``.
        distinct: how many keys there are; ``exact``: not only at least.
        values: (window, key) pairs there are.
    """

    ranked: pa.Table
    rows: pa.Table
    complete: int
    distinct: int
    exact: bool
    values: int


def most_rows(columns: int) -> int:
    """Rows that a page holds of so many published columns, each a value and an sd."""
    return max(1, PAGE_NUMBERS // (2 * columns))


def gathered(
    first: Parts, again: Parts, names: list[str], by: str, schema: pa.Schema, limit: int
) -> Keys:
    """Rank keys and pick the rows of a page.

    Args:
        first, again: the same parts, which are read twice.
        names: key columns; ``by``: the column whose sum ranks.
        schema: of the parts.
        limit: rows that a page may hold.
    """
    totals, exact = _totals(first, names, by, schema)
    order = [("_total", "descending"), *((name, "ascending") for name in names)]
    ranked = totals.sort_by(order)
    windows = ranked["_windows"].to_numpy()
    distinct, values = ranked.num_rows, int(windows.sum())
    ranked, windows = ranked.slice(0, limit), windows[:limit]
    # The newest of each key is in; the others as far as they go.
    extra = np.cumsum(windows - 1)
    key_count = int(np.searchsorted(extra, limit - len(windows), side="right"))
    rows = pa.concat_tables(_picked(again, names, ranked, key_count, schema))
    rows = rows.sort_by([("_key", "ascending"), ("_window", "ascending")])
    return Keys(ranked, rows, key_count, distinct, exact, values)


def _totals(parts: Parts, names: list[str], by: str, schema: pa.Schema) -> tuple[pa.Table, bool]:
    """Key columns and totals of every key, and whether none was dropped."""
    fields = [schema.field(name) for name in names]
    fields += [pa.field("_total", pa.float64()), pa.field("_windows", pa.int64())]
    empty = pa.schema([*fields, pa.field("_newest", pa.int64())]).empty_table()
    held, rows, limit, exact = [empty], 0, HELD_KEYS, True
    for window, part in parts:
        one = pa.array(np.ones(part.num_rows, np.int64))
        mine = part.select(names).append_column("_total", pc.fill_null(part[by], 0.0))
        mine = mine.append_column("_windows", one)
        held.append(mine.append_column("_newest", _same(part.num_rows, window)))
        rows += part.num_rows
        if rows > limit:
            folded = _folded(held, names)
            exact &= folded.num_rows <= HELD_KEYS
            held = [folded.sort_by([("_total", "descending")]).slice(0, HELD_KEYS)]
            rows = held[0].num_rows
            limit = rows + HELD_KEYS
    return _folded(held, names), exact


def _folded(held: list[pa.Table], names: list[str]) -> pa.Table:
    grouped = pa.concat_tables(held).group_by(names).aggregate(list(_TOTALS.items()))
    kinds = [f"{name}_{how}" for name, how in _TOTALS.items()]
    return grouped.select([*names, *kinds]).rename_columns([*names, *_TOTALS])


def _picked(
    parts: Parts, names: list[str], ranked: pa.Table, key_count: int, schema: pa.Schema
) -> Iterator[pa.Table]:
    """The rows of ranked keys: all of the first ``key_count``, of the others the newest."""
    place = pa.array(np.arange(ranked.num_rows))
    places = ranked.select(names).append_column("_key", place)
    newest = ranked["_newest"].to_numpy()
    others = [name for name in schema.names if name not in names]
    fields = [pa.field("_key", pa.int64()), pa.field("_window", pa.int64())]
    yield pa.schema([*fields, *(schema.field(name) for name in others)]).empty_table()
    for window, part in parts:
        both = part.join(places, keys=names, join_type="inner")
        key = both["_key"].to_numpy()
        both = both.filter(pa.array((key < key_count) | (newest[key] == window)))
        if both.num_rows:
            both = both.append_column("_window", _same(both.num_rows, window))
            yield both.select(["_key", "_window", *others])


def _same(count: int, number: int) -> pa.Array:
    return pa.array(np.full(count, number, np.int64))


def newest_rows(keys: Keys, complete: Bool | None = None) -> Int64:
    """Places of each key's newest row in ``rows``, in the order of ``ranked``.

    Args:
        complete: mask of the rows of windows that are over and not cut: a key that has such rows
            is taken from the newest of them.
    """
    key = keys.rows["_key"].to_numpy()
    if not len(key):
        return np.zeros(0, np.int64)
    ends = np.flatnonzero(np.append(key[1:] != key[:-1], True))
    if complete is None:
        return ends
    places = np.where(complete, np.arange(len(key)), -1)
    newest = np.maximum.reduceat(places, np.append(0, ends[:-1] + 1))
    return np.where(newest < 0, ends, newest)
