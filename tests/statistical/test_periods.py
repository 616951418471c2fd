"""P8: what the plan prints for a person of several periods holds, for every relation of window,
slide and period: mu exactly, on the encoders; delta through the whole flow, on lone keys."""

import functools
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.arrays import Float64
from dpstream.accounting.budget import key_tests
from dpstream.accounting.budget.allocation import Budget, allocate, allocate_mechanism
from dpstream.accounting.budget.thresholds import thresholds
from dpstream.accounting.errors import PolicyError
from dpstream.accounting.gaussian import delta_of
from dpstream.accounting.guarantee import describe
from dpstream.accounting.plan.plan import Plan, mechanism_of
from dpstream.accounting.plan.unit import several_mu, together
from dpstream.accounting.weights import SelectionWeights
from dpstream.dp_transforms.flow import run_in_memory
from dpstream.state import open as stores
from tests.audit.encoders import Encoding, matrix
from tests.statistical.trials import lower
from tests.streams import COUNT, START, STEP, SUM, UNITS, begin, make_plan, positioned

TAIL = 1e-6

# --- mu, exactly --------------------------------------------------------------------------------

#: (window, slide, period, lateness) in triggers, on a stream of 12.
RELATIONS = [
    (window, slide, period, lateness)
    for window, slide, period in itertools.product((1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4, 6))
    for lateness in (0, 2)
    if slide <= window and -(-window // slide) <= 3
]


def relation(window: int, slide: int, period: int, lateness: int, **options: Any) -> Plan:
    return make_plan(
        triggers=window + lateness,
        windows=12 // slide,
        slide=slide,
        lateness=lateness,
        stamped=lateness > 0,
        period=period,
        **options,
    )


@functools.cache
def gram(encoding: Encoding) -> Float64:
    """(T, T) inner products of the encoder's columns, from its definition."""
    columns = np.array(matrix(encoding))
    return np.array((columns.T @ columns).tolist(), np.float64)


def placements(plan: Plan) -> dict[int, list[tuple[int, int]]]:
    """Period -> (window, step index) at which a record of that period can enter.

    A record of cell c (the triggers of its event time) has step c or, where stamps may come late,
    any later one, until its window or its period is closed.
    """
    timeline = plan.timeline
    late, period_places = timeline.allowed_lateness // STEP, dict[int, set[tuple[int, int]]]()
    assert timeline.end is not None and timeline.period is not None
    for cell in range(1, (timeline.end - timeline.start) // STEP + 1):
        number = (cell - 1) * STEP // timeline.period
        closes = (number + 1) * timeline.period // STEP + late
        for window in range(timeline.windows):
            base = timeline.base(window)
            if not base < cell <= base + timeline.window // STEP:
                continue
            last = min(base + timeline.triggers, closes) if late else cell
            period_places.setdefault(number, set()).update(
                (window, step_index - base) for step_index in range(cell, last + 1)
            )
    return {number: sorted(places) for number, places in period_places.items()}


@functools.cache
def worst(case: tuple[int, int, int, int], units: int, encoding: Encoding) -> float:
    """Largest |sum of A[:, step]|^2 over the places of so many units of one person, in periods
    that follow each other.

    A unit's pairs all at one place in one key are the extreme points of what it can add, and the
    square of a sum is convex in each of them, so nothing else adds more.
    """
    products, largest = gram(encoding), 0.0
    places = placements(relation(*case))
    for first in range(len(places) - units + 1):
        choices = [np.array(places[first + i]) for i in range(units)]
        index = np.indices([len(c) for c in choices]).reshape(units, -1)
        chosen = [c[i] for c, i in zip(choices, index, strict=True)]
        total = np.zeros(index.shape[1])
        for a, b in itertools.product(chosen, repeat=2):
            total += np.where(a[:, 0] == b[:, 0], products[a[:, 1] - 1, b[:, 1] - 1], 0.0)
        largest = max(largest, float(total.max()))
    return largest


def true_mu(plan: Plan, case: tuple[int, int, int, int], units: int) -> float:
    """The largest mu of units of one person, over layouts on n keys as ``shares`` counts them."""
    budget, count = allocate(plan), plan.privacy.contributions
    of = {
        noise.name: worst(case, units, Encoding.of(noise.strategy_object)) / noise.sigma**2
        for noise in (*budget.values, *([budget.selection] if budget.selection else []))
    }
    value = sum(
        of[noise.name] * stream.sensitivity**2
        for stream, noise in zip(plan.design.streams, budget.values, strict=True)
    )
    layouts = range(1, count + 1) if plan.design.selects else (1,)
    squares = [
        n * of.get("selection", 0.0) + ((count - n + 1) ** 2 + n - 1) * value for n in layouts
    ]
    return math.sqrt(max(squares))


def printed(plan: Plan) -> dict[int, float]:
    rows = describe(plan, allocate(plan))["periods"]
    return {int(row["periods"]): row["mu"] for row in rows}


@pytest.mark.parametrize("strategy", ["tree", "blt"])
@pytest.mark.parametrize("public", ["list", None], ids=["public", "selected"])
def test_the_printed_mu_holds_for_every_relation(strategy: str, public: str | None) -> None:
    reached, beyond_root, largest = set(), 0, 0
    # Columns of the tree have one norm; later ones of a convolution are shorter.
    near = 1e-6 if strategy == "tree" else 0.2
    for case in RELATIONS:
        plan = relation(*case, strategy=strategy, public=public, aggregates=(COUNT, SUM))
        met, mu = plan.timeline.periods_met, allocate(plan).mu
        for units in range(1, 5):
            if units > (plan.timeline.periods or 0):
                continue
            exact, stated_mu = true_mu(plan, case, units), several_mu(mu, units, together(plan))
            assert exact <= stated_mu * (1 + 1e-9), (case, units)
            assert printed(plan).get(units, stated_mu) == stated_mu
            if units <= met and exact >= stated_mu * (1 - near):
                reached.add((units, met))
            beyond_root += exact > math.sqrt(units) * mu * 1.01
            if met == 1:
                assert exact == pytest.approx(math.sqrt(units) * mu, rel=1e-6)
            largest = max(largest, met)
    # The bound is not slack, and sqrt(k) mu does not hold.
    assert largest == 4 and reached >= {(2, 2), (2, 3), (3, 3)} and beyond_root > 50


def test_what_the_plan_says_of_it() -> None:
    """A week of daily periods, a day that slides into the next, a window within its period."""

    def printed_of(case: tuple[int, int, int], **options: Any) -> tuple[str, list[float], Any]:
        plan = relation(*case, 0, **options)
        figures = describe(plan, allocate(plan))
        mu = figures["split"]["mu"]
        return (
            figures["periods_rule"],
            [round((row["mu"] / mu) ** 2, 6) for row in figures["periods"]],
            figures["unit"]["periods_met"],
        )

    assert printed_of((3, 3, 3)) == ("a person of k periods has sqrt(k) mu", [1, 2, 4], 1)
    assert printed_of((3, 3, 6), public="x") == ("a person of k periods has sqrt(k) mu", [1, 2], 1)
    words, factors, met = printed_of((3, 1, 3), public="x")
    assert "m = 2 periods" in words and "sqrt(k min(k, m)) mu" in words
    assert (factors, met) == ([1, 4, 8], 2)
    words, factors, met = printed_of((4, 4, 1))
    assert "k mu and k times the thresholds' part of delta" in words
    assert (factors, met) == ([1, 4, 16, 64, 144], 4)
    plan = relation(4, 4, 1, 0)
    figures, budget = describe(plan, allocate(plan)), allocate(plan)
    of_periods, of_delta = figures["warnings"]
    assert of_periods == (
        "one window can meet 4 periods, and one person counts as up to 4 units in a key; "
        "thresholds are at least 3 units higher for it"
    )
    assert of_delta.startswith(f"delta {plan.privacy.delta:g} ")
    for row in figures["periods"][1:]:
        thresholds = row["periods"] * plan.privacy.contributions * budget.b
        assert delta_of(row["epsilon"], row["mu"]) + thresholds <= row["delta"] * (1 + 1e-12)


# --- refused, unless the job says that it means it ----------------------------------------------


def one_period(plan: Plan) -> Budget:
    """As if each window met one period."""
    mechanism = mechanism_of(without(plan))
    return allocate_mechanism(msgspec.structs.replace(mechanism, periods_met=1))


def without(plan: Plan) -> Plan:
    """The same without the option."""

    privacy = msgspec.structs.replace(plan.privacy, periods_share_windows=False)
    return msgspec.structs.replace(plan, privacy=privacy)


def test_selected_keys_with_several_periods_in_a_window_are_refused() -> None:
    plan = without(relation(4, 4, 1, 0))
    with pytest.raises(PolicyError, match="one window can meet 4 periods") as caught:
        allocate(plan)
    assert caught.value.field == "budget.covers"
    for word in (
        "do not overlap", "multiple of window", "no period", "share_windows = true", " 3 units",
    ):  # fmt: skip
        assert word in caught.value.fix
    # Each of what it says to do works.
    for other in (relation(4, 4, 4, 0), relation(4, 4, 8, 2), make_plan(triggers=4, windows=3)):
        allocate(without(other))
    allocate(relation(4, 4, 1, 0))
    allocate(without(relation(4, 4, 1, 0, public="list")))
    with pytest.raises(PolicyError, match="can meet 2 periods"):
        allocate(without(relation(4, 2, 4, 0)))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pre_threshold": 2},
        {"weights": SelectionWeights(), "contributions": 4, "skip": True},
        {"weights": SelectionWeights(), "contributions": 4, "skip": False},
        {"weights": SelectionWeights(), "per_key_bound": 1, "combine": True, "skip": False},
    ],
    ids=str,
)
def test_thresholds_rise_by_what_the_other_units_add(options: dict[str, Any]) -> None:
    for case, met in (((4, 4, 1, 0), 4), ((4, 2, 3, 0), 2), ((4, 4, 4, 0), 1), ((3, 1, 2, 2), 2)):
        plan = relation(*case, **options)
        assert plan.design.units_alone == plan.timeline.periods_met == met
        budget, usual = allocate(plan), one_period(plan)
        assert budget.tau is not None and usual.tau is not None and budget.statistic is not None
        rise = (budget.tau - usual.tau) / 256
        assert (rise > (met - 1) * budget.statistic.alone - 0.01).all()
        if met == 1 or budget.weights is None:
            assert np.abs(rise - (met - 1) * budget.statistic.alone).max() < 0.01


