"""Bounds of one unit: whatever it brings, the totals move by at most what the budget is for.

``worst`` runs the product on neighbouring tables and measures the shift of everything that is
noised, in units of its noise; sabotaged variants must exceed mu^2.

Automatic bounds from data: one value of each unit, noise by name, a unit's own rows only.
"""

from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from dpstream.accounting.query import calibration, parts
from dpstream.accounting.query.bounds import BoundsDesign, Settled, design_bounds
from dpstream.accounting.query.calibration import QueryBudget, allocate_query
from dpstream.accounting.query.parts import cells_of, tree_of
from dpstream.accounting.query.plan import QueryColumn, QueryPlan
from dpstream.accounting.tuning.question import encoder_matrix
from dpstream.dp_transforms.noise.oneshot import OneShot
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.one_shot import bounding, choose_bounds, partials
from dpstream.dp_transforms.one_shot.bounding import bounded, counted
from dpstream.dp_transforms.one_shot.partials import Bounded, Partials, Rows, aggregated, histograms
from tests.queries import (
    ALL,
    COUNT,
    MEAN,
    QUANTILES,
    ROW_SUM,
    ROWS,
    RUN,
    STDDEV,
    SUM,
    UNITS,
    VAR,
    Raw,
    generated,
    ids,
    query,
    raw,
    stage_one,
)  # fmt: skip

GROUPS = 64
NEWCOMER = 60
#: Sampling keys of three rows under the fixed test secret.
PINNED = [
    "e808c2ef494869f0d244064d94334a28",
    "043fc0f1af9307f586fe02d54c7affa6",
    "de083cc0e87a7b0d88d68933669afec5",
]


def shifts(plan: QueryPlan, budget: QueryBudget, one: Bounded, other: Bounded) -> list[float]:
    """L2 (or L1) shift of each noised vector over its noise."""
    weights = budget.weights
    more, less = (aggregated(rows, GROUPS, weights) for rows in (one, other))
    laplace = budget.mu is None

    def size(moved: npt.NDArray[Any], scale: float) -> float:
        moved = moved.astype(np.float64)
        return float(np.abs(moved).sum() if laplace else np.sqrt((moved**2).sum())) / scale

    out = []
    if weights and budget.selection:
        out.append(size(more.weighted - less.weighted, budget.selection.sigma))
    by_name = {column.name: column for column in plan.columns}
    for index, noise in enumerate(budget.parts):
        if noise.part.what == "tree":
            column = by_name[noise.part.column]
            groups = np.arange(GROUPS)
            moved = histograms([one], column, groups, GROUPS) - histograms(
                [other], column, groups, GROUPS
            )
            out.append(size(moved @ tree_of(cells_of(column)).matrix.T, noise.scale))
        elif noise.part.column:
            out.append(size(more.sums[index] - less.sums[index], noise.scale))
        else:
            out.append(size(more.units - less.units, noise.scale))
    return out


def newcomers(seed: int) -> Iterator[Raw]:
    """What one unit may bring: at the bounds, mixed, few and many rows, few and many groups."""
    random = np.random.default_rng(seed)
    for groups in (1, 2, 4, 5, 40):
        for rows in (1, 7):
            for value in (-100.0, 100.0, 4.0, None):
                given = random.normal(5, 20, groups * rows) if value is None else value
                unit = np.full(groups * rows, NEWCOMER)
                codes = np.repeat(random.permutation(GROUPS)[:groups], rows)
                values = np.array(np.broadcast_to(np.asarray(given), unit.shape))
                yield Raw(unit, codes, values)
                yield Raw(unit, codes, np.where(codes % 2 > 0, values, np.nan))  # some are absent


def worst(plan: QueryPlan, ring: KeyRing, change: Any = lambda partials: partials) -> float:
    """Largest loss of any newcomer, as a part of the budget (mu^2, or epsilon)."""
    budget = allocate_query(plan)
    base = generated(3, rows=60)
    before = bounded(plan, change(stage_one(plan, base)), ring, RUN)
    losses = []
    for newcomer in newcomers(1):
        after = bounded(plan, change(stage_one(plan, base.plus(newcomer))), ring, RUN)
        moved = np.array(shifts(plan, budget, after, before))
        losses.append(moved.sum() / plan.epsilon if budget.mu is None
                     else (moved**2).sum() / budget.mu**2)  # fmt: skip
    return max(losses)


