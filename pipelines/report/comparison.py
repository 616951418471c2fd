"""Two runs held against each other, from their releases alone.

Windows are matched by their bounds and keys by their columns; only columns that both publish under
one name and kind are compared.  Runs draw their noise apart, so the sd of a difference is the root
of the sum of both squares.  Everything here is post-processing of published values.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.errors import UsageError
from dpstream.dp_transforms.batches import key_fields
from dpstream.pipelines.report.charts import WIDTH
from dpstream.pipelines.report.data import POINTS, thin
from dpstream.pipelines.report.keys import Keys, Parts, gathered, most_rows
from dpstream.pipelines.report.releases import ReleaseFile, floats, newest_rows, ranked_by
from dpstream.pipelines.report.report import Report

#: What is kept of each common column, beside its sd: A's value, B's, and B less A.
SIDES = ("a", "b", "d")


class Agreement(NamedTuple):
    """How far two runs are apart in one column, where both released a value.

    Attributes:
        values: (window, key) pairs with a value in both.
        within: share of differences within 1.96 of their sd; noise alone: 0.95.
        sd_a, sd_b: median sds.
        points: (values of A, values of B) of a sample.
    """

    values: int
    within: float
    sd_a: float
    sd_b: float
    points: tuple[Float64, Float64]


class Comparison(NamedTuple):
    """Two runs.

    Attributes:
        a, b: their reports.
        columns: names that both publish.
        windows: (n,) numbers in A of the windows that both have.
        both, only_a, only_b: (n,) keys released in those windows by both or by one.
        keys: of those windows: rows have ``a:NAME``, ``b:NAME``, ``d:NAME`` and ``..._sd``.
        agreements: by column.
    """

    a: Report
    b: Report
    columns: tuple[str, ...]
    windows: Int64
    both: Int64
    only_a: Int64
    only_b: Int64
    keys: Keys
    agreements: dict[str, Agreement]

    @property
    def same_run(self) -> bool:
        """Whether both hold releases of one run."""
        return bool(set(self.a.run_ids) & set(self.b.run_ids))


def compare(a: Report, b: Report) -> Comparison:
    """Match windows, keys and columns.

    Raises:
        UsageError: keys have other columns, or no column is published by both.
    """
    fields = [(f.name, f.type) for f in key_fields(a.job.plan)]
    if fields != [(f.name, f.type) for f in key_fields(b.job.plan)]:
        raise UsageError(
            "--compare", "has other key columns", "compare runs with the same columns in schema.key"
        )
    kinds = {c.name: c.kind for c in b.job.plan.aggregates}
    columns = tuple(c.name for c in a.job.plan.aggregates if kinds.get(c.name) == c.kind)
    if not columns:
        raise UsageError(
            "--compare",
            "publishes no column of the same name and kind",
            "compare runs that share an [[aggregate]]",
        )
    matched = _matched(a, b)
    tally = _Tally(columns, len(matched))
    schema = _schema(a, columns)
    names = [name for name, _ in fields]
    keys = gathered(
        tally.counted(_parts(a, b, matched, schema)), _parts(a, b, matched, schema),
        names, "_rank", schema, most_rows(len(SIDES) * len(columns)),
    )  # fmt: skip
    windows = np.array([window for window, _, _ in matched], np.int64)
    both, only_a, only_b = tally.counts
    agreements = {name: tally.agreement(name) for name in columns}
    return Comparison(a, b, columns, windows, both, only_a, only_b, keys, agreements)


Matched = list[tuple[int, list[ReleaseFile], list[ReleaseFile]]]


def _matched(a: Report, b: Report) -> Matched:
    """(number in A, releases of A, releases of B) of the windows with the same bounds."""
    line = b.job.plan.timeline
    others = {line.window_bounds(window): group for window, group in b.found.by_window()}
    line = a.job.plan.timeline
    found = ((w, group, others.get(line.window_bounds(w))) for w, group in a.found.by_window())
    return [(window, mine, other) for window, mine, other in found if other is not None]


def _schema(a: Report, columns: tuple[str, ...]) -> pa.Schema:
    numbers = [f"{side}:{name}{sd}" for name in columns for side in SIDES for sd in ("", "_sd")]
    values = [pa.field(name, pa.float64()) for name in ["_rank", "_a", "_b", *numbers]]
    return pa.schema([*key_fields(a.job.plan), *values])


def _parts(a: Report, b: Report, matched: Matched, schema: pa.Schema) -> Parts:
    """Each common window's keys, released by either."""
    for window, mine, other in matched:
        yield window, _beside(a, b, mine, other, schema)


