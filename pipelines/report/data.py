"""What the report's pictures show, read in bounded memory: a row per release, six keys, a few
hundred points, and the rows of `pipelines.report.keys`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.accounting.arrays import Bool, Float64, Int64
from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms.batches import key_fields
from dpstream.pipelines.formats.encodings import read_parts
from dpstream.pipelines.report.keys import Keys, Parts, gathered, most_rows
from dpstream.pipelines.report.releases import (
    Inventory,
    ReleaseFile,
    floats,
    newest,
    ranked_by,
    value_schema,
)

#: Keys shown one by one; more small pictures are not read.
BUSIEST = 6
#: Points of a scatter; more do not show more, but make a page heavy.
POINTS = 600
#: Triggers of one window whose values are drawn; further ones are skipped evenly.
DRAWN_TRIGGERS = 400


class Findings(NamedTuple):
    """What the pictures show.

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
    line = plan.timeline
    complete = {
        window: group[-1].trigger == line.triggers and line.window_bounds(window)[1] <= line.horizon
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
    """The newest rows of some windows."""
    for window, group in groups.items():
        for part in newest(plan, group):
            yield window, part


def thin(values: Float64, sds: Float64, limit: int) -> tuple[Float64, Float64]:
    """At most ``limit`` of the points: the largest quarter, and the rest evenly by size."""
    order = np.argsort(-np.abs(values), kind="stable")
    if len(order) > limit:
        head = limit // 4
        rest = np.linspace(head, len(order) - 1, limit - head).astype(np.int64)
        order = np.concatenate([order[:head], order[rest]])
    return values[order], sds[order]


def evenly(count: int, limit: int) -> Int64:
    """At most ``limit`` of the numbers below ``count``, first and last among them."""
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
