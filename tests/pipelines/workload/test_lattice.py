"""Pure epsilon: exact sensitivity, exact noise, and the errors that are said."""

import math
from unittest import mock

import numpy as np
import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.accounting.strategies.cells.pure import pure
from dpstream.accounting.workloads.workload import over
from dpstream.dp_transforms.noise.oneshot import OneShot
from dpstream.pipelines.workload.lattice import estimate_of, lattice_of, planned_purely, published
from tests.pipelines.workload.survey import workload
from tests.streams import KEYS

ASKED = over([12, 3], ["range", "total"])
LATTICE = lattice_of(pure(ASKED).lattice(10), 0.5, 2)
CELLS = np.random.default_rng(3).integers(0, 40, (12, 3))
RING = KEYS.ring()


def test_scale_is_never_below_what_pure_epsilon_needs() -> None:
    columns = [np.abs(factor).sum(0).max() for factor in LATTICE.strategy.factors]
    assert LATTICE.scale >= 2 * math.prod(map(int, columns)) / 0.5
    assert LATTICE.scale == pytest.approx(4 * math.prod(map(int, columns)))
    assert LATTICE.sd == pytest.approx(math.sqrt(2) * LATTICE.scale, rel=1e-3)


def test_without_noise_least_squares_is_exact() -> None:
    with mock.patch.object(
        OneShot, "discrete_laplace", lambda self, items, scale: np.zeros(len(items), np.int64)
    ):
        found = estimate_of(LATTICE, published(LATTICE, CELLS, RING, (b"r",)))
    [answers] = found.answers(ASKED)
    exact = np.concatenate([a.ravel() for a in ASKED.apply(CELLS)])
    assert np.allclose(answers.found, exact)
    with pytest.raises(PolicyError, match="only totals"):
        list(found.answers(over([12, 3], ["range", "identity"])))
    with pytest.raises(PolicyError, match="all cells"):
        list(found.answers(ASKED, consistent=True))


def test_errors_are_those_that_are_said() -> None:
    exact = np.concatenate([a.ravel() for a in ASKED.apply(CELLS)])
    off, sd = [], np.zeros(0)
    for run in range(150):
        found = estimate_of(LATTICE, published(LATTICE, CELLS, RING, (b"%d" % run,)))
        [answers] = found.answers(ASKED)
        off.append(answers.found - exact)
        sd = answers.sd
    measured = np.sqrt(np.mean(np.square(off), axis=0))
    assert np.abs(measured / sd - 1).max() < 0.3
    assert np.sqrt(np.mean(measured**2)) == pytest.approx(np.sqrt(np.mean(sd**2)), rel=0.1)


def test_noise_that_is_not_drawn() -> None:
    with pytest.raises(PolicyError):
        lattice_of(pure(ASKED).lattice(), 1e-12, 1)
    assert lattice_of(pure(workload([{"factors": {}}])).lattice(), 1.0, 1).sd > 0


def test_plan() -> None:
    found = planned_purely(ASKED, 1.0, 1)
    twice = planned_purely(ASKED, 0.5, 1)
    assert twice["rmse"] == pytest.approx(2 * found["rmse"], rel=1e-3)
    [answers] = estimate_of(LATTICE, np.zeros((len(LATTICE.strategy.factors[0]), 1))).answers(ASKED)
    assert np.sqrt(np.mean(answers.sd**2)) == pytest.approx(4 * found["rmse"], rel=2e-3)
    for epsilon in (0.0, math.inf, -1.0):
        with pytest.raises(PolicyError):
            planned_purely(ASKED, epsilon, 1)


@pytest.mark.slow
def test_all_ranges_of_256() -> None:
    """At a Laplace variance of 1, i.e. epsilon sqrt 2: HDMM has 5.736."""
    assert planned_purely(over([256], ["range"]), math.sqrt(2), 1)["rmse"] <= 5.74
