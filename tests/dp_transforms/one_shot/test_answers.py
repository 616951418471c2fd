"""Answers: exact without noise, named noise, selection, and nothing heavy imported.

Groups get codes and ids of their own, whatever shard they come in.
"""

import datetime
import decimal
import math
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.query.calibration import allocate_query
from dpstream.accounting.query.parts import middle_of
from dpstream.accounting.query.plan import QueryColumn, QueryPlan
from dpstream.dp_transforms.noise.ids import ID_KINDS
from dpstream.dp_transforms.noise.oneshot import OneShot
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.one_shot import Partials, QueryAnswer, aggregated, answer, bounded
from dpstream.dp_transforms.one_shot.groups import Groups
from dpstream.dp_transforms.one_shot.partials import Totals
from tests.pipelines.sql.asking import KEY
from tests.queries import (
    ALL,
    COUNT,
    QUANTILES,
    ROWS,
    RUN,
    STDDEV,
    SUM,
    UNITS,
    VAR,
    Raw,
    generated,
    on_grid,
    query,
    raw,
    stage_one,
)  # fmt: skip


def answer_of(plan: QueryPlan, partials: Partials, ring: KeyRing, run: Any = RUN) -> QueryAnswer:
    budget = allocate_query(plan)
    rows = bounded(plan, partials, ring, run)
    totals = aggregated(rows, len(partials.group_ids), budget.weights)
    return answer(plan, budget, totals, [rows], partials.group_ids, ring, run)


def silence(monkeypatch: pytest.MonkeyPatch) -> None:
    for law, shape in (
        ("rounded_gaussian", ()),
        ("discrete_laplace", ()),
        ("staircase", ()),
        ("truncated_geometric", (2,)),
    ):
        monkeypatch.setattr(
            OneShot, law, lambda self, items, *_, of=shape: np.zeros((*of, len(items)), np.int64)
        )