ABOVE = QueryColumn("above", "sum", 50, 150, per="group")
BELOW = QueryColumn("below", "sum", -150, -50, per="group")
EACH = [COUNT, ROWS, SUM, ROW_SUM, MEAN, VAR, STDDEV, UNITS, QUANTILES, ABOVE, BELOW]
PLANS = [
    *(query(column) for column in EACH),
    query(*ALL),
    query(*ALL, selects=False),
    query(*ALL, groups=1),
    *(query(column, groups=None, norm=2.5) for column in EACH),
    query(*ALL, groups=6, norm=1.7),
    *(query(column, mechanism="geometric") for column in EACH),
    query(*ALL, mechanism="geometric"),
]


@pytest.mark.parametrize("plan", PLANS)
def test_one_unit_stays_within_the_budget(plan: QueryPlan, ring: KeyRing) -> None:
    assert worst(plan, ring) <= 1


def test_the_budget_is_used(ring: KeyRing) -> None:
    """The bound is reached, so that the test above can tell."""
    assert worst(query(COUNT), ring) > 0.99
    assert worst(query(QUANTILES, selects=False), ring) > 0.99
    assert worst(query(COUNT, groups=None, norm=2.5), ring) > 0.7
    assert worst(query(ROW_SUM, mechanism="geometric", selects=False), ring) > 0.99


# --- sabotage --------------------------------------------------------------------------------


def test_one_group_more_is_caught(ring: KeyRing) -> None:
    real = bounding._sampled

    def more(pairs: Partials, ring: KeyRing, name: Any, most: int) -> Any:
        return real(pairs, ring, name, most + 1)

    with mock.patch.object(bounding, "_sampled", more):
        assert worst(query(SUM, selects=False), ring) > 1.2


def test_a_share_that_is_not_charged_is_caught(ring: KeyRing) -> None:
    """A column with the noise that it would have alone."""

    def free(plan: QueryPlan) -> QueryBudget:
        budget = calibration.allocate_query(plan)
        first, *others = budget.parts
        alone = msgspec.structs.replace(first, scale=first.scale * first.share**0.5)
        return msgspec.structs.replace(budget, parts=(alone, *others))

    with mock.patch(f"{__name__}.allocate_query", free):
        assert worst(query(ROWS, SUM, selects=False), ring) > 1.2


@pytest.mark.parametrize("column", [ABOVE, BELOW])
def test_noise_for_the_width_of_the_bounds_is_caught(column: QueryColumn, ring: KeyRing) -> None:
    """A unit that comes or goes moves its sum from 0 to a bound, not from bound to bound."""
    plan, real = query(column, selects=False), calibration.allocate_query

    def narrow(plan: QueryPlan) -> QueryBudget:
        budget = real(plan)
        [noise] = budget.parts
        spoilt = msgspec.structs.replace(noise, scale=noise.scale * 100 / 150)
        return msgspec.structs.replace(budget, parts=(spoilt,))

    assert 0.99 < worst(plan, ring) <= 1
    with mock.patch(f"{__name__}.allocate_query", narrow):
        assert worst(plan, ring) > 1.2


def test_a_mean_of_values_that_are_not_centred_is_caught(ring: KeyRing) -> None:
    """Noise for (hi - lo) / 2 a row on a sum of plain values."""
    plan = query(MEAN, selects=False)
    plain = MEAN.grid_bounds()[1] * 3

    def uncentred(given: Partials) -> Partials:
        middle = parts.middle_of(MEAN)
        return given._replace(sums=(given.sums[0] + middle * given.sums[1], given.sums[1]))

    def unclamped(part: parts.QueryPart) -> parts.QueryPart:
        return msgspec.structs.replace(part, low=-plain, high=plain)

    boxes = mock.patch.object(
        bounding, "parts_of", lambda p: tuple(map(unclamped, parts.parts_of(p)))
    )
    with boxes, mock.patch.object(partials, "_hold_to_counts"):
        assert worst(plan, ring, uncentred) > 1.2
    with boxes:  # counts hold the sums of themselves
        assert worst(plan, ring, uncentred) <= 1
    assert worst(plan, ring, uncentred) <= 1  # and what is out of bounds is clamped all the same


