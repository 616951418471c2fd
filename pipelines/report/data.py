"""The data of the report on a run's releases, read in bounded memory.

**Releases** are an inventory, and the newest row of each key.  Only needed columns are read, a file
(of Parquet: a part of a file) at a time, and nothing that is private.

**Pictures** show a row per release, six keys, a few hundred points, and the rows of `Keys`.

**All keys** of a run: how busy each is, and the rows of them that a page holds.  A page holds at
most `PAGE_NUMBERS` numbers, so that it stays quick on a phone whatever the run.  Keys are ranked by
a column's sum over all windows.  The busiest come first, each with its newest value; what is left
of the numbers goes to every window of the busiest of them.

Everything here is post-processing of published values.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.accounting.arrays import Bool, Float64, Int64
from dpstream.accounting.errors import UsageError
from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms.batches import key_fields, release_schema
from dpstream.dp_transforms.selection import publishes
from dpstream.pipelines.formats.encodings import name_of, read_parts, release_paths
from dpstream.pipelines.jobs.job import Job


class ReleaseFile(NamedTuple):
    """One release of the sink.

    Its window and trigger, its place, its number of keys, and whether its CSV is guarded (see
    `pipelines.formats.encodings`).
    """

    window: int
    trigger: int
    path: Path
    keys: int
    guard: bool = True


class Inventory(NamedTuple):
    """All releases of a folder in the order (window, trigger), and the run ids they bear."""

    releases: tuple[ReleaseFile, ...]
    run_ids: tuple[str, ...]

    def by_window(self) -> Iterator[tuple[int, list[ReleaseFile]]]:
        """Yield (window, its releases), windows in order."""
        for window, group in groupby(self.releases, lambda release: release.window):
            yield window, list(group)


def value_schema(plan: Plan) -> pa.Schema:
    """Return the key columns, then each published column and its sd."""
    wanted = {f.name for f in key_fields(plan)}
    wanted |= {name for a in plan.aggregates for name in (a.name, f"{a.name}_sd")}
    return pa.schema([f for f in release_schema(plan) if f.name in wanted])


def ranked_by(plan: Plan) -> str:
    """Return the column that says how busy a key is: a count if there is one."""
    kinds = {a.kind: a.name for a in reversed(plan.aggregates)}
    return kinds.get("count") or kinds.get("units") or plan.aggregates[0].name


def inventory(job: Job) -> Inventory:
    """Return the releases of a job's sink.

    Raises:
        UsageError: there is no folder, or it holds releases of another plan.
    """
    folder = job.sink.folder
    if folder is None:
        raise UsageError(
            "sink.kind",
            f"is '{job.sink.kind}', and a report reads files",
            "write them with `dpstream state releases JOB --out FOLDER`, and name that folder in "
            "the job's sink",
        )
    if not folder.is_dir():
        raise UsageError(
            "sink.path", "is no folder: nothing was released yet", "run `dpstream run JOB` first"
        )
    schema = release_schema(job.plan)
    stamps = pa.schema([schema.field("plan_hash"), schema.field("run_id")])
    releases, run_ids = [], set()
    for path in release_paths(folder):
        if path.suffix != f".{job.sink.kind}":
            continue
        rows = 0
        for part in read_parts(path, stamps):
            rows += part.num_rows
            run_ids |= set(part["run_id"].unique().to_pylist())
            if part.num_rows and part["plan_hash"].unique().to_pylist() != [job.plan.hash]:
                raise _foreign_releases()
        releases.append(ReleaseFile(*name_of(path), path, rows, job.sink.guarded))
    timeline = job.plan.timeline
    beyond = timeline.end is not None and any(r.window >= timeline.windows for r in releases)
    if beyond or any(r.window < 0 or not 1 <= r.trigger <= timeline.triggers for r in releases):
        raise _foreign_releases()
    return Inventory(tuple(releases), tuple(sorted(run_ids)))


def _foreign_releases() -> UsageError:
    return UsageError(
        "sink.path",
        "holds releases of another plan",
        "give the job they were made with: any other would state a wrong guarantee",
    )


def newest(plan: Plan, releases: Sequence[ReleaseFile]) -> Iterator[pa.Table]:
    """Yield the newest row of each key released in one window, in parts.

    Args:
        releases: the window's, in order of triggers.
    """
    schema = value_schema(plan)
    # A selected key is published at every refresh: nothing older than the last one matters,
    # and what came after it are keys selected since, each once.
    for release in reversed(releases):
        yield from read_parts(release.path, schema, release.guard)
        if publishes(plan, release.trigger):
            return


def floats(column: pa.ChunkedArray) -> Float64:
    """Return a column of numbers; null is NaN."""
    return np.asarray(column.to_numpy(zero_copy_only=False), np.float64)


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
    """Return how many rows a page holds of ``columns`` published columns, each a value and an
    sd.
    """
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


def newest_of_each(keys: Keys, complete: Bool | None = None) -> Int64:
    """Return the positions of each key's newest row in ``rows``, in the order of ``ranked``.

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


#: Keys shown one by one; more small pictures are not read.
BUSIEST = 6
#: Points of a scatter; more do not show more, but make a page heavy.
POINTS = 600
#: Triggers of one window whose values are drawn; further ones are skipped evenly.
DRAWN_TRIGGERS = 400