@pytest.fixture
def noiseless(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    silence(monkeypatch)
    yield


def by_definition(column: QueryColumn, table: Raw, group: int, sd: float = 0) -> float | None:
    """The exact figure of the bounded rows, from the raw table; a mean drawn to the middle, as a
    count with noise of ``sd`` draws it.
    """
    mine = defaultdict(list)
    for u, g, v in zip(*(part.tolist() for part in table), strict=True):
        if g == group:
            mine[u].append(v)
    if column.kind == "units" or column is COUNT:
        return float(len(mine))
    if column.kind == "count":
        return float(sum(min(len(v), column.rows) for v in mine.values()))
    if column.per == "group":
        return sum(on_grid(column, sum(v)) for v in mine.values()) * column.grid
    # The slow stage 1 takes the smallest rows.
    values = [on_grid(column, v) * column.grid for of in mine.values() for v in
              sorted(of)[: column.rows]]  # fmt: skip
    if column.kind == "sum":
        return float(sum(values))
    if not values:
        return None
    mean = sum(values) / len(values)
    if column.kind == "mean":
        middle, n = middle_of(column) * column.grid, len(values)
        return middle + (mean - middle) * n * n / (n * n + sd * sd)
    variance = sum((v - mean) ** 2 for v in values) / len(values)
    return variance if column.kind == "var" else math.sqrt(variance)


@pytest.mark.parametrize("mechanism", ["gaussian", "geometric"])
@pytest.mark.usefixtures("noiseless")
def test_without_noise_the_answer_is_exact(mechanism: str, ring: KeyRing) -> None:
    plan = query(*ALL[:-1], groups=64, selects=False, mechanism=mechanism)
    table = generated(4, units=30, groups=12, rows=900)
    answers = answer_of(plan, stage_one(plan, table), ring)
    assert sorted(answers.group) == list(range(64))
    sds = {n.part.column: n.sd / n.part.unit for n in allocate_query(plan).parts}  # of counts, last
    for column in plan.columns:
        got = answers.columns[column.name]
        for group, value, low, high in zip(
            answers.group.tolist(), got.value, got.low, got.high, strict=True
        ):
            wanted = by_definition(column, table, group, sds.get(column.name, 0))
            if wanted is None:
                assert math.isnan(value) and math.isnan(low) and math.isnan(high)
            else:
                assert value == pytest.approx(wanted, abs=1e-9), (column.name, group)
                assert low <= value <= high


@pytest.mark.usefixtures("noiseless")
def test_without_noise_a_norm_scales_each_unit(ring: KeyRing) -> None:
    plan = query(COUNT, SUM, groups=None, norm=2.0, selects=False)
    table = raw([(0, g, 1.0) for g in range(16)] + [(1, 0, 1.0), (1, 1, 1.0)])
    answers = answer_of(plan, stage_one(plan, table), ring)
    counts = dict(zip(answers.group.tolist(), answers.columns["n"].value, strict=True))
    assert counts[0] == pytest.approx(1 + 0.5, abs=2e-5) and counts[5] <= 0.5
    assert counts[5] == pytest.approx(0.5, abs=2e-5)
    sums = dict(zip(answers.group.tolist(), answers.columns["s"].value, strict=True))
    assert sums[0] == pytest.approx(1 + 0.5, abs=2e-5)


def crowd(sizes: list[int]) -> Raw:
    """Group g has so many units, each in no other group."""
    rows, unit = [], 0
    for group, size in enumerate(sizes):
        for _ in range(size):
            rows.append((unit, group, 5.0))
            unit += 1
    return raw(rows)


@pytest.mark.parametrize("mechanism", ["gaussian", "geometric"])
@pytest.mark.parametrize("columns", [(UNITS, SUM), (SUM,), (COUNT,)])
def test_selection_is_at_its_threshold(
    mechanism: str, columns: tuple[QueryColumn, ...], ring: KeyRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without noise a group of units with one group each passes from ``even_chance`` units on."""
    plan = query(*columns, mechanism=mechanism, epsilon=3.0, groups=2)
    silence(monkeypatch)
    for least in (1, 40):
        now = msgspec.structs.replace(plan, min_units=least)
        chosen = allocate_query(now).selection
        assert chosen is not None
        chance = math.floor(chosen.even_chance(1, least)) + (least < 2)
        sizes = [1, chance - 1, chance, chance + 1, chance + 2, 200]
        table = crowd(sizes)
        partials = stage_one(now, table, units=800)
        answers = answer_of(now, partials, ring)
        passed = {sizes[g] for g in answers.group.tolist()}
        each = chosen.weighted * (chosen.weights or (0,))[0] + chosen.counted
        assert passed == {
            size for size in sizes if size >= least and size * each > chosen.need(least)
        }
        assert 200 in passed and 1 not in passed


def test_the_same_run_says_the_same(ring: KeyRing) -> None:
    plan = query(*ALL, epsilon=20.0)
    table = generated(4, units=60, groups=8, rows=2_000)
    partials = stage_one(plan, table)
    one, two = answer_of(plan, partials, ring), answer_of(plan, partials, ring)
    other = answer_of(plan, partials, ring, (b"\x12" * 16, b"question"))
    assert len(one.group) > 3
    for name, estimate in one.columns.items():
        for a, b in zip(estimate, two.columns[name], strict=True):
            assert np.array_equal(a, b, equal_nan=True)
    common = np.intersect1d(one.group, other.group)
    values = [a.columns["s"].value[np.isin(a.group, common)] for a in (one, other)]
    assert (values[0] != values[1]).any()


def test_noise_is_a_groups_own(ring: KeyRing) -> None:
    """Codes and the other groups decide nothing about a group's noise and place."""
    plan = query(*ALL, epsilon=20.0, groups=64)
    partials = stage_one(plan, generated(4, units=60, groups=8, rows=2_000))
    codes = np.random.default_rng(1).permutation(64)
    other = partials._replace(
        group=codes[partials.group],
        group_ids=partials.group_ids[np.argsort(codes)],
        rows={"q": partials.rows["q"]._replace(group=codes[partials.rows["q"].group])},
    )
    one, two = answer_of(plan, partials, ring), answer_of(plan, other, ring)
    assert len(one.group) > 3 and (codes[one.group] == two.group).all()
    for name, estimate in one.columns.items():
        assert np.array_equal(estimate.value, two.columns[name].value, equal_nan=True)


def test_noise_of_columns_differs(ring: KeyRing) -> None:
    """Two columns of the same figures and scales have noise of their own."""
    plan = query(QueryColumn("a", "units"), QueryColumn("b", "units"), groups=1, selects=False)
    answers = answer_of(plan, stage_one(plan, generated(1)), ring)
    assert (answers.columns["a"].value != answers.columns["b"].value).mean() > 0.5


CLOSE = 0.011


@pytest.mark.parametrize("mechanism", ["gaussian", "geometric"])
def test_intervals_cover(mechanism: str, ring: KeyRing) -> None:
    """95% +- 1% of 12,000 groups of the same content, each with its own noise."""
    inner = QueryColumn("m", "mean", 0, 12, rows=3, grid=0.25)
    columns = (ROWS, SUM, inner, VAR, STDDEV, UNITS)
    plan = query(*columns, epsilon=1.0, groups=1, selects=False, mechanism=mechanism)
    random = np.random.default_rng(3)
    size, copies = 1_200, 12_000
    rows = [(u, 0, float(v)) for u, v in enumerate(random.normal(6, 3, size))]
    table = raw(rows)
    one = stage_one(plan, table, units=size, groups=1)
    bound = bounded(plan, one, ring, RUN)
    # The rows of one group, summed once and noised under many ids.
    budget = allocate_query(plan)
    exact = aggregated(bound, 1)
    copied = exact._replace(
        units=np.repeat(exact.units, copies),
        weighted=np.repeat(exact.weighted, copies),
        sums={i: np.repeat(s, copies) for i, s in exact.sums.items()},
    )
    ids = np.stack([np.arange(copies), np.arange(copies)], axis=1).astype(np.uint64)
    answers = answer(plan, budget, copied, [bound], ids, ring, RUN)
    for column in columns:
        wanted = by_definition(column, table, 0)
        got = answers.columns[column.name]
        assert wanted is not None
        inside = ((got.low <= wanted) & (wanted <= got.high)).mean()
        assert abs(inside - 0.95) < CLOSE, (column.name, inside)
        assert got.value.std() == pytest.approx(np.mean(got.sd), rel=0.08), column.name


def test_an_empty_table(ring: KeyRing) -> None:
    answers = answer_of(query(*ALL), stage_one(query(*ALL), raw([])), ring)
    assert len(answers.group) == 0 and answers.columns["q"].value.shape == (0, 5)
    plan = query(*ALL, selects=False)
    answers = answer_of(plan, stage_one(plan, raw([])), ring)
    assert len(answers.group) == 64


HEAVY = [
    "apache_beam", "scipy.signal", "scipy.stats", "dp_accounting", "pyarrow", "duckdb",
    "dpstream.dp_transforms.telemetry", "dpstream.dp_transforms.flow",
]  # fmt: skip


def test_nothing_heavy_is_imported() -> None:
    code = "import sys, dpstream.dp_transforms.one_shot, dpstream.accounting.query.calibration;"
    code += f"print([name for name in {HEAVY!r} if name in sys.modules])"
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert completed.stdout.strip() == "[]"


def test_quantiles_are_a_row_for_each_group(ring: KeyRing) -> None:
    plan = query(QUANTILES, epsilon=50.0, selects=False)
    answers = answer_of(plan, stage_one(plan, generated(4, rows=2_000)), ring)
    assert answers.columns["q"].value.shape == (64, 5)


def released_alone(plan: QueryPlan, groups: int, ring: KeyRing, lower: int = 0) -> float:
    """Part of 12,000 units, each alone in so many groups, of which any group is released.

    Args:
        lower: taken from the threshold (sabotage).
    """
    units = 12_000
    random = np.random.default_rng(8)
    unit_ids, group_ids = (
        random.integers(0, 1 << 63, (n, 2)).astype(np.uint64) for n in (units, units * groups)
    )
    unit, ones = np.repeat(np.arange(units), groups), np.ones(units * groups, np.int64)
    partials = Partials(unit, np.arange(units * groups), unit_ids, group_ids, (ones, ones))
    budget = allocate_query(plan)
    assert budget.selection is not None
    tau = budget.selection.threshold - lower
    chosen = msgspec.structs.replace(budget.selection, threshold=tau)
    budget = msgspec.structs.replace(budget, selection=chosen)
    rows = bounded(plan, partials, ring, RUN)
    totals = aggregated(rows, len(group_ids), budget.weights)
    answers = answer(plan, budget, totals, [rows], group_ids, ring, RUN)
    return len(np.unique(unit[answers.group])) / units


@pytest.mark.parametrize("mechanism", ["gaussian", "geometric"])
def test_a_unit_alone_is_seldom_seen(mechanism: str, ring: KeyRing) -> None:
    """From the outside, at a large delta: whatever number of groups a unit is alone in."""
    column = QueryColumn("a", "count", 0, 1, per="group")
    plan = query(column, SUM, epsilon=1.0, delta=0.2, groups=4, mechanism=mechanism)
    most = allocate_query(plan).threshold_delta or plan.delta
    error = 4 * math.sqrt(most / 12_000)
    seen = [released_alone(plan, groups, ring) for groups in (1, 2, 3, 4)]
    assert max(seen) <= most + error
    assert max(seen) > most / 2
    chosen = allocate_query(plan).selection
    assert chosen is not None
    assert released_alone(plan, 4, ring, 2 * chosen.most) > most + error


def test_the_tested_count_is_the_published_one(ring: KeyRing) -> None:
    """With noise of its own a second count of the same units would be released, unpaid."""
    plan = query(UNITS, mechanism="geometric", groups=1)
    chosen = allocate_query(plan).selection
    assert chosen is not None
    table = crowd([chosen.threshold] * 40)
    answers = answer_of(plan, stage_one(plan, table, units=40 * chosen.threshold), ring)
    assert 5 < len(answers.group) < 35
    assert (answers.columns["u"].value >= chosen.threshold).all()


def test_columns_come_in_any_order(ring: KeyRing) -> None:
    plan = query(QUANTILES, COUNT, selects=False)
    answers = answer_of(plan, stage_one(plan, generated(1)), ring)
    assert set(answers.columns) == {"q", "n"} and answers.columns["n"].value.shape == (64,)


def test_keys_alone_of_one_a_unit_are_shown_by_the_optimum(ring: KeyRing) -> None:
    """At a large delta: keys of n units are shown as often as p_n says, and no count is drawn."""
    plan = query(mechanism="geometric", groups=1, epsilon=1.0, delta=0.05)
    budget = allocate_query(plan)
    assert budget.parts == () and budget.mu is None and budget.selection is not None
    chances = [0.0]
    while chances[-1] < 1:
        grown = math.e * chances[-1] + 0.05
        chances.append(min(grown, 1 - (1 - chances[-1] - 0.05) / math.e, 1.0))
    for least in (1, 3):
        now = msgspec.structs.replace(plan, min_units=least)
        sizes = [size for size in range(1, len(chances) + least) for _ in range(3_000)]
        ids = np.arange(2 * len(sizes), dtype=np.uint64).reshape(-1, 2)
        units = np.array(sizes, np.int64)
        answers = answer(now, budget, Totals(units, 0 * units, {}), [], ids, ring, RUN)
        shares = np.bincount(units[answers.group], minlength=len(chances) + least) / 3_000
        for size in range(1, len(chances) + least):
            chance = chances[min(max(0, size - least + 1), len(chances) - 1)]
            error = 5 * math.sqrt(max(chance * (1 - chance), 1e-4) / 3_000)
            assert abs(shares[size] - chance) <= error and (chance > 0 or shares[size] == 0)


def _ring() -> KeyRing:
    return KeyRing(bytes.fromhex(KEY))


def _chunked(values: list[object], kind: pa.DataType | None = None) -> pa.ChunkedArray:
    return pa.chunked_array([pa.array(values, kind)])


def test_codes_are_those_of_equal_rows_over_all_shards() -> None:
    groups = Groups(["a", "b"], ["string", "int"], _ring().key)
    first = groups.codes([_chunked(["x", "y", None, "x"]), _chunked([1, 1, None, 1])])
    second = groups.codes([_chunked(["y", "x", None]), _chunked([1, 2, None])])
    assert first.tolist() == [0, 1, 2, 0] and second.tolist() == [1, 3, 2]
    assert groups.values is not None and groups.values.to_pylist() == [
        {"a": "x", "b": 1}, {"a": "y", "b": 1}, {"a": None, "b": None}, {"a": "x", "b": 2},
    ]  # fmt: skip
    assert len(np.unique(groups.ids, axis=0)) == 4


def test_two_spellings_of_a_word_are_two_groups_with_two_ids() -> None:
    """One id for both would be one noise for two sums, whose difference would be exact."""
    groups = Groups(["a"], ["string"], _ring().key)
    assert groups.codes([_chunked(["e\u0301", "\u00e9"])]).tolist() == [0, 1]
    assert (groups.ids[0] != groups.ids[1]).all()


def test_ids_are_of_the_value_not_of_its_place() -> None:
    one, other = (Groups(["a"], ["int"], _ring().key) for _ in range(2))
    one.codes([_chunked([5, 6])])
    other.codes([_chunked([6, 7, 5])])
    assert (one.ids[0] == other.ids[2]).all() and (one.ids[1] == other.ids[0]).all()


def test_public_groups_are_all_there_are() -> None:
    groups = Groups(["a"], ["string"], _ring().key, pa.table({"a": ["q", None, "p"]}))
    assert groups.codes([_chunked(["p", "z", None])]).tolist() == [2, -1, 1]
    assert len(groups.ids) == 3


def test_no_group_columns_is_one_group() -> None:
    groups = Groups([], [], _ring().key)
    assert len(groups.ids) == 1 and groups.values is None


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("int", -5), ("decimal", decimal.Decimal("1.50")), ("bool", True),
        ("string", "x" * 3000), ("bytes", b"\x00y" * 3000),
        ("date", datetime.date(2024, 2, 29)), ("timestamp", datetime.datetime(1960, 1, 2)),
    ],
)  # fmt: skip
def test_every_kind_has_values_and_null(kind: str, value: object) -> None:
    assert kind in ID_KINDS
    groups = Groups(["a"], [kind], _ring().key)
    assert groups.codes([_chunked([value, None, value])]).tolist() == [0, 1, 0]
    assert (groups.ids[0] != groups.ids[1]).any()