def test_a_unit_that_counts_twice_in_a_group_is_caught(ring: KeyRing) -> None:
    plan = query(ROWS, UNITS, selects=False)

    def twice(given: Partials) -> Partials:
        both = [np.tile(part, 2) for part in (given.unit, given.group, *given.sums)]
        return given._replace(unit=both[0], group=both[1], sums=tuple(both[2:]))

    assert worst(plan, ring, twice) <= 1

    def not_merged(plan: QueryPlan, parts: Any, given: Partials) -> Partials:
        return given

    with (
        mock.patch.object(bounding, "merged", not_merged),
        mock.patch.object(bounding, "_sampled", lambda f, *_: np.arange(len(f.unit))[:2000]),
    ):
        assert worst(plan, ring, twice) > 1.2


def test_a_tree_without_one_level_is_caught(ring: KeyRing) -> None:
    levels_of = parts.levels_of
    with mock.patch.object(parts, "levels_of", lambda column: levels_of(column) - 1):
        assert worst(query(QUANTILES, selects=False), ring) > 1.1


def test_rows_beyond_r_are_caught(ring: KeyRing) -> None:
    with mock.patch.object(bounding, "smallest", lambda p, rows, *_: np.arange(len(rows.unit))):
        assert worst(query(QUANTILES, selects=False), ring) > 1.2


def test_a_norm_that_is_not_applied_is_caught(ring: KeyRing) -> None:
    with mock.patch.object(bounding, "_factor", lambda unit, *_: np.ones(len(unit))):
        for column in (SUM, MEAN, QUANTILES):
            assert worst(query(column, groups=None, norm=2.5, selects=False), ring) > 1.2


# --- a unit's own rows -----------------------------------------------------------------------


def rows_of(pairs: Bounded, gone: int) -> list[tuple[Any, ...]]:
    """Everything that the bounds left of all units but one, by names that mean the same."""
    out = []
    mask = pairs.unit != gone
    columns = [pairs.unit, pairs.group, pairs.in_groups, *pairs.sums.values()]
    out += list(zip(*(column[mask].tolist() for column in columns), strict=True))
    for name, (at, value, weight) in pairs.rows.items():
        mine = mask[at]
        table = (pairs.unit[at], pairs.group[at], value, weight)
        out += [(name, *row) for row in zip(*(c[mine].tolist() for c in table), strict=True)]
    return sorted(out, key=str)


@pytest.mark.parametrize("plan", [query(*ALL), query(*ALL, groups=None, norm=1.3)])
def test_what_is_kept_of_a_unit_is_a_function_of_its_own_rows(
    plan: QueryPlan, ring: KeyRing
) -> None:
    for seed in range(6):
        table = generated(seed, units=12, rows=300)
        gone = seed
        both = bounded(plan, stage_one(plan, table), ring, RUN)
        without = bounded(plan, stage_one(plan, table.without(gone)), ring, RUN)
        assert rows_of(both, gone) == rows_of(without, gone)
        changed = (both.unit == gone).sum()
        assert 0 < changed <= plan.most_groups


def test_codes_decide_nothing(ring: KeyRing) -> None:
    """Other slots and codes for the same ids: the same groups are kept."""
    plan = query(COUNT, groups=2)
    given = stage_one(plan, generated(1))
    random = np.random.default_rng(5)
    slots, codes = random.permutation(64), random.permutation(64)
    other = given._replace(
        unit=slots[given.unit],
        group=codes[given.group],
        unit_ids=given.unit_ids[np.argsort(slots)],
        group_ids=given.group_ids[np.argsort(codes)],
    )
    one, two = (bounded(plan, partials, ring, RUN) for partials in (given, other))
    pairs = set(zip(slots[one.unit].tolist(), codes[one.group].tolist(), strict=True))
    assert pairs == set(zip(two.unit.tolist(), two.group.tolist(), strict=True))


