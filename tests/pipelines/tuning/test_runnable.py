"""Noise of what is chosen, and the largest C that can be run."""

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.tuning.question import encoder_matrix
from dpstream.accounting.tuning.starred import usual, with_privacy
from dpstream.accounting.weights import MILD
from dpstream.pipelines.project.project import load_project
from dpstream.pipelines.tuning.ask import CheckedRequest, Request, ask
from dpstream.pipelines.tuning.runnable import _noise, bounds_of, read_off_runnable, with_bounds
from tests.pipelines.tuning.asking import closed, project_file  # noqa: F401


@pytest.fixture
def tuning(project: Path) -> CheckedRequest:
    request = Request(load_project(project), "hourly", "new", proxy="/x/*.csv", quantile=0.9)
    return ask(request)


def nodes(question: CheckedRequest, pairs: int) -> list[np.ndarray]:
    """Noise-free nodes of 900 units with so many pairs, and of values between -20 and 20."""
    node_values = []
    for of, value in zip(question.design.histograms, (pairs, 20), strict=True):
        counts = np.zeros(of.cells, np.int64)
        counts[np.searchsorted(of.candidates, value)] = 900
        node_values.append(encoder_matrix(of.cells) @ counts)
    return node_values


def test_noise_is_that_of_the_plan(tuning: CheckedRequest) -> None:
    plan = with_bounds(tuning, (("total", -40, 40),))
    for count, bound in ((4, None), (12, None), (12, 1)):
        other = with_privacy(plan, contributions=count, per_key_bound=bound)
        other = with_privacy(other, weights=usual(other))
        assert (other.privacy.weights == MILD) == (count >= 8)
        assert _noise(plan, count, bound) == allocate(other).values[0].sd[-1]
    assert _noise(plan, 10**6, None) == math.inf == _noise(plan, 4, -3)


def test_bounds_are_in_the_columns_units(tuning: CheckedRequest) -> None:
    assert bounds_of(tuning, (("total", -40, 41),)) == {"total": (-20, 20.5)}
    [_, total] = with_bounds(tuning, (("total", -40, 40),)).aggregates
    assert total.bounds == (-20, 20)


def test_the_largest_bound_that_can_be_run(tuning: CheckedRequest) -> None:
    """Nobody gets a C whose noise cannot be drawn, and no figures of another one."""
    few = read_off_runnable(tuning, nodes(tuning, 3))
    assert few.contributions == 3 and few.cut == pytest.approx(0) and few.notes == ()
    many = read_off_runnable(tuning, nodes(tuning, 1_000))
    assert 3 < many.contributions < 1_000 and many.cut is None is many.sd
    assert "sampler" in many.notes[-1]
    plan = with_bounds(tuning, many.bounds)
    replace = msgspec.structs.replace
    for count, runs in ((many.contributions, True), (many.contributions + 1, False)):
        other = replace(plan, privacy=replace(plan.privacy, contributions=count))
        if runs:
            allocate(other)
        else:
            with pytest.raises(Exception, match="sampler"):
                allocate(other)
