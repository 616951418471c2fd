"""What one unit changes, by execution: exact totals of rows with a unit and without it.

Of every accepted statement the totals that noise is added to are computed as an answer does, in 1,
3 and 7 shards, which must agree.  Without one unit they must differ in at most as many groups as
the plan says, in each by at most what it says a unit adds.  Counts of distinct values are computed
anew in plain Python from the rows that the units keep.
"""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpstream.accounting.query.parts import parts_by_column
from dpstream.dp_transforms.one_shot import bounding
from dpstream.dp_transforms.one_shot.partials import distinct_values, histograms
from dpstream.pipelines.sql.query_plan import Question, question_of, tables_read
from dpstream.pipelines.sql.stage import LocalShards, Sums
from dpstream.pipelines.sql.work import Work
from dpstream.pipelines.tables.catalog import Catalog
from dpstream.pipelines.tables.engine import Engine
from tests.pipelines.sql.hostile import UNITS, catalog, statements, tables

Totals = dict[Any, dict[Any, int]]


def sums_of(question: Question, of: Catalog, shards: int) -> Sums:
    """What an answer of a question computes of its rows, before noise."""
    name = (bytes(16), question.digest.encode())
    with of.secret.ring() as ring, Engine(of, tables_read(question.select, of)) as engine:
        work = Work.of(question.per_column, of, question.plan, name)
        weights = question.gridded.budget(question.plan).weights
        return LocalShards(engine, ring, shards).summed(work, weights)


def totals_of(question: Question, of: Catalog, shards: int = 1) -> Totals:
    """Totals by group: of each part by its number, and of units."""
    sums = sums_of(question, of, shards)
    size = len(sums.totals.units)
    columns: dict[Any, Any] = {"units": sums.totals.units, "weighted": sums.totals.weighted}
    parts = question.gridded.budget(question.plan).parts
    at = parts_by_column(question.plan, [noise.part for noise in parts])
    for column in question.plan.columns:
        for index in at[column.name]:
            if column.distinct:
                columns[index] = distinct_values(sums.rows, column, size)
                assert (columns[index] == _distinct(sums, column.name, size)).all()
            elif column.kind == "quantiles":
                cells = histograms(sums.rows, column, np.arange(size), size)
                columns |= {(index, cell): cells[:, cell] for cell in range(cells.shape[1])}
            else:
                columns[index] = sums.totals.sums[index]
    values = sums.groups.values
    keys = [()] if values is None else [tuple(row.values()) for row in values.to_pylist()]
    assert len(keys) == size
    return {
        name: {key: int(n) for key, n in zip(keys, column, strict=True) if n}
        for name, column in columns.items()
    }


def _distinct(sums: Sums, column: str, size: int) -> np.ndarray[Any, Any]:
    values = [set[int]() for _ in range(size)]
    for rows in sums.rows:
        at, value, _ = rows.rows[column]
        for group, one in zip(rows.group[at].tolist(), value.tolist(), strict=True):
            values[group].add(one)
    return np.array([len(one) for one in values])


def moved(one: dict[Any, int], other: dict[Any, int]) -> dict[Any, int]:
    """By group, by how much two totals differ, where they do."""
    changes = {key: abs(one.get(key, 0) - other.get(key, 0)) for key in one.keys() | other.keys()}
    return {key: change for key, change in changes.items() if change}


def check(question: Question, with_unit: Totals, without: Totals) -> None:
    """Hold what one unit changes to what the plan says."""
    most = question.plan.most_groups if question.select.groups else 1
    noises = question.gridded.budget(question.plan).parts
    units = moved(with_unit["units"], without["units"])
    assert len(units) <= most and set(units.values()) <= {1}
    by_part: dict[int, Counter[Any]] = {}
    for name in with_unit.keys() | without.keys():
        if name in ("units", "weighted"):
            continue
        index = name if isinstance(name, int) else name[0]
        change = moved(with_unit.get(name, {}), without.get(name, {}))
        by_part.setdefault(index, Counter()).update(change)
    for index, changes in by_part.items():
        part = noises[index].part
        limit = part.unit * part.most
        assert len(changes) <= most and all(c <= limit for c in changes.values()), part


def _changes(folder: Path, seeds: range, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Ask the statements of the seeds; how much the unit of each changed."""
    rows, changes = tables(seeds.start), list[int]()
    of = catalog(folder / "all", rows)
    fewer = {}
    for unit in range(UNITS):
        left = {name: t.filter([u.as_py() != unit for u in t["uid"]]) for name, t in rows.items()}
        fewer[unit] = catalog(folder / f"without-{unit}", left)
    for seed, text in zip(seeds, statements(seeds), strict=True):
        unit = random.Random(seed).randrange(UNITS)
        questions, less = question_of(text, of).singles, question_of(text, fewer[unit]).singles
        assert [question.digest for question in questions] == [question.digest for question in less]
        for question in questions:
            every = totals_of(question, of)
            assert totals_of(question, of, 3) == every == totals_of(question, of, 7), text
            others = totals_of(question, fewer[unit])
            check(question, every, others)
            changes.append(sum(sum(moved(every[n], others.get(n, {})).values()) for n in every))
    return changes


def test_one_unit_changes_what_the_plan_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = _changes(tmp_path, range(40), monkeypatch)
    assert sum(change > 0 for change in changes) > 20  # else it would say nothing


@pytest.mark.slow
@pytest.mark.parametrize("start", range(100, 700, 100))
def test_one_unit_changes_what_the_plan_says_of_many(
    start: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _changes(tmp_path, range(start, start + 100), monkeypatch)


def test_values_that_all_units_choose_from_together_are_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A choice that others' rows can push values out of: one unit then changes more."""
    honest = bounding.sampling_keys

    def by_place(ring: Any, purpose: bytes, name: Any, blocks: Any) -> Any:
        if purpose != b"query rows":
            return honest(ring, purpose, name, blocks)
        size = len(blocks[0])
        return np.stack([np.zeros(size), np.arange(size) * 7 % size], axis=1).astype(np.uint64)

    monkeypatch.setattr(bounding, "sampling_keys", by_place)
    with pytest.raises(AssertionError):
        _changes(tmp_path, range(40), monkeypatch)