def test_sampling_is_fair_and_fresh(ring: KeyRing) -> None:
    """Each of a unit's groups is kept equally often over runs."""
    plan = query(COUNT, groups=3)
    given = stage_one(plan, raw([(0, g, 1.0) for g in range(9)]))
    seen = np.zeros(9)
    for run in range(600):
        pairs = bounded(plan, given, ring, (run.to_bytes(16, "little"), b"q"))
        assert len(pairs.group) == 3 and set(pairs.in_groups) == {3}
        seen += np.bincount(pairs.group, minlength=9)
    assert np.abs(seen - 200).max() < 60


def test_equal_upper_bits_are_decided_by_the_lower() -> None:
    slot = np.zeros(4, np.int64)
    drawn = np.array([[3, 7], [1, 7], [2, 7], [9, 1]], np.uint64)
    assert set(bounding._beyond(slot, drawn, 2)) == {0, 2}


def test_factors_are_exact_and_never_too_large() -> None:
    random = np.random.default_rng(2)
    unit = np.repeat(np.arange(50), 9)
    for most in (1, 100, 1 << 25, 1 << 32):
        vector = random.integers(-most, most, 450, endpoint=True)
        for norm in (0.5, most * 1.0, most * 1.7, most * 2.5):
            scaled = bounding._times(vector, bounding._factor(unit, vector, norm))
            for u in range(50):
                mine = [int(v) for v in scaled[unit == u]]
                assert sum(v * v for v in mine) <= norm**2
                own = [int(v) for v in vector[unit == u]]
                if sum(v * v for v in own) < norm**2 * 0.999999:
                    assert mine == own


def test_nothing_is_bounded_to_nothing(ring: KeyRing) -> None:
    plan = query(*ALL, groups=None, norm=2.0)
    pairs = bounded(plan, stage_one(plan, raw([])), ring, RUN)
    assert len(pairs.unit) == 0 and all(len(s) == 0 for s in pairs.sums.values())


def test_rows_are_sampled_within_a_pair(ring: KeyRing) -> None:
    column = QueryColumn("q", "quantiles", 0, 15, rows=2, at=(0.5,))
    plan = query(column)
    table = raw([(0, 0, float(v % 5)) for v in range(20)] + [(1, 0, 3.0)])
    seen = np.zeros(5)
    for run in range(300):
        pairs = bounded(plan, stage_one(plan, table), ring, (run.to_bytes(16, "little"), b"q"))
        at, value, weight = pairs.rows["q"]
        assert np.bincount(pairs.unit[at]).tolist() == [2, 1] and set(weight) == {1}
        seen += np.bincount(value[pairs.unit[at] == 0], minlength=5)
    assert np.abs(seen - 120).max() < 45


def test_ids_of_the_helper_are_a_codes_own() -> None:
    assert (ids(5, 1)[3] == ids(9, 1)[3]).all() and partials.MAX_PARTIALS == 1 << 30


def test_a_choice_of_rows_is_a_function_of_its_units_own(ring: KeyRing) -> None:
    """Neighbours in the sorted order that agree in a group or a value change nothing."""
    random = np.random.default_rng(8)
    table = Rows(*(random.integers(0, most, 600) for most in (20, 2, 3)))
    pairs = Partials(table.unit, table.group, ids(20, 1), ids(2, 2))
    slot = 2 * table.unit + table.group
    chosen = bounding.smallest(pairs, table, slot, 2, ring, RUN)
    assert np.bincount(slot[chosen]).tolist() == np.minimum(np.bincount(slot), 2).tolist()
    for unit in range(20):
        mine = np.flatnonzero(table.unit == unit)
        alone = bounding.smallest(pairs, Rows(*(p[mine] for p in table)), slot[mine], 2, ring, RUN)
        rows = [sorted(zip(*(p[of].tolist() for p in table), strict=True))
                for of in (mine[alone], chosen[table.unit[chosen] == unit])]  # fmt: skip
        assert rows[0] == rows[1]


