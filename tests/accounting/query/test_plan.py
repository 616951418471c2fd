"""Plans of queries: what is refused, and the digest that names noise."""

from typing import Any

import msgspec
import pytest

from dpstream.accounting.errors import UsageError
from dpstream.accounting.query.plan import QueryColumn, QueryPlan, canonical
from tests.queries import ALL, COUNT, MEAN, QUANTILES, SUM, UNITS, query

#: Written down once: noise is named by it.
DIGEST = "e06f7e2395183cc663e0d1238dd859e7"


def test_digest_is_pinned() -> None:
    assert query(*ALL).digest == DIGEST


def test_every_field_changes_the_digest() -> None:
    plan = query(COUNT, QUANTILES)
    other: dict[str, Any] = {
        "epsilon": 2.0, "delta": 1e-7, "groups": 5, "norm": 3.0, "mechanism": "geometric",
        "selects": False, "min_units": 2, "columns": (COUNT,),
        "automatic_groups": True,
    }  # fmt: skip
    assert set(other) == set(QueryPlan.__struct_fields__)
    digests = {msgspec.structs.replace(plan, **{name: v}).digest for name, v in other.items()}
    assert len(digests | {plan.digest}) == len(other) + 1
    column: dict[str, Any] = {
        "name": "z", "kind": "sum", "low": 1.0, "high": 14.0, "per": "group", "rows": 3,
        "grid": 0.5, "at": (0.5,), "share": 2.0, "norm": 2.0,
        "automatic_rows": True,
    }  # fmt: skip
    assert set(column) == set(QueryColumn.__struct_fields__)
    changed = [
        query(msgspec.structs.replace(QUANTILES, **{name: v})).digest for name, v in column.items()
    ]
    assert len({*changed, query(QUANTILES).digest}) == len(column) + 1


def test_a_whole_number_and_its_float_are_one_plan() -> None:
    one = query(QueryColumn("s", "sum", 0, 5), epsilon=1)
    other = query(QueryColumn("s", "sum", 0.0, 5.0), epsilon=1.0)
    assert canonical(one) == canonical(other) and one.digest == other.digest


def replaced(column: QueryColumn, **fields: Any) -> QueryPlan:
    return query(msgspec.structs.replace(column, **fields))


REFUSED: list[tuple[str, QueryPlan]] = [
    ("epsilon", query(COUNT, epsilon=0.0)),
    ("epsilon", query(COUNT, epsilon=float("nan"))),
    ("epsilon", query(COUNT, epsilon=2_000.0)),
    ("delta", query(COUNT, delta=0.0)),
    ("delta", query(COUNT, delta=1.0)),
    ("delta", query(COUNT, delta=5e-324)),
    ("max_groups_contributed", query(COUNT, groups=None)),
    ("max_groups_contributed", query(COUNT, groups=0)),
    ("max_groups_contributed", query(COUNT, groups=5_000)),
    ("contribution_norm", query(COUNT, groups=None, norm=0.0)),
    ("contribution_norm", query(COUNT, norm=2.0, mechanism="geometric")),
    ("min_privacy_units_per_group", query(COUNT, min_units=0)),
    ("min_privacy_units_per_group", query(COUNT, min_units=2, selects=False)),
    ("columns", query(selects=False)),
    ("contribution_norm", query(norm=2.0)),
    ("max_groups_contributed", query(groups=None)),
    ("columns", query(COUNT, COUNT)),
    ("column[0].name", replaced(COUNT, name="")),
    ("column[0].share", replaced(COUNT, share=0.0)),
    ("column[0].max_rows_contributed", replaced(MEAN, rows=0)),
    ("column[0].grid", replaced(SUM, grid=0.0)),
    ("column[0].grid", replaced(SUM, grid=1e-12)),
    ("column[0].grid", replaced(SUM, grid=100.0)),
    ("column[0].bounds", replaced(SUM, low=5.0)),
    ("column[0].bounds", replaced(SUM, low=None)),
    ("column[0].bounds", replaced(SUM, high=float("inf"))),
    ("column[0].bounds", replaced(SUM, high=1e61)),
    ("column[0].bounds", replaced(SUM, high=1e-61)),
    ("column[0].bounds", replaced(UNITS, low=0.0, high=1.0)),
    ("column[0].bounds", replaced(COUNT, low=-1.0)),
    ("column[0].grid", replaced(MEAN, kind="var", grid=1e-5)),
    ("column[0].at", replaced(MEAN, at=(0.5,))),
    ("column[0].at", replaced(QUANTILES, at=())),
    ("column[0].at", replaced(QUANTILES, at=(1.5,))),
]


@pytest.mark.parametrize(("field", "plan"), REFUSED)
def test_refused(field: str, plan: QueryPlan) -> None:
    with pytest.raises(UsageError) as caught:
        plan.check()
    assert caught.value.field == field
    assert caught.value.rule and caught.value.fix


def test_fine_plans() -> None:
    query(*ALL).check()
    query(COUNT, mechanism="geometric").check()
    query(COUNT, mechanism="geometric", delta=0.0, selects=False).check()
    query(COUNT, groups=None, norm=4.0).check()
    query(QueryColumn("a", "mean")).check()


