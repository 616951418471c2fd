"""Noise and thresholds of a query are those that its plan has once its bounds are chosen."""

import math
from typing import Any

import msgspec
import pytest

from dpstream.accounting.query.calibration import PartNoise, expected
from dpstream.accounting.query.grids import Gridded, finest, grid_of, regridded
from dpstream.accounting.query.outlook import outlook
from dpstream.accounting.query.plan import QueryColumn, QueryPlan

COUNT = QueryColumn("c", "count", per="group")
COLUMNS = {
    "units": QueryColumn("c", "units", per="group"), "count": COUNT,
    "sum": QueryColumn("c", "sum", per="group"), "mean": QueryColumn("c", "mean", per="group"),
    "sum of rows": QueryColumn("c", "sum", -3.0, 9.0, automatic_rows=True),
    "mean of rows": QueryColumn("c", "mean", -3.0, 9.0, automatic_rows=True),
    "given": QueryColumn("c", "sum", -3.0, 9.0),
}  # fmt: skip


def gridded(column: QueryColumn, delta: float = 1e-9, **more: Any) -> Gridded:
    def plan_of(bits: int) -> QueryPlan:
        on_grid = msgspec.structs.replace(column, grid=grid_of(column, False, bits))
        law = "gaussian" if delta else "geometric"
        given = {"groups": 8, "selects": bool(delta), "automatic_groups": True, **more}
        given |= {"norm": None, "mechanism": law, "columns": (on_grid,)}
        return QueryPlan(1.0, delta, **given)

    return finest(plan_of)


def chosen(of: Gridded, groups: int, rows: int, bounds: tuple[float, float]) -> QueryPlan:
    """The plan as it is once all is chosen, in the way of whoever draws."""
    [column] = of.plan.columns
    rows = rows if column.automatic_rows else column.rows
    if column.automatic:
        low, high = (0.0, float(rows)) if column.kind == "count" else bounds
    elif column.low is None or column.high is None:
        return msgspec.structs.replace(of.plan, groups=groups)
    else:
        low, high = column.low, column.high
    columns = (msgspec.structs.replace(column, rows=rows),)
    plan = msgspec.structs.replace(of.plan, columns=columns, groups=groups)
    return regridded(plan, {"c": (low, high)}, of.bits)


@pytest.mark.parametrize("delta", [1e-9, 0])
@pytest.mark.parametrize("name", COLUMNS)
def test_noise_is_what_it_is_multiplied_by(name: str, delta: float) -> None:
    of = gridded(COLUMNS[name], delta)
    [column] = outlook(of).columns
    for groups, rows, (low, high) in ((4, 3, (-3.0, 8.0)), (100, 700, (20.0, 25.0))):
        plan = chosen(of, groups, rows, (low, high))
        top = plan.columns[0].high or 0.0
        values = {
            "": 1.0, "high": top, "max(|low|, |high|)": max(-low, high), "high - low": high - low,
            "(high - low)": high - low, "rows": rows, "groups": groups,
            "sqrt(groups)": math.sqrt(groups),
        }  # fmt: skip
        [real] = expected(plan, of.budget(plan))
        for part, drawn in zip(column["parts"], real["parts"], strict=True):
            factor = math.prod(values[text] for text in (part["times"] or "").split(" * "))
            assert part["sd"] * factor == pytest.approx(drawn["sd"], rel=0.01)
            assert part["within"] * factor == pytest.approx(drawn["within"], rel=0.03)
    assert column["automatic"] == (name in ("count", "sum", "mean"))


def test_given_bounds_have_their_own_noise() -> None:
    of = gridded(COLUMNS["given"], automatic_groups=False)
    forecast, [real] = outlook(of), expected(of.plan, of.budget(of.plan))
    [column] = forecast.columns
    assert [part["times"] for part in column["parts"]] == [None]
    assert {**column["parts"][0], "times": None} == {**real["parts"][0], "times": None}
    [selection], budget = forecast.selections, of.budget(of.plan)
    assert budget.selection is not None
    assert selection["tau"] == budget.selection.tau / budget.selection.most
    assert (selection["groups"], selection["min_units"]) == (8, 1)


def test_thresholds_are_those_of_the_fewest_and_the_most_groups() -> None:
    """A count of several rows is no count of units: it does not join the test."""
    of = gridded(COUNT)
    selections = outlook(of).selections
    assert [one["groups"] for one in selections] == [1, 256]
    for one in selections:
        real = of.budget(chosen(of, int(one["groups"]), 5, (0.0, 1.0))).selection
        assert real is not None
        assert one["tau"] == pytest.approx(real.tau / real.most)
        assert one["even_chance_one_group"] == pytest.approx(real.even_chance(1))
    assert outlook(gridded(COUNT, selects=False)).selections == []
    assert len(outlook(of).lines("key")) == 3


def release_chance(units: int, noise: PartNoise) -> float:
    """Chance that so many units are shown, by adding up the law of the truncated noise."""
    assert noise.most is not None
    coin, total = noise.sooner * 2.0**-32, 0.0
    for part, most in ((coin, noise.most - 1), (1 - coin, noise.most)):
        law = {j: math.exp(-abs(j) / noise.scale) for j in range(-most, most + 1)}
        above = sum(p for j, p in law.items() if units + j > most)
        total += part * above / sum(law.values())
    return total


@pytest.mark.parametrize(("epsilon", "delta"), [(1.0, 1e-9), (1.0, 3e-9), (30.0, 1e-9), (0.2, 0.1)])
def test_an_even_chance_under_geometric_noise_is_one(epsilon: float, delta: float) -> None:
    """At (30, 1e-9) a group of one unit is shown with chance 1e-9, and one of two units nearly
    always.
    """
    units = QueryColumn("c", "units", per="group")
    plan = QueryPlan(epsilon, delta, 1, None, "geometric", True, columns=(units,))
    of = finest(lambda bits: plan)
    [selection], [noise] = outlook(of).selections, of.budget(plan).parts
    least = next(number for number in range(10_000) if release_chance(number, noise) >= 0.5)
    assert selection["even_chance_one_group"] == selection["even_chance_all_groups"] == least
