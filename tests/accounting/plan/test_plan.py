"""The plan: what it derives, what its hash covers, what it refuses."""

from typing import Any

import msgspec
import pytest

from dpstream.accounting.errors import UsageError
from dpstream.accounting.fields import Aggregate, Field
from tests.accounting.plans import MEAN, SUM, Make


def test_hash_covers_every_public_parameter(make_plan: Make) -> None:
    plan = make_plan(aggregates=(MEAN,))
    assert plan.hash == make_plan(aggregates=(MEAN,)).hash and len(plan.hash) == 32
    others = [
        make_plan(aggregates=(SUM,)),
        make_plan(101, aggregates=(MEAN,)),
        make_plan(aggregates=(MEAN,), epsilon=5.0),
        make_plan(aggregates=(MEAN,), mode="rounds"),
        make_plan(aggregates=(MEAN,), public_keys="list"),
        *(
            msgspec.structs.replace(plan, **change)
            for change in (
                {"source": "other"},
                {"unit": Field("user", "int")},
                {"key": (Field("page"), Field("country"))},
                {"event_time": "t"},
                {"stamp": "s"},
                {"mechanism_version": 99},
            )
        ),
    ]
    assert len({plan.hash, *(p.hash for p in others)}) == len(others) + 1


@pytest.mark.parametrize(
    ("field", "case"),
    [
        ("mechanism.mode", {"mode": "rounds", "public_keys": "list"}),
        ("aggregate", {"aggregates": ()}),
        ("aggregate", {"aggregates": tuple(Aggregate(f"a{i}", "count") for i in range(17))}),
        ("aggregate[0].name", {"aggregates": (Aggregate("_n", "count"),)}),
        ("aggregate[0].share", {"aggregates": (Aggregate("n", "count", share=-1.0),)}),
        ("aggregate[0]", {"aggregates": (Aggregate("n", "count", column="x"),)}),
        ("aggregate[0]", {"aggregates": (Aggregate("n", "sum", column="x"),)}),
        ("aggregate[0]", {"aggregates": (Aggregate("n", "sum", "x", (0.0, 1.0), 0.0),)}),
        ("aggregate[0]", {"aggregates": (Aggregate("n", "sum", "x", (0.0, float("inf"))),)}),
        ("aggregate[0].bounds", {"aggregates": (Aggregate("n", "sum", "x", (0.2, 0.8)),)}),
        ("aggregate[0].bounds", {"aggregates": (Aggregate("n", "sum", "x", (-0.5, 0.5)),)}),
        ("aggregate[0].grid", {"aggregates": (Aggregate("n", "sum", "x", (0.0, 1e12)),)}),
        ("aggregate.name", {"aggregates": (Aggregate("page", "count"),)}),
        ("aggregate.name", {"aggregates": (Aggregate("trigger", "count"),)}),
        ("aggregate.name", {"aggregates": (Aggregate("n", "count"), Aggregate("n_sd", "count"))}),
        ("aggregate.kind", {"aggregates": (Aggregate("u", "units"),), "mode": "rounds"}),
    ],
)
def test_refusals(make_plan: Make, field: str, case: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        make_plan(**case).check()
    assert caught.value.field == field
    assert caught.value.exit_code == 2


def test_keys(make_plan: Make) -> None:
    plan = make_plan()
    with pytest.raises(UsageError, match=r"key"):
        msgspec.structs.replace(plan, key=()).check()
