"""A budget needs no stream: what a plan is calibrated by, and a job without time."""

import msgspec
import numpy as np
import pytest

from dpstream.accounting.budget.allocation import allocate, allocate_mechanism
from dpstream.accounting.errors import PolicyError
from dpstream.accounting.fields import Aggregate
from dpstream.accounting.plan.design import resolve
from dpstream.accounting.plan.mechanism import Mechanism, mechanism_of
from dpstream.accounting.plan.privacy import Privacy
from dpstream.accounting.weights import SelectionWeights
from tests.accounting.plans import COUNT, UNITS, Make

SUM, MEAN = Aggregate("s", "sum", "x", (-3.0, 9.0)), Aggregate("m", "mean", "y", (0.0, 5.0), 0.5)


@pytest.mark.parametrize("public", [None, "list"])
@pytest.mark.parametrize(
    "privacy", [{}, {"per_key_bound": 1}, {"weights": SelectionWeights()}], ids=["", "once", "w"]
)
@pytest.mark.parametrize("columns", [(COUNT,), (UNITS,), (COUNT, SUM, MEAN, UNITS)])
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
    assert one.theta == 0 and many.theta == endless.theta == privacy.theta
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
    assert budget.theta == privacy.theta
    assert budget.b <= privacy.theta * privacy.delta / privacy.contributions


def test_windows_that_share_periods_are_refused_here_too(make_plan: Make) -> None:
    plan = make_plan(1)
    with pytest.raises(PolicyError, match=r"budget\.covers"):
        allocate_mechanism(Mechanism(plan.privacy, plan.design, 1, periods_met=2))
