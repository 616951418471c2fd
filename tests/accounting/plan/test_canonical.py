"""The canonical form of plans: twenty pinned hashes, and no public field that it forgets."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dpstream.accounting.fields import Aggregate, Field
from dpstream.accounting.plan.cells import Cells
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.plan.privacy import Privacy
from dpstream.accounting.plan.timeline import Timeline
from dpstream.accounting.weights import SelectionWeights
from tests.accounting.plans import DAY, SECOND
from tests.structs import changed, leaves

PINNED = Path(__file__).parents[2] / "golden" / "plans.json"
COUNT, PEOPLE = Aggregate("n", "count"), Aggregate("people", "units")
SUM = Aggregate("total", "sum", "value", (-3.0, 7.0), 0.5)
MEAN = Aggregate("level", "mean", "value", (-2.5, 6.0), 0.25, 2.0)
LINE = Timeline(0, DAY, DAY, DAY, 3600 * SECOND)
BASE = Plan(
    "parquet: visits/*.parquet",
    Field("user"),
    (Field("page"),),
    "time",
    (COUNT,),
    LINE,
    Privacy(6.0, 1e-9, 32),
)
WEIGHTS = SelectionWeights(3.0, 0.75)


def of(line: dict[str, Any] | None = None, **privacy: Any) -> Plan:
    return msgspec.structs.replace(
        BASE,
        timeline=msgspec.structs.replace(LINE, **(line or {})),
        privacy=msgspec.structs.replace(BASE.privacy, **privacy),
    )


def with_(plan: Plan = BASE, **fields: Any) -> Plan:
    return msgspec.structs.replace(plan, **fields)


PLANS: dict[str, Plan] = {
    "base": BASE,
    "source": with_(source="kafka: cluster/topic"),
    "unit of integers": with_(unit=Field("user", "int")),
    "two keys": with_(key=(Field("page"), Field("mobile", "bool"))),
    "sum and mean": with_(aggregates=(COUNT, SUM, MEAN)),
    "units": with_(aggregates=(PEOPLE,)),
    "stamp": with_(stamp="arrived", event_time="_append_time"),
    "public": with_(public_keys="22" * 16),
    "record id": with_(record_id=Field("message", "bytes")),
    "sliding": of({"window": DAY, "slide": DAY // 4}),
    "late": of({"allowed_lateness": 7200 * SECOND, "max_skew": SECOND}),
    "for ever": of({"end": None}),
    "periods": of({"end": None, "period": DAY}),
    "tree": of(strategy="tree", theta=0.25),
    "toeplitz": of(strategy="toeplitz", pre_threshold=3, refresh_every=4, select_every=2),
    "rounds": of(mode="rounds", final_flush=True),
    "rounds of trees": of(mode="rounds", strategy="tree", theta=0.3, pre_threshold=2),
    "share": of(selection_share=0.8),
    "weights": of(weights=SelectionWeights()),
    "combined": of(per_key_bound=1, weights=WEIGHTS, combine=True, epsilon=0.5, delta=1e-6),
}


@pytest.mark.parametrize("name", PLANS)
def test_pinned(name: str) -> None:
    """Written with the program that hashed the structs themselves; they never change."""
    assert PLANS[name].hash == json.loads(PINNED.read_text())[name]


def test_twenty_different_plans() -> None:
    assert len(PLANS) == 20 == len({plan.hash for plan in PLANS.values()})


def full() -> Plan:
    """A plan in which every optional struct is there."""
    plan = msgspec.structs.replace(PLANS["combined"], record_id=Field("message"))
    cells = Cells(4, "33" * 16, 1.5, 1.25, 2.5)
    return with_(plan, aggregates=(COUNT, SUM, MEAN), public_keys="x", cells=cells)


#: What says whose weights they are.
_APART = {("privacy", "usual_weights")}
NAMED = [path for path in leaves(full()) if path not in _APART]


def test_whose_weights_they_are_is_no_part_of_the_hash() -> None:
    """A job that names no weights is the same plan as before it mattered."""
    assert of(weights=WEIGHTS, usual_weights=True).hash == of(weights=WEIGHTS).hash


def test_saying_false_is_the_plan_that_says_nothing() -> None:
    """As it was while nothing was the same as false; a run's numbers say what it does."""
    plans = [of(weights=WEIGHTS, skip=skip) for skip in (None, False, True)]
    assert plans[0].hash == plans[1].hash != plans[2].hash


@pytest.mark.parametrize("path", NAMED, ids=lambda path: ".".join(map(str, path)))
def test_every_field_counts(path: tuple[Any, ...]) -> None:
    """A field that is added to a struct and forgotten in the canonical form fails here."""
    plan = full()
    assert changed(plan, path).hash != plan.hash
