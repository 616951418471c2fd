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
        "epsilon": 2.0, "delta": 1e-7, "groups": 5, "norm": 3.0, "mechanism": "laplace",
        "selects": False, "min_units": 2, "columns": (COUNT,),
    }  # fmt: skip
    assert set(other) == set(QueryPlan.__struct_fields__)
    found = {msgspec.structs.replace(plan, **{name: v}).digest for name, v in other.items()}
    assert len(found | {plan.digest}) == len(other) + 1
    column: dict[str, Any] = {
        "name": "z", "kind": "sum", "low": 1.0, "high": 14.0, "per": "group", "rows": 3,
        "grid": 0.5, "at": (0.5,), "share": 2.0, "norm": 2.0,
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
    ("max_groups_contributed", query(COUNT, groups=None)),
    ("max_groups_contributed", query(COUNT, groups=0)),
    ("max_groups_contributed", query(COUNT, groups=5_000)),
    ("contribution_norm", query(COUNT, groups=None, norm=0.0)),
    ("contribution_norm", query(COUNT, norm=2.0, mechanism="laplace")),
    ("min_privacy_units_per_group", query(COUNT, min_units=0)),
    ("min_privacy_units_per_group", query(COUNT, min_units=2, selects=False)),
    ("columns", query()),
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
    query(COUNT, mechanism="laplace").check()
    query(COUNT, mechanism="laplace", delta=0.0, selects=False).check()
    query(COUNT, groups=None, norm=4.0).check()
    query(QueryColumn("a", "mean")).check()


def test_which_bounds_are_chosen() -> None:
    assert QueryColumn("a", "mean").automatic
    assert QueryColumn("a", "count", per="group").automatic
    assert not QueryColumn("a", "count").automatic
    assert not any(column.automatic for column in ALL)