class Findings(NamedTuple):
    """The data of the pictures.

    Attributes:
        windows, last_trigger, keys: (n,) windows with releases, how far each has come, and how
            many distinct keys the public knows of it.
        complete: (n,) mask: all triggers are released, and the job's end does not cut the window.
        all_keys: of all windows, ranked; final values, or those so far.
        drawn_window: releases of the last complete window that has keys (where none is complete,
            of the newest that has keys); may be empty.
        busiest: (up to six rows) key columns of the busiest keys over all windows.
        series: for each of them a table of ``trigger``, values and sds over the drawn window.
        scatter: published column -> (values, sds) of a sample of each window's newest values.
    """

    windows: Int64
    last_trigger: Int64
    keys: Int64
    complete: Bool
    all_keys: Keys
    drawn_window: tuple[ReleaseFile, ...]
    busiest: pa.Table
    series: tuple[pa.Table, ...]
    scatter: dict[str, tuple[Float64, Float64]]


def collect(plan: Plan, inventory: Inventory) -> Findings:
    """Read what the pictures need."""
    groups = dict(inventory.by_window())
    keyed_groups = {
        w: group for w, group in groups.items() if any(release.keys for release in group)
    }
    names = [a.name for a in plan.aggregates]
    points: dict[str, list[tuple[Float64, Float64]]] = {name: [] for name in names}
    quota = max(8, 2 * POINTS // max(1, len(keyed_groups)))
    keys = dict.fromkeys(groups, 0)

    def once() -> Parts:
        """Every window's newest rows; the first reading counts keys and takes the points."""
        for window, part in parts_of(plan, keyed_groups):
            keys[window] += part.num_rows
            for name in names:
                points[name].append(thin(*_pair(part, name), quota))
            yield window, part

    key_names = [f.name for f in key_fields(plan)]
    every = gathered(
        once(),
        parts_of(plan, keyed_groups),
        key_names,
        ranked_by(plan),
        value_schema(plan),
        most_rows(len(names)),
    )
    timeline = plan.timeline
    complete = {
        window: group[-1].trigger == timeline.triggers
        and timeline.window_bounds(window)[1] <= timeline.horizon
        for window, group in groups.items()
    }
    drawn = max(keyed_groups, key=lambda window: (complete[window], window), default=None)
    drawn_window = () if drawn is None else tuple(groups[drawn])
    busiest = every.ranked.slice(0, BUSIEST).select(key_names)
    return Findings(
        windows=np.array(list(groups), np.int64),
        last_trigger=np.array([group[-1].trigger for group in groups.values()], np.int64),
        keys=np.array(list(keys.values()), np.int64),
        complete=np.array(list(complete.values()), np.bool_),
        all_keys=every,
        drawn_window=drawn_window,
        busiest=busiest,
        series=_series(plan, drawn_window, busiest),
        scatter={name: thin(*_joined(points[name]), POINTS) for name in names},
    )


def parts_of(plan: Plan, groups: dict[int, list[ReleaseFile]]) -> Parts:
    """Return the newest rows of some windows."""
    for window, group in groups.items():
        for part in newest(plan, group):
            yield window, part


def thin(values: Float64, sds: Float64, limit: int) -> tuple[Float64, Float64]:
    """Return at most ``limit`` of the points: the largest quarter, and the rest evenly by size."""
    order = np.argsort(-np.abs(values), kind="stable")
    if len(order) > limit:
        head = limit // 4
        rest = np.linspace(head, len(order) - 1, limit - head).astype(np.int64)
        order = np.concatenate([order[:head], order[rest]])
    return values[order], sds[order]


def evenly(count: int, limit: int) -> Int64:
    """Return at most ``limit`` of the numbers below ``count``, first and last among them."""
    return np.unique(np.linspace(0, max(0, count - 1), min(count, limit)).astype(np.int64))


def _pair(table: pa.Table, name: str) -> tuple[Float64, Float64]:
    """Values and sds of a column where both are defined."""
    values, sds = (floats(table[column]) for column in (name, f"{name}_sd"))
    finite = np.isfinite(values) & np.isfinite(sds)
    return values[finite], sds[finite]


def _joined(parts: list[tuple[Float64, Float64]]) -> tuple[Float64, Float64]:
    none = (np.zeros(0), np.zeros(0))
    values, sds = zip(*[none, *parts], strict=True)
    return np.concatenate(values), np.concatenate(sds)


def _series(plan: Plan, releases: Sequence[ReleaseFile], keys: pa.Table) -> tuple[pa.Table, ...]:
    """The released rows of a few keys over one window's triggers."""
    if not keys.num_rows or not releases:
        return ()
    number = pa.field("trigger", pa.int64())
    none = value_schema(plan).append(number).empty_table()
    held: list[list[pa.Table]] = [[none] for _ in range(keys.num_rows)]
    for at in evenly(len(releases), DRAWN_TRIGGERS):
        release = releases[at]
        for part in read_parts(release.path, value_schema(plan), release.guard):
            for row, tables in enumerate(held):
                mine = part.filter(_is_key(plan, part, keys, row))
                trigger = np.full(mine.num_rows, release.trigger, np.int64)
                tables.append(mine.append_column(number, pa.array(trigger)))
    return tuple(pa.concat_tables(tables) for tables in held)


def _is_key(plan: Plan, table: pa.Table, keys: pa.Table, row: int) -> pa.ChunkedArray:
    masks = [pc.equal(table[f.name], keys[f.name][row]) for f in key_fields(plan)]
    mask = masks[0]
    for other in masks[1:]:
        mask = pc.and_(mask, other)
    return mask
