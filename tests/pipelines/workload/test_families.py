"""Which noise answers a workload: the better one at the same guarantee, from public numbers."""

import math
from pathlib import Path
from unittest import mock

import pytest

from dpstream.accounting.errors import UsageError
from dpstream.accounting.gaussian import mu_of
from dpstream.accounting.periods import Room
from dpstream.accounting.query.calibration import Cost
from dpstream.accounting.strategies.cells.auto import Plan, auto
from dpstream.accounting.workloads.workload import Workload, marginals, over
from dpstream.pipelines.render.workload_plan import families_line
from dpstream.pipelines.workload import families as module
from dpstream.pipelines.workload.families import Budget, Families, families_of
from dpstream.pipelines.workload.lattice import planned_purely
from tests.accounting.strategies.cells.shapes import attributes
from tests.accounts import room

RANGES = over([16], ["range"])
PLAN = auto(RANGES)
SMALL = Budget(1.0, 1e-9, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("strategies")


def of(folder: Path, budget: Budget, limit: Room | None = None) -> Families:
    return families_of(RANGES, PLAN, budget, folder, limit)


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
    """76 Gaussian questions of (1, 1e-9) are within (8, 1e-5), and 8 geometric ones."""
    assert of(folder, SMALL, room((8.0, 1e-5))).taken == "gaussian"
    # Shares that are equal, or less for geometric noise, are compared as they are.
    assert of(folder, SMALL, room((1.0, 1e-9))).taken == "geometric"
    assert of(folder, SMALL, room((8.0, 1e-40))).taken == "geometric"


def test_shares_decide_where_the_bound_does_not(folder: Path) -> None:
    """Geometric noise of its own epsilon is better, and of Gaussian noise's share it is not."""
    families = of(folder, SMALL, room((4.0, 1e-9)))
    assert families.taken == "gaussian" and not families.least
    assert families.gaussian is not None and families.geometric is not None
    assert families.geometric < families.gaussian
    assert of(folder, SMALL, room((3.0, 1e-9))).taken == "geometric"


def test_errors_are_those_of_all_records_of_a_unit(folder: Path) -> None:
    families = of(folder, Budget(1.0, 1e-9, 3))
    gaussian = 3 * math.sqrt(PLAN.error / RANGES.weight) / mu_of(1.0, 1e-9)
    assert families.gaussian == pytest.approx(gaussian)
    assert families.geometric == pytest.approx(planned_purely(RANGES, 1.0, 3, folder)["rmse"])


def test_what_the_limit_does_not_allow_is_not_taken(folder: Path) -> None:
    mostly = Budget(1.0, 1e-5, 1)
    assert of(folder, mostly, room((8.0, 1e-5))).taken == "gaussian"
    assert of(folder, SMALL, room((1.0, 1e-12))).taken == "geometric"
    # Gaussian noise of mu 1.45 is spent: a little more of it is accepted, and no epsilon of 1.
    spent = Cost(9.0, 0.0, 1.45, 0.0)
    assert of(folder, SMALL, room((8.0, 1e-6))).taken == "gaussian"
    large = Budget(6.0, 1e-9, 1)
    alone = of(folder, large)
    assert alone.taken == "geometric" and alone.geometric is not None and alone.geometric < 1
    assert of(folder, large, room((8.0, 1e-6))).taken == "geometric"
    assert of(folder, Budget(1.0, 1e-12, 1), room((8.0, 1e-6), spent)).taken == "gaussian"
    loose = Budget(1.0, 0.2, 1)
    assert of(folder, loose).taken == "gaussian"
    assert of(folder, loose, room((1.0, 1e-12))).taken == "geometric"


def test_one_that_cannot_answer(tmp_path: Path) -> None:
    workload = marginals(attributes(3, 4), [1], "range")
    families = families_of(workload, auto(workload), SMALL, tmp_path)
    assert families.taken == "gaussian" and families.geometric is None and families.refused
    assert [f["taken"] for f in families.described()] == [True, False]
    assert "gaussian (taken) RMSE" in families_line(families.described())
    with pytest.raises(UsageError):
        families_of(workload, auto(workload), Budget(1.0, 0.0, 1), tmp_path)


def test_without_delta_noise_is_geometric(folder: Path) -> None:
    families = of(folder, Budget(1.0, 0.0, 1))
    assert families.taken == "geometric" and families.gaussian is None
    assert families_line(families.described()).startswith("geometric (taken) RMSE")
    gaussian, geometric = families.described()
    assert gaussian["rmse"] is None and gaussian["refused"] and not geometric["refused"]
    both = of(folder, SMALL).described()
    assert [row["refused"] for row in both] == ["", ""]


def test_nothing_is_looked_at_but_public_numbers(folder: Path) -> None:
    """A plan and a budget decide: a sabotaged plan of a better error changes the choice."""
    better = Plan(PLAN.strategy, "total", PLAN.error / 100, PLAN.floor / 100)
    assert families_of(RANGES, better, SMALL, folder).taken == "gaussian"


def test_two_attributes_are_one_product(tmp_path: Path) -> None:
    workload: Workload = over([4, 3], ["range", "identity"])
    assert families_of(workload, auto(workload), SMALL, tmp_path).taken == "geometric"
