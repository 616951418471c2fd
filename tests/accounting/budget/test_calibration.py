"""The numbers of a run: what is read back is what was computed, to the bit."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest

from dpstream.accounting.budget import shares
from dpstream.accounting.budget.allocation import Budget, StreamNoise, allocate
from dpstream.accounting.budget.calibration import begun, calibrate, calibrated, committed_text
from dpstream.accounting.errors import PolicyError
from dpstream.accounting.fields import Aggregate
from dpstream.accounting.strategies import blt as blt_table
from dpstream.accounting.strategies import make_strategy
from dpstream.accounting.weights import STEEP, SelectionWeights
from tests.accounting.plans import UNITS, Make
from tests.designs import redesigned

SUM = Aggregate("units", "sum", "x", (-3.0, 9.0))  # another stream's name, on purpose
MEAN = Aggregate("selection", "mean", "x", (-2.0, 6.0), 0.25)
CASES: dict[str, dict[str, Any]] = {
    "tree": {},
    "blt": {"strategy": "blt", "aggregates": (SUM, MEAN)},
    "dense": {"strategy": "dense", "aggregates": (UNITS, SUM)},
    "few": {"triggers": 24, "contributions": 6},
    "public": {"public_keys": "list", "aggregates": (UNITS, SUM)},
    "weights": {"weights": SelectionWeights(), "strategy": "blt", "aggregates": (UNITS, SUM)},
    "combined": {
        "weights": SelectionWeights(), "per_key_bound": 1, "combine": True, "strategy": "blt",
        "triggers": 1000, "refresh_every": 20, "select_every": 5,
    },
    "once": {"triggers": 1},
}  # fmt: skip


def streams(budget: Budget) -> list[StreamNoise | None]:
    return [budget.selection, budget.units, *budget.values]


def check_same(ours: Budget, theirs: Budget) -> None:
    plain = ("epsilon", "delta", "mu", "theta", "b", "assumptions", "sound")
    assert [getattr(ours, name) for name in plain] == [getattr(theirs, name) for name in plain]
    for a, b in zip(streams(ours), streams(theirs), strict=True):
        assert (a is None) == (b is None)
        if a is None or b is None:
            continue
        numbers = ("name", "strategy", "triggers", "col2", "sensitivity", "share", "sigma")
        assert [getattr(a, name) for name in numbers] == [getattr(b, name) for name in numbers]
        np.testing.assert_array_equal(a.sd, b.sd)
        np.testing.assert_array_equal(a.strategy_object.parameters, b.strategy_object.parameters)
    for mine, other in ((ours.tau, theirs.tau), (ours.weights, theirs.weights)):
        assert (mine is None) == (other is None)
        np.testing.assert_array_equal(mine, other)
    assert (ours.statistic is None) == (theirs.statistic is None)
    if ours.statistic is not None and theirs.statistic is not None:
        for name in ("weighted", "counted", "alone", "sd", "rounding"):
            np.testing.assert_array_equal(
                getattr(ours.statistic, name), getattr(theirs.statistic, name)
            )


@pytest.mark.parametrize("name", CASES)
def test_read_back_to_the_bit(name: str, make_plan: Make) -> None:
    plan = make_plan(**CASES[name])
    given = allocate(plan)
    restored = calibrated(plan, calibrate(plan))
    check_same(restored.budget, given)
    assert (given.units is given.selection) == (restored.budget.units is restored.budget.selection)
    assert (restored.plan.design.refresh_every, restored.plan.design.select_every) == (
        plan.design.refresh_every,
        plan.design.select_every,
    )
    restored.plan.check()


def test_numbers_without_a_guarantee_are_marked(make_plan: Make) -> None:
    """And only they: the text of a sound run does not have the word."""
    plan = make_plan()
    given = msgspec.structs.replace(allocate(plan), sound=False)
    text = committed_text(plan, given)
    check_same(calibrated(plan, text).budget, given)
    assert '"unsound":true' in text and "unsound" not in calibrate(plan)
    assert text.replace(',"unsound":true', "") == calibrate(plan)


def test_a_later_program_changes_nothing(make_plan: Make) -> None:
    """Other defaults, another table of coefficients, another calibration: the text decides."""
    plan = make_plan(weights=SelectionWeights(), strategy="blt", triggers=250, skip=False)
    text, given = calibrate(plan), allocate(plan)
    other = {row: ((0.5,), (0.3,)) for row in blt_table.EXPONENTIALS}
    with (
        mock.patch.dict(blt_table.EXPONENTIALS, other),
        mock.patch.object(shares, "knee", lambda costs: 0.5),
        redesigned(refresh_every=7, select_every=7),
    ):
        assert make_strategy("blt", 250).parameters.tolist() == [0.5, 0.3]
        calibrated.cache_clear()
        restored = calibrated(plan, text)
    check_same(restored.budget, given)
    assert restored.plan.privacy.refresh_every == restored.plan.privacy.select_every == 2


def test_a_run_keeps_the_weights_it_was_begun_with(make_plan: Make) -> None:
    """A job that names the weights that are usual without skipping has the hash of one that names
    none, and goes on with that one's run."""
    kind = {"per_key_bound": 1, "combine": True, "weights": STEEP}
    named, unnamed = (make_plan(usual_weights=usual, **kind) for usual in (False, True))
    assert named.hash == unnamed.hash and named.design.weights != unnamed.design.weights
    for begun_with, later in ((named, unnamed), (unnamed, named)):
        text = calibrate(begun_with)
        assert begun(later, text) == begun(begun_with, text) == begun_with
        assert calibrated(later, text).plan.design.weights == begun_with.design.weights


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: "",
        lambda text: text[:-9],
        lambda text: text.replace('"format":1', '"format":2,"rules":4'),
        lambda text: text.replace('"format":1', '"format":2'),
        lambda text: text.replace('"format":1', '"format":0'),
        lambda text: text.replace('"tau":"', '"tau":"0'),
        lambda text: text.replace('"encoder":0', '"encoder":5', 1),
        lambda text: text.replace('"strategy":"tree"', '"strategy":"oak"'),
        lambda text: text.replace('"theta"', '"thet"'),
    ],
)
def test_damage(spoil: Callable[[str], str], make_plan: Make) -> None:
    plan = make_plan()
    with pytest.raises(PolicyError, match="committed numbers") as caught:
        calibrated(plan, spoil(calibrate(plan)))
    assert caught.value.__cause__ is None


def test_the_text_is_a_function_of_the_plan(make_plan: Make) -> None:
    assert calibrate(make_plan()) == calibrate(msgspec.structs.replace(make_plan()))


def test_a_run_skips_as_it_was_begun(make_plan: Make) -> None:
    """Whatever a job with the same hash says later: in its store indices lie as they were taken."""
    plans = [make_plan(weights=SelectionWeights(), skip=skip) for skip in (None, False)]
    assert [plan.design.skips for plan in plans] == [True, False]
    assert plans[0].hash == plans[1].hash
    for plan in plans:
        text = calibrate(plan)
        for other in plans:
            mine, restored = begun(other, text), calibrated(other, text)
            assert mine.hash == other.hash and mine.design.skips == plan.design.skips
            assert restored.plan.design.skips == plan.design.skips
            assert restored.plan.design.test_triggers.tolist() == plan.design.test_triggers.tolist()
    calibration = calibrate(make_plan(weights=SelectionWeights(), skip=True))
    with pytest.raises(PolicyError, match="cannot be read"):
        begun(make_plan(skip=False), calibration)
