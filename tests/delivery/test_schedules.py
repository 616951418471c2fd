"""F5: 200 generated schedules of delivery through the real stages that wait."""

from collections import Counter

import pytest

from dpstream.accounting.errors import RunError
from tests.audit.neighbours import skipping_name
from tests.delivery.audit import audit
from tests.delivery.sabotaged import SABOTAGED
from tests.delivery.schedules import Back, make
from tests.lanes import few_first

CI, TOGETHER, LONG = 200, 10, 5_000
#: Schedules of jobs that skip what is published.
SKIPPING, FEWER = 100, 5


def audited(seeds: range, skipping: bool = False) -> Counter[str]:
    totals = Counter[str]()
    for seed in seeds:
        problems, came = audit(seed, name=skipping_name(seed) if skipping else None)
        assert problems == [], f"seed {seed}"
        totals += Counter(fired=came.fired, restores=came.restores)
    return totals


@pytest.mark.parametrize("first", few_first(range(0, CI, TOGETHER), fast=2))
def test_schedules(first: int) -> None:
    totals = audited(range(first, first + TOGETHER))
    assert totals["fired"] > 5 * TOGETHER and totals["restores"] > 0


@pytest.mark.parametrize("first", few_first(range(0, SKIPPING, FEWER), fast=2))
def test_schedules_of_jobs_that_skip(first: int) -> None:
    totals = audited(range(first, first + FEWER), skipping=True)
    assert totals["fired"] > 5 * FEWER


@pytest.mark.slow
def test_schedules_long() -> None:
    print(audited(range(CI, LONG)), audited(range(SKIPPING, LONG // 5), skipping=True))


@pytest.mark.parametrize("name", SABOTAGED)
def test_sabotage_is_caught(name: str) -> None:
    patch, rule, kind, plan = SABOTAGED[name]
    for seed in range(80):
        with patch():
            try:
                problems = audit(seed, kind, plan)[0]
            except RunError as error:
                problems = [error.rule]
        if any(rule in problem for problem in problems):
            # It is the sabotage that is caught: the product passes the same schedule.
            assert audit(seed, kind, plan)[0] == []
            return
    raise AssertionError(f"{name} was not caught")


def test_the_schedules_reach_what_they_claim() -> None:
    made = [make(seed) for seed in range(CI)]
    assert {pair.kind for pair, _ in made} >= {"far_future", "far_past", "late", "straddle"}
    backs = [e for _, s in made for e in s.events if isinstance(e, Back)]
    assert {back.nth is None for back in backs} == {True, False}
    assert sum(bool(s.tardy) for _, s in made) == CI // 2
    for pair, _ in made:
        timeline = pair.plan.timeline
        assert timeline.instant_of(1) % 1000 != 0