def _beside(
    a: Report, b: Report, mine: list[ReleaseFile], other: list[ReleaseFile], schema: pa.Schema
) -> pa.Table:
    """One window's rows of A and B side by side; what one has not released is null."""
    keys = [f.name for f in key_fields(a.job.plan)]
    left, right = (
        _renamed(newest_rows(report.job.plan, group), keys, side)
        for report, group, side in ((a, mine, "a"), (b, other, "b"))
    )
    rows = left.join(right, keys=keys, join_type="full outer")
    by = ranked_by(a.job.plan)
    ranks = [pc.fill_null(rows[f"{s}:{by}"], 0.0) for s in "ab" if f"{s}:{by}" in rows.schema.names]
    made = {"_rank": ranks[0] if len(ranks) == 1 else pc.add(*ranks)}
    for name in (n.removeprefix("d:") for n in schema.names if n.startswith("d:")):
        if not name.endswith("_sd"):
            low, high = (floats(rows[f"{side}:{name}_sd"]) for side in "ab")
            difference = floats(rows[f"b:{name}"]) - floats(rows[f"a:{name}"])
            made[f"d:{name}"] = pa.array(difference)
            made[f"d:{name}_sd"] = pa.array(np.hypot(low, high))
    columns = [made[name] if name in made else rows[name] for name in schema.names]
    return pa.table(columns, names=schema.names).cast(schema)


def _renamed(table: pa.Table, keys: list[str], side: str) -> pa.Table:
    """Columns of one side, and a mark (``_a``, ``_b``) that it released the key."""
    names = [name if name in keys else f"{side}:{name}" for name in table.schema.names]
    mark = pa.array(np.ones(table.num_rows))
    return table.rename_columns(names).append_column(f"_{side}", mark)


class _Tally:
    """Counts and samples, taken while the windows are read."""

    def __init__(self, columns: tuple[str, ...], windows: int) -> None:
        self._columns = columns
        self._quota = max(8, 2 * POINTS // max(1, windows))
        self._counts: list[tuple[int, int, int]] = []
        self._values = dict.fromkeys(columns, 0)
        self._within = dict.fromkeys(columns, 0)
        self._points: dict[str, list[Float64]] = {name: [np.zeros((0, 4))] for name in columns}

    def counted(self, parts: Parts) -> Iterator[tuple[int, pa.Table]]:
        """The same parts, counted."""
        for window, part in parts:
            a, b = (np.isfinite(floats(part[mark])) for mark in ("_a", "_b"))
            self._counts.append((int((a & b).sum()), int((a & ~b).sum()), int((b & ~a).sum())))
            for name in self._columns:
                self._take(part, name)
            yield window, part

    def _take(self, part: pa.Table, name: str) -> None:
        names = [f"a:{name}", f"b:{name}", f"a:{name}_sd", f"b:{name}_sd"]
        rows = np.column_stack([floats(part[column]) for column in names])
        rows = rows[np.isfinite(rows).all(axis=1)]
        far = np.abs(rows[:, 1] - rows[:, 0])
        self._values[name] += len(rows)
        self._within[name] += int((far <= WIDTH * np.hypot(rows[:, 2], rows[:, 3])).sum())
        self._points[name].append(_thinned(rows, self._quota))

    @property
    def counts(self) -> Int64:
        """(3, n) keys of both, of A alone, of B alone."""
        return np.array(self._counts, np.int64).reshape(-1, 3).T

    def agreement(self, name: str) -> Agreement:
        """What was taken of a column."""
        rows, count = np.concatenate(self._points[name]), self._values[name]
        points = _thinned(rows, POINTS)
        middle = np.median(rows[:, 2:], axis=0) if len(rows) else np.full(2, np.nan)
        return Agreement(
            count, self._within[name] / count if count else np.nan, float(middle[0]),
            float(middle[1]), (points[:, 0], points[:, 1]),
        )  # fmt: skip


def _thinned(rows: Float64, limit: int) -> Float64:
    """At most so many of the rows, by the size of their first value."""
    _, place = thin(rows[:, 0], np.arange(len(rows), dtype=np.float64), limit)
    return rows[place.astype(np.int64)]


def as_dict(found: Comparison) -> dict[str, Any]:
    """The comparison's figures for machines, JSON-able."""
    bounds = [found.a.job.plan.timeline.window_bounds(int(w))[0] for w in found.windows]
    counts = zip(bounds, found.both, found.only_a, found.only_b, strict=True)
    return {
        "same_run": found.same_run,
        "windows": [
            {"start_micros": start, "both": int(n), "only_a": int(a), "only_b": int(b)}
            for start, n, a, b in counts
        ],
        "columns": {
            name: {
                "values": agreement.values,
                "within_noise": agreement.within if agreement.values else None,
                "median_sd_a": agreement.sd_a if agreement.values else None,
                "median_sd_b": agreement.sd_b if agreement.values else None,
            }
            for name, agreement in found.agreements.items()
        },
    }