def test_no_rows() -> None:
    groups = Groups(["a", "b"], ["string", "date"], _ring().key)
    empty = [_chunked([], pa.string()), _chunked([], pa.date32())]
    assert groups.codes(empty).tolist() == [] and len(groups.ids) == 0
    assert groups.values is not None
    assert groups.values.schema == pa.schema({"a": pa.string(), "b": pa.date32()})
    full = [_chunked(["x"], pa.string()), _chunked([None], pa.date32())]
    assert groups.codes(full).tolist() == [0] and groups.values.num_rows == 1


def test_public_groups_that_are_none() -> None:
    groups = Groups(["a"], ["string"], _ring().key, pa.table({"a": pa.array([], pa.string())}))
    assert groups.codes([_chunked(["x"])]).tolist() == [-1] and len(groups.ids) == 0
    assert groups.values is not None and groups.values.column_names == ["a"]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("int", 0), ("decimal", decimal.Decimal(0)), ("bool", False), ("string", ""),
        ("bytes", b""), ("date", datetime.date(1970, 1, 1)),
        ("timestamp", datetime.datetime(1970, 1, 1)),
    ],
)  # fmt: skip
def test_null_is_no_filler(kind: str, value: object) -> None:
    """One id for both would be one noise for two groups."""
    groups = Groups(["a"], [kind], _ring().key)
    assert groups.codes([_chunked([value, None])]).tolist() == [0, 1]
    assert (groups.ids[0] != groups.ids[1]).any()


def test_the_first_group_stays_the_first() -> None:
    groups = Groups(["a"], ["string"], _ring().key)
    for _ in range(3):
        assert groups.codes([_chunked(["x", "y"])]).tolist() == [0, 1]
    assert groups.codes([_chunked(["z", "x"])]).tolist() == [2, 0] and len(groups.ids) == 3