def test_equal_rows_have_chances_of_their_own(ring: KeyRing) -> None:
    """One of ten rows is drawn in about a tenth of the runs, though there are two values."""
    zero = np.zeros(10, np.int64)
    table = Rows(zero, zero, np.array([0] * 9 + [1]))
    pairs = Partials(zero, zero, ids(1, 1), ids(1, 2))
    drawn = [
        table.value[bounding.smallest(pairs, table, zero, 1, ring, (run.to_bytes(2, "little"),))]
        for run in range(400)
    ]
    assert all(len(value) == 1 for value in drawn) and 20 < int(np.concatenate(drawn).sum()) < 65


def test_a_large_vector_is_never_above_its_norm() -> None:
    for size in (1 << 40, 1 << 47):
        for less in (0.0, 1.0, 3.0):
            factor = bounding._factor(np.zeros(1, np.int64), np.array([-size]), size - less)
            assert abs(int(bounding._times(np.array([size]), factor)[0])) <= size - less


def test_codes_decide_nothing_about_rows(ring: KeyRing) -> None:
    """Other slots and codes for the same ids: the same rows of each unit and group are drawn."""
    random = np.random.default_rng(9)
    table = Rows(*(random.integers(0, most, 600) for most in (20, 5, 7)))
    slots, codes = random.permutation(20), random.permutation(5)
    other = Rows(slots[table.unit], codes[table.group], table.value)
    unit_ids, group_ids = ids(20, 1), ids(5, 2)
    one = bounding.smallest(
        Partials(*table[:2], unit_ids, group_ids), table, table.unit, 3, ring, RUN
    )
    two = bounding.smallest(
        Partials(*other[:2], unit_ids[np.argsort(slots)], group_ids[np.argsort(codes)]),
        other, other.unit, 3, ring, RUN,
    )  # fmt: skip
    rows = [sorted(zip(*(p[at].tolist() for p in table), strict=True)) for at in (one, two)]
    assert rows[0] == rows[1] and len(one) == 60


def test_who_was_cut_off_chooses_the_same_again(ring: KeyRing) -> None:
    """A run that goes on under a later version of the program samples the same groups and rows."""
    drawn = bounding.sampling_keys(ring, b"query groups", RUN, (ids(3, 1), ids(3, 2)))
    assert [f"{high:016x}{low:016x}" for low, high in drawn.tolist()] == PINNED


def test_a_row_of_no_public_group_is_nobody_s(ring: KeyRing) -> None:
    """Numbered as a pair it would be the last group of the unit before it."""
    plan = query(QUANTILES, groups=2)
    given = stage_one(plan, raw([(0, 1, 3.0), (1, 0, 4.0)]))
    unit, group, value = (np.append(part, more) for part, more in zip(
        given.rows["q"], (1, -1, 9), strict=True))  # fmt: skip
    other = given._replace(group_ids=ids(2, 2), rows={"q": Rows(unit, group, value)})
    at, values, _ = bounded(plan, other, ring, RUN).rows["q"]
    assert (at.tolist(), values.tolist()) == ([0, 1], [3, 4])


def test_rows_behind_the_last_pair_that_is_kept_are_dropped(ring: KeyRing) -> None:
    plan = query(QUANTILES, groups=1)
    given = stage_one(plan, raw([(0, g, 3.0) for g in range(6)]))
    pairs = bounded(plan, given, ring, RUN)
    at, values, _ = pairs.rows["q"]
    assert len(pairs.group) == 1 and (at.tolist(), values.tolist()) == ([0], [3])


def test_what_is_not_scaled_stays_to_the_last_bit() -> None:
    vector = np.array([(1 << 53) + 1, -(1 << 60) - 1, 7])
    assert bounding._times(vector, np.ones(3)).tolist() == vector.tolist()


AUTO = QueryColumn("a", "mean", rows=2)
PLAN = query(AUTO, epsilon=4.0)
PEOPLE = 3_000


def designed(plan: QueryPlan) -> BoundsDesign:
    design = design_bounds(plan)
    assert design is not None
    return design


