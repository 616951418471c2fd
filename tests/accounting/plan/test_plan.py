"""The plan: what it derives, what its hash covers, what it refuses."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from dpstream.accounting.budget.allocation import allocate, allocate_mechanism
from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.accounting.fields import Aggregate, Field
from dpstream.accounting.mixing import Cells
from dpstream.accounting.plan.design import resolve
from dpstream.accounting.plan.plan import Mechanism, Plan, mechanism_of, suits_sizes
from dpstream.accounting.plan.privacy import THETA, Privacy
from dpstream.accounting.plan.timeline import Timeline
from dpstream.accounting.weights import SelectionWeights
from tests.accounting.plans import COUNT, DAY, MEAN, SECOND, SUM, UNITS, Make, build
from tests.structs import changed, leaves


@pytest.mark.parametrize(
    "case",
    [
        {"triggers": 2},
        {"windows": 2},
        {"windows": 4, "period": 2 * SECOND},
        {"per_key_bound": None, "combine": False},
        {"per_key_bound": 2, "combine": False},
        {"skip": True},
    ],
    ids=str,
)
def test_weights_by_size_need_all_pairs_of_a_unit_at_once(case: dict[str, object]) -> None:
    settings = {"triggers": 1, "per_key_bound": 1, "combine": True, **case}
    with pytest.raises(UsageError) as caught:
        allocate(build(weights=SelectionWeights(size_share=0.2), **settings))  # type: ignore[arg-type]
    assert caught.value.field == "mechanism.weights.size_share"
    periods = build(1, windows=4, period=SECOND, weights=SelectionWeights(size_share=0.2),
                    per_key_bound=1)  # fmt: skip
    assert allocate(periods).weights is not None


def test_events_ahead_of_their_stamps_are_decided_apart() -> None:
    plan = build(1, per_key_bound=1)
    assert suits_sizes(plan)
    skewed = msgspec.structs.replace(plan.timeline, max_skew=1)
    assert not suits_sizes(msgspec.structs.replace(plan, timeline=skewed))
    assert not suits_sizes(build(1, per_key_bound=1, public_keys="list"))


def test_hash_covers_every_public_parameter(make_plan: Make) -> None:
    plan = make_plan(aggregates=(MEAN,))
    assert plan.hash == make_plan(aggregates=(MEAN,)).hash and len(plan.hash) == 32
    others = [
        make_plan(aggregates=(SUM,)),
        make_plan(101, aggregates=(MEAN,)),
        make_plan(aggregates=(MEAN,), epsilon=5.0),
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


MECHANISM_SUM, MECHANISM_MEAN = (
    Aggregate("s", "sum", "x", (-3.0, 9.0)),
    Aggregate("m", "mean", "y", (0.0, 5.0), 0.5),
)


@pytest.mark.parametrize("public", [None, "list"])
@pytest.mark.parametrize(
    "privacy", [{}, {"per_key_bound": 1}, {"weights": SelectionWeights()}], ids=["", "once", "w"]
)
@pytest.mark.parametrize(
    "columns", [(COUNT,), (UNITS,), (COUNT, MECHANISM_SUM, MECHANISM_MEAN, UNITS)]
)
def test_a_job_without_time_is_calibrated_as_a_stream_of_one_trigger(
    make_plan: Make, public: str | None, privacy: dict[str, object], columns: tuple[Aggregate, ...]
) -> None:
    if public and "weights" in privacy:
        privacy = {}
    plan = make_plan(1, public_keys=public, aggregates=columns, **privacy)
    design = resolve(plan.privacy, columns, selects=public is None)
    mine, theirs = allocate_mechanism(Mechanism(plan.privacy, design)), allocate(plan)
    assert mine.mu == theirs.mu and mine.b == theirs.b
    pairs = zip((mine.selection, mine.units, *mine.values),
                (theirs.selection, theirs.units, *theirs.values), strict=True)  # fmt: skip
    for own, other in pairs:
        assert (own is None) == (other is None)
        assert own is None or other is None or own.sigma == other.sigma
    np.testing.assert_array_equal(mine.tau, theirs.tau)


def test_the_sharper_rule_is_of_one_test_in_one_window(make_plan: Make) -> None:
    design = make_plan(1).design
    privacy = Privacy(6.0, 1e-9, 32)
    one, many, endless = (
        allocate_mechanism(Mechanism(privacy, design, windows)) for windows in (1, 2, None)
    )
    assert one.theta == 0 and many.theta == endless.theta == THETA
    assert one.mu > many.mu == endless.mu and many.b == endless.b
    assert not mechanism_of(make_plan(2)).once and mechanism_of(make_plan(1)).once


@pytest.mark.parametrize("field", ["skips", "remembers"])
def test_the_sharper_rule_needs_tests_that_depend_on_no_other(make_plan: Make, field: str) -> None:
    """Stated by itself, whatever else the settings imply: one test, one window, no weights."""
    privacy, design = Privacy(6.0, 1e-9, 32), make_plan(1).design
    assert design.weights is None and not design.skips and not design.remembers
    assert allocate_mechanism(Mechanism(privacy, design)).theta == 0
    other = msgspec.structs.replace(design, **{field: True})
    budget = allocate_mechanism(Mechanism(privacy, other))
    assert budget.theta == THETA
    assert budget.b <= THETA * privacy.delta / privacy.contributions


def test_windows_that_share_periods_are_refused_here_too(make_plan: Make) -> None:
    plan = make_plan(1)
    with pytest.raises(PolicyError, match=r"budget\.covers"):
        allocate_mechanism(Mechanism(plan.privacy, plan.design, 1, periods_met=2))


PINNED = Path(__file__).parents[2] / "golden" / "plans.json"
CANONICAL_COUNT, PEOPLE = Aggregate("n", "count"), Aggregate("people", "units")
CANONICAL_SUM = Aggregate("total", "sum", "value", (-3.0, 7.0), 0.5)
CANONICAL_MEAN = Aggregate("level", "mean", "value", (-2.5, 6.0), 0.25, 2.0)
LINE = Timeline(0, DAY, DAY, DAY, 3600 * SECOND)
BASE = Plan(
    "parquet: visits/*.parquet",
    Field("user"),
    (Field("page"),),
    "time",
    (CANONICAL_COUNT,),
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
    "sum and mean": with_(aggregates=(CANONICAL_COUNT, CANONICAL_SUM, CANONICAL_MEAN)),
    "units": with_(aggregates=(PEOPLE,)),
    "stamp": with_(stamp="arrived", event_time="_append_time"),
    "public": with_(public_keys="22" * 16),
    "record id": with_(record_id=Field("message", "bytes")),
    "sliding": of({"window": DAY, "slide": DAY // 4}),
    "late": of({"allowed_lateness": 7200 * SECOND, "max_skew": SECOND}),
    "for ever": of({"end": None}),
    "periods": of({"end": None, "period": DAY}),
    "tree": of(strategy="tree"),
    "pre-threshold": of(strategy="tree", pre_threshold=2),
    "weights": of(weights=SelectionWeights()),
    "combined": of(per_key_bound=1, weights=WEIGHTS, combine=True, epsilon=0.5, delta=1e-6),
}


@pytest.mark.parametrize("name", PLANS)
def test_pinned(name: str) -> None:
    """Written with the program that hashed the structs themselves; they never change."""
    assert PLANS[name].hash == json.loads(PINNED.read_text())[name]


def test_different_plans_have_different_hashes() -> None:
    assert len(PLANS) == len({plan.hash for plan in PLANS.values()})


def full() -> Plan:
    """A plan in which every optional struct is there."""
    plan = msgspec.structs.replace(PLANS["combined"], record_id=Field("message"))
    cells = Cells(4, "33" * 16, 1.5, 1.25, 2.5)
    return with_(
        plan,
        aggregates=(CANONICAL_COUNT, CANONICAL_SUM, CANONICAL_MEAN),
        public_keys="x",
        cells=cells,
    )


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