# --- keys that only one person has, through the whole flow --------------------------------------

KEYS = 1500
#: (window, slide, period): 4, 2 and 3 periods in a window, of tumbling and of sliding ones.
SHARED = [(4, 4, 1), (4, 2, 3), (3, 1, 1), (6, 4, 4)]
WEIGHTS: dict[str, Any] = {"weights": SelectionWeights(3.0, 1.0), "contributions": 2}
#: Noise of less than a unit, and chances that 1,500 keys can see.
LARGE: dict[str, Any] = {"epsilon": 40.0, "delta": 0.05, "contributions": 1, "strategy": "blt"}
MECHANISMS: dict[str, dict[str, Any]] = {
    "sticky": {},
    "tree": {"strategy": "tree"},
    "weights": WEIGHTS,
    "combined": {**WEIGHTS, "per_key_bound": 1, "combine": True},
    "units": {"aggregates": (UNITS,), "per_key_bound": 1},
    "tests apart": {"select_every": 2, "refresh_every": 2},
}


def lone(plan: Plan, folder: Path) -> tuple[int, int]:
    """(keys released at some time, units of the person of each), each key of a person who has
    nothing else: one record in each period of one window, as many as a window can meet."""
    timeline = plan.timeline
    assert timeline.period is not None
    cells = np.arange(timeline.windows * timeline.slide // STEP)
    best: list[int] = []
    for window in range(timeline.windows):
        begins, ends = (edge - timeline.start for edge in timeline.window_bounds(window))
        inside = [int(c) for c in cells if begins <= c * STEP < ends]
        firsts = list({c * STEP // timeline.period: c for c in reversed(inside)}.values())
        best = max(best, sorted(firsts), key=len)
    key = np.repeat(np.arange(KEYS), len(best))
    times = START + np.tile(np.array(best), KEYS) * STEP
    rows = {
        "user": [f"u{k}" for k in key],
        "page": [f"k{k}" for k in key],
        "time": pa.array(times).cast(pa.timestamp("us", "UTC")),
        "value": pa.array(np.zeros(len(key))),
    }
    run = begin(plan, folder / f"t{len(list(folder.iterdir()))}.db", 2, None)
    try:
        releases, _ = run_in_memory(run, [positioned(rows, 0, 0)])
    finally:
        stores.close_all()
    return len({page for batch in releases for page in batch["page"].to_pylist()}), len(best)


def as_if_alone(real: Callable[..., Any]) -> Callable[..., Any]:
    """Sabotage: thresholds that a unit alone does not pass, as they were."""

    def thresholds(*args: Any) -> Any:
        return real(*args[:5])

    return thresholds


#: The tree's nodes are rounded, and its D_t of more than a unit hides the sabotage but where a
#: person is four.
CASES = [
    pytest.param(case, options, id=f"{name}-{case}")
    for (name, options), case in itertools.product(MECHANISMS.items(), SHARED)
    if name != "tree" or case == (4, 4, 1)
]


@pytest.mark.parametrize(("case", "options"), CASES)
def test_a_person_alone_is_published_at_most_with_the_printed_chance(
    tmp_path: Path, case: tuple[int, int, int], options: dict[str, Any]
) -> None:
    plan = relation(*case, 0, **{**LARGE, **options})
    budget = allocate(plan)
    hits, units = lone(plan, tmp_path)
    assert units == plan.timeline.periods_met > 1
    claimed = units * plan.privacy.contributions * budget.b
    assert lower(hits, KEYS, TAIL) <= claimed
    rows = {int(row["periods"]): row["delta"] for row in describe(plan, budget)["periods"]}
    at = min(k for k in rows if k >= units)
    assert lower(hits, KEYS, TAIL) <= rows[at]
    with mock.patch.object(key_tests, "thresholds", as_if_alone(thresholds)):
        caught, _ = lone(plan, tmp_path)
    assert lower(caught, KEYS, TAIL) > max(claimed, rows[at])