def table(seed: int, rows: int = 20_000) -> Rows:
    random = np.random.default_rng(seed)
    unit = random.integers(0, PEOPLE, rows)
    return Rows(unit, random.integers(0, 9, rows), random.normal(50, 10, rows).astype(np.int64))


def ids_of(units: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 1 << 62, (units, 2)).astype(np.uint64)


def settled_bounds(rows: Mapping[str, Rows], ring: KeyRing, plan: QueryPlan = PLAN) -> Settled:
    design = designed(plan)
    id_tables = (ids_of(PEOPLE), ids(9, 2))
    counts = {of.name: counted(of, rows[of.name], id_tables, ring, RUN) for of in design.histograms}
    return choose_bounds(plan, design, counts, ring, RUN)


@pytest.mark.parametrize("mechanism", ["gaussian", "geometric"])
def test_bounds_of_data(mechanism: str, ring: KeyRing) -> None:
    plan = query(AUTO, epsilon=8.0, mechanism=mechanism)
    choice = settled_bounds({"a": table(1)}, ring, plan)
    lo, hi = choice.plan.columns[0].grid_bounds()
    assert not choice.nulls and 0 <= lo <= 32 and 64 <= hi <= 112
    assert settled_bounds({"a": table(1)}, ring, plan) == choice
    allocate_query(choice.plan, designed(plan).reserved)


def test_too_few_units_are_null(ring: KeyRing) -> None:
    few = Rows(*(part[:3] for part in table(1)))
    assert settled_bounds({"a": few}, ring).nulls == {"a"}
    none = Rows(*(part[:0] for part in table(1)))
    assert settled_bounds({"a": none}, ring).nulls == {"a"}


def histogram_of(rows: Rows, ring: KeyRing) -> np.ndarray:
    [of] = designed(PLAN).histograms
    return counted(of, rows, (ids_of(PEOPLE), ids(9, 2)), ring, RUN)


def test_a_unit_moves_one_value(ring: KeyRing) -> None:
    rows = table(2)
    both = histogram_of(rows, ring)
    assert both.sum() == len(np.unique(rows.unit))
    for gone in range(12):
        mask = rows.unit != gone
        without = histogram_of(Rows(*(part[mask] for part in rows)), ring)
        assert np.abs(both - without).sum() <= 1 and (both - without).min() >= 0


def test_all_of_a_units_values_are_caught(ring: KeyRing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounding, "VALUES", 5)
    rows = table(2)
    both = histogram_of(rows, ring)
    without = histogram_of(Rows(*(part[rows.unit != 3] for part in rows)), ring)
    assert np.abs(both - without).sum() > 1


def test_an_order_of_rows_decides_nothing(ring: KeyRing) -> None:
    rows = table(3)
    order = np.random.default_rng(1).permutation(len(rows.unit))
    other = Rows(*(part[order] for part in rows))
    assert (histogram_of(rows, ring) == histogram_of(other, ring)).all()


def test_rows_of_no_public_group_are_not_counted(ring: KeyRing) -> None:
    rows = table(4)
    masked_rows = rows._replace(group=np.where(rows.group > 0, rows.group, -1))
    listed = Rows(*(part[rows.group > 0] for part in rows))
    assert (histogram_of(masked_rows, ring) == histogram_of(listed, ring)).all()


@pytest.mark.parametrize("mechanism", ["gaussian", "geometric"])
def test_noise_is_of_the_law_that_the_budget_is_for(
    mechanism: str, ring: KeyRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[str, int, float]] = []
    for law, method in (("gaussian", "rounded_gaussian"), ("geometric", "discrete_laplace")):

        def draw(self: OneShot, items: np.ndarray, scale: float, law: str = law) -> np.ndarray:
            drawn.append((law, len(items), scale))
            return np.zeros(len(items), np.int64)

        monkeypatch.setattr(OneShot, method, draw)
    plan = query(AUTO, mechanism=mechanism)
    settled_bounds({"a": table(1)}, ring, plan)
    [of] = designed(plan).histograms
    assert drawn == [(mechanism, len(encoder_matrix(of.cells)), of.sigma)]
