"""P3: every sabotaged variant is caught by the audit that the honest product passes."""

from functools import cache
from pathlib import Path

import pytest

from tests.audit.checks import scale_problems
from tests.audit.neighbours import make_pair
from tests.audit.sabotaged import SABOTAGED
from tests.audit.sabotaged_ranked import RANKED_SABOTAGED
from tests.audit.sabotaged_skipping import SKIPPING_SABOTAGED
from tests.audit.test_neighbours import audit, mechanism_of

ALL = SABOTAGED | RANKED_SABOTAGED | SKIPPING_SABOTAGED
#: Neighbours tried before a variant counts as undetected; the audit of CI has many more.
TRIES = 4


def breaches(plan: str, kind: str, seed: int, folder: Path) -> set[str]:
    """Rules that the code in force breaches on one pair."""
    problems, traces = audit(make_pair(seed, kind, plan), folder)
    problems += scale_problems(mechanism_of(plan), traces)
    return {problem.partition(":")[0] for problem in problems}


@cache
def honest_breaches(plan: str, kind: str, seed: int, folder: Path) -> set[str]:
    """Breaches of the product as it is; several variants share their neighbours."""
    return breaches(plan, kind, seed, folder)


@pytest.mark.parametrize("name", ALL)
def test_sabotage_is_caught(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    case, shared = ALL[name], tmp_path_factory.getbasetemp()
    mechanism_of(case.plan)  # the judge's figures are never computed under sabotage
    for seed in range(100, 100 + TRIES):
        with case.patch():
            caught = case.rule in breaches(case.plan, case.kind, seed, tmp_path)
        honest = honest_breaches(case.plan, case.kind, seed, shared)
        assert honest == set(), f"honest product, seed {seed}"
        if caught:
            return
    raise AssertionError(f"{name} was not caught")
