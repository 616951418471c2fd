"""Which noise answers a workload: the better one at the same guarantee, from public numbers."""

import math
from pathlib import Path
from unittest import mock

import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.accounting.gaussian import mu_of
from dpstream.accounting.strategies.cells.auto import Plan, auto
from dpstream.accounting.workloads.workload import Workload, marginals, over
from dpstream.pipelines.workload import families as module
from dpstream.pipelines.workload.families import Budget, Families, Left, families_of
from dpstream.pipelines.workload.lattice import planned_purely
from dpstream.pipelines.workload.planning import families_line
from tests.accounting.strategies.cells.shapes import attributes

RANGES = over([16], ["range"])
PLAN = auto(RANGES)
SMALL = Budget(1.0, 1e-9, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("strategies")


def of(folder: Path, budget: Budget, remaining: Left | None = None) -> Families:
    return families_of(RANGES, PLAN, budget, folder, remaining)


def test_the_better_one_is_taken(folder: Path) -> None:
    families = of(folder, SMALL)
    assert families.taken == "geometric" and families.gaussian is not None
    assert families.geometric == pytest.approx(planned_purely(RANGES, 1.0, 1, folder)["rmse"])
    mu = mu_of(1.0, 1e-9)
    assert families.gaussian == pytest.approx(math.sqrt(PLAN.error / RANGES.weight) / mu)
    loose = of(folder, Budget(1.0, 0.05, 1))
    assert loose.taken == "gaussian" and loose.gaussian is not None
    assert loose.geometric is not None and loose.gaussian < loose.geometric


def test_a_bound_spares_the_search(tmp_path: Path) -> None:
    with mock.patch.object(module, "solved_purely", side_effect=AssertionError):
        families = families_of(RANGES, PLAN, Budget(1.0, 0.2, 1), tmp_path)
    assert families.taken == "gaussian" and families.least
    assert families.geometric is not None
    assert families.geometric <= planned_purely(RANGES, 1.0, 1, tmp_path)["rmse"]


@pytest.mark.parametrize("contributions", [1, 3])
def test_errors_never_rise_with_epsilon_or_delta(folder: Path, contributions: int) -> None:
    def error(epsilon: float, delta: float) -> float:
        families = of(folder, Budget(epsilon, delta, contributions))
        value = families.gaussian if families.taken == "gaussian" else families.geometric
        assert value is not None
        return value

    deltas = [0.0, 1e-12, 1e-9, 1e-6, 1e-3, 0.1]
    for epsilon in (0.3, 1.0, 4.0):
        errors = [error(epsilon, delta) for delta in deltas]
        assert errors == sorted(errors, reverse=True)
    errors = [error(epsilon, 1e-9) for epsilon in (0.1, 0.3, 1.0, 3.0, 9.0)]
    assert errors == sorted(errors, reverse=True)


def test_at_an_equal_share_of_a_limit(folder: Path) -> None:
    """83 Gaussian questions of (1, 1e-9) are within (8, 1e-5), and 8 geometric ones."""
    remaining = Left(mu_of(8.0, 1e-5), 8.0)
    assert of(folder, SMALL, remaining).taken == "gaussian"
    # Shares that are equal, or less for geometric noise, are compared as they are.
    assert of(folder, SMALL, Left(remaining.mu, 1e4)).taken == "geometric"
    assert of(folder, SMALL, Left(mu_of(1.0, 1e-9), 1.0)).taken == "geometric"


def test_what_the_limit_does_not_allow_is_not_taken(folder: Path) -> None:
    mu = mu_of(1.0, 1e-9)
    assert of(folder, SMALL, Left(mu, 0.5)).taken == "gaussian"
    assert of(folder, SMALL, Left(mu / 2, 1.0)).taken == "geometric"
    loose = Budget(1.0, 0.2, 1)
    assert of(folder, loose, Left(mu_of(1.0, 0.2) / 2, 1.0)).taken == "geometric"
    assert of(folder, SMALL, Left(0.0, 0.0)).taken in ("gaussian", "geometric")


def test_one_that_cannot_answer(tmp_path: Path) -> None:
    asked = marginals(attributes(3, 4), [1], "range")
    families = families_of(asked, auto(asked), SMALL, tmp_path)
    assert families.taken == "gaussian" and families.geometric is None and families.refused
    assert [f["taken"] for f in families.described()] == [True, False]
    assert "gaussian (taken) RMSE" in families_line(families.described())
    with pytest.raises(PolicyError):
        families_of(asked, auto(asked), Budget(1.0, 0.0, 1), tmp_path)


def test_without_delta_noise_is_geometric(folder: Path) -> None:
    families = of(folder, Budget(1.0, 0.0, 1))
    assert families.taken == "geometric" and families.gaussian is None
    assert families_line(families.described()).startswith("geometric (taken) RMSE")


def test_nothing_is_looked_at_but_public_numbers(folder: Path) -> None:
    """A plan and a budget decide: a sabotaged plan of a better error changes the choice."""
    better = Plan(PLAN.strategy, "total", PLAN.error / 100, PLAN.floor / 100)
    assert families_of(RANGES, better, SMALL, folder).taken == "gaussian"


def test_two_attributes_are_one_product(tmp_path: Path) -> None:
    asked: Workload = over([4, 3], ["range", "identity"])
    assert families_of(asked, auto(asked), SMALL, tmp_path).taken == "geometric"