def test_which_bounds_are_chosen() -> None:
    assert QueryColumn("a", "mean").automatic
    assert QueryColumn("a", "count", per="group").automatic
    assert not QueryColumn("a", "count").automatic
    assert not any(column.automatic for column in ALL)


def columns(count: int) -> tuple[QueryColumn, ...]:
    return tuple(QueryColumn(f"c{i}", "units") for i in range(count))


WIDE = QueryColumn("w", "sum", 0, 1 << 32, per="group")
#: Each at its limit, and what is refused where it is one step further.
LIMITS: list[tuple[QueryPlan, QueryPlan, str]] = [
    (query(COUNT, epsilon=1_000.0), query(COUNT, epsilon=1_000.1), "epsilon"),
    (query(*columns(16)), query(*columns(17)), "columns"),
    (query(COUNT, groups=1), query(COUNT, groups=0), "max_groups_contributed"),
    (query(COUNT, groups=4_096), query(COUNT, groups=4_097), "max_groups_contributed"),
    (query(COUNT, norm=0.5), query(COUNT, norm=float("inf")), "contribution_norm"),
    (query(COUNT, min_units=1 << 22), query(COUNT, min_units=(1 << 22) + 1),
     "min_privacy_units_per_group"),
    (query(COUNT, min_units=1, selects=False), query(COUNT, min_units=2, selects=False),
     "min_privacy_units_per_group"),
    (query(COUNT, mechanism="geometric", selects=False, delta=0.0),
     query(COUNT, mechanism="geometric", delta=0.0), "delta"),
    (query(COUNT, selects=False), query(COUNT, selects=False, delta=0.0), "delta"),
    (query(COUNT, mechanism="geometric", selects=False, delta=0.5),
     query(COUNT, mechanism="geometric", selects=False, delta=1.0), "delta"),
    (replaced(MEAN, rows=1), replaced(MEAN, rows=0), "column[0].max_rows_contributed"),
    (replaced(MEAN, rows=1_024), replaced(MEAN, rows=1_025), "column[0].max_rows_contributed"),
    (replaced(MEAN, share=1e-9), replaced(MEAN, share=float("inf")), "column[0].share"),
    (replaced(SUM, grid=5.0), replaced(SUM, grid=float("inf")), "column[0].grid"),
    (replaced(QUANTILES, at=(0.5,) * 1_000), replaced(QUANTILES, at=(0.5,) * 1_001),
     "column[0].at"),
    (replaced(QUANTILES, at=(1.0,)), replaced(QUANTILES, at=(1.5, 0.5)), "column[0].at"),
    (query(WIDE), replaced(WIDE, high=(1 << 32) + 1.0), "column[0].grid"),
    (replaced(MEAN, kind="var", low=0.0, high=65_536.0, grid=1.0),
     replaced(MEAN, kind="var", low=0.0, high=65_537.0, grid=1.0), "column[0].grid"),
    (replaced(MEAN, kind="var", low=-65_536.0, high=0.0, grid=1.0),
     replaced(MEAN, kind="var", low=-65_537.0, high=0.0, grid=1.0), "column[0].grid"),
    (replaced(QUANTILES, at=(0.0,)), replaced(QUANTILES, at=(-0.5,)), "column[0].at"),
    (replaced(MEAN, low=0.0, high=65_537.0, grid=1.0),
     replaced(MEAN, low=0.2, high=1.2, grid=1.0), "column[0].grid"),
    (replaced(COUNT, low=0.5, high=1.5), replaced(COUNT, low=0.0, high=2.0, grid=0.5),
     "column[0].bounds"),
    (query(COUNT), replaced(COUNT, low=0.2, high=0.8), "column[0].grid"),
    (query(COUNT), replaced(COUNT, low=-0.5, high=0.5), "column[0].grid"),
    (replaced(WIDE, per="row", rows=1), replaced(WIDE, per="row", rows=2), "column[0].grid"),
    (replaced(WIDE, low=-1.0, high=0.0), replaced(WIDE, low=-1.0), "column[0].grid"),
    (replaced(WIDE, low=-(2.0**32), high=-1.0),
     replaced(WIDE, low=-(2.0**32) - 1, high=-(2.0**32)), "column[0].grid"),
    (query(SUM), replaced(SUM, low=float("-inf")), "column[0].bounds"),
    (query(SUM), replaced(SUM, high=None), "column[0].bounds"),
    (query(UNITS), replaced(UNITS, low=1.0), "column[0].bounds"),
    (query(UNITS), replaced(UNITS, high=1.0), "column[0].bounds"),
]  # fmt: skip


@pytest.mark.parametrize(("fine", "refused", "field"), LIMITS)
def test_limits(fine: QueryPlan, refused: QueryPlan, field: str) -> None:
    fine.check()
    with pytest.raises(UsageError) as caught:
        refused.check()
    assert caught.value.field == field


def test_what_one_unit_may_bring() -> None:
    assert query(COUNT).most_groups == 4 and query(COUNT, groups=None).most_groups == 4_096
    assert SUM.most_rows == 1 and MEAN.most_rows == 3
    assert not QueryColumn("u", "units", per="group").automatic
    half = QueryColumn("a", "mean", low=1.0)
    assert not half.automatic and not QueryColumn("a", "mean", high=1.0).automatic
