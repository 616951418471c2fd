"""Automatic bounds from data: one value of each unit, noise by name, a unit's own rows only."""

from collections.abc import Mapping

import numpy as np
import pytest

from dpstream.accounting.query.bounds import BoundsDesign, Settled, design_bounds
from dpstream.accounting.query.calibration import allocate_query
from dpstream.accounting.query.plan import QueryColumn, QueryPlan
from dpstream.accounting.tuning.question import encoder_matrix
from dpstream.dp_transforms.noise.oneshot import OneShot
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.one_shot import Rows, bounds, choose_bounds
from dpstream.dp_transforms.one_shot.bounds import counted
from tests.queries import RUN, ids, query

AUTO = QueryColumn("a", "mean", rows=2)
PLAN = query(AUTO, epsilon=4.0)
UNITS = 3_000


def designed(plan: QueryPlan) -> BoundsDesign:
    design = design_bounds(plan)
    assert design is not None
    return design


def table(seed: int, rows: int = 20_000) -> Rows:
    random = np.random.default_rng(seed)
    unit = random.integers(0, UNITS, rows)
    return Rows(unit, random.integers(0, 9, rows), random.normal(50, 10, rows).astype(np.int64))


def ids_of(units: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 1 << 62, (units, 2)).astype(np.uint64)


def settled_bounds(rows: Mapping[str, Rows], ring: KeyRing, plan: QueryPlan = PLAN) -> Settled:
    design = designed(plan)
    id_tables = (ids_of(UNITS), ids(9, 2))
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


def histograms(rows: Rows, ring: KeyRing) -> np.ndarray:
    [of] = designed(PLAN).histograms
    return counted(of, rows, (ids_of(UNITS), ids(9, 2)), ring, RUN)


def test_a_unit_moves_one_value(ring: KeyRing) -> None:
    rows = table(2)
    both = histograms(rows, ring)
    assert both.sum() == len(np.unique(rows.unit))
    for gone in range(12):
        mask = rows.unit != gone
        without = histograms(Rows(*(part[mask] for part in rows)), ring)
        assert np.abs(both - without).sum() <= 1 and (both - without).min() >= 0


def test_all_of_a_units_values_are_caught(ring: KeyRing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "VALUES", 5)
    rows = table(2)
    both = histograms(rows, ring)
    without = histograms(Rows(*(part[rows.unit != 3] for part in rows)), ring)
    assert np.abs(both - without).sum() > 1


def test_an_order_of_rows_decides_nothing(ring: KeyRing) -> None:
    rows = table(3)
    order = np.random.default_rng(1).permutation(len(rows.unit))
    other = Rows(*(part[order] for part in rows))
    assert (histograms(rows, ring) == histograms(other, ring)).all()


def test_rows_of_no_public_group_are_not_counted(ring: KeyRing) -> None:
    rows = table(4)
    masked_rows = rows._replace(group=np.where(rows.group > 0, rows.group, -1))
    listed = Rows(*(part[rows.group > 0] for part in rows))
    assert (histograms(masked_rows, ring) == histograms(listed, ring)).all()


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
