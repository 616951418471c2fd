"""F10, and with it F1, F4, F5 and F6 in any combination: seeded histories, each checked whole."""

import pytest

from tests.lanes import few_first
from tests.simulation.sabotaged import SABOTAGED
from tests.simulation.stores import DRAWN
from tests.simulation.world import report, simulate

#: Seeds of the CI run, and how many one test takes; stores take turns with the seeds.
CI, TOGETHER = 300, 30
LONG = 20_000
#: In every test of the CI run; positions expire and their records come again.
HAPPEN = ("faults", "deaths", "zombies", "events", "restores", "expired", "expired_came_again")


def live_through(seeds: range, skipping: bool = False) -> dict[str, int]:
    """Every seed must hold; what happened in all of them."""
    happened: dict[str, int] = {}
    for seed in seeds:
        outcome = simulate(seed, skipping=skipping)
        assert outcome.problem is None, report(seed, skipping=skipping)
        for name, amount in outcome.totals.items():
            happened[name] = happened.get(name, 0) + amount
    return happened


@pytest.mark.parametrize("first", few_first(range(0, CI, TOGETHER), fast=2))
def test_histories(first: int) -> None:
    happened = live_through(range(first, first + TOGETHER))
    assert min(happened[name] for name in HAPPEN) > 0


@pytest.mark.parametrize("first", few_first(range(0, 60, TOGETHER)))
def test_histories_of_jobs_that_skip(first: int) -> None:
    happened = live_through(range(first, first + TOGETHER), skipping=True)
    assert min(happened[name] for name in HAPPEN) > 0


def test_a_seed_is_one_history() -> None:
    for seed in (3, 8):
        once, again = simulate(seed), simulate(seed)
        assert once == again and len(once.trace) > 50


@pytest.mark.parametrize("name", SABOTAGED)
def test_sabotage_is_caught(name: str) -> None:
    sabotage = SABOTAGED[name]
    number = list(DRAWN).index(sabotage.store)
    for seed in sabotage.seeds or range(number, CI, len(DRAWN)):
        with sabotage.patch():
            problem = simulate(seed, skipping=sabotage.skipping).problem
        if problem is not None and sabotage.rule in problem:
            # It is the sabotage that is caught: the product passes the same history.
            assert simulate(seed, skipping=sabotage.skipping).problem is None
            return
    raise AssertionError(f"{name} was not caught")


def test_a_failure_says_how_to_replay_it() -> None:
    with SABOTAGED["half a group committed"].patch():
        seed = next(s for s in range(0, CI, len(DRAWN)) if simulate(s).problem)
        text = report(seed)
    assert text.startswith(f"seed {seed}: ")
    assert f"python -m tests.simulation.world --seed {seed}" in text and "--trace" in text


@pytest.mark.slow
def test_long() -> None:
    live_through(range(CI, LONG))


@pytest.mark.slow
def test_long_of_jobs_that_skip() -> None:
    live_through(range(60, LONG // 10), skipping=True)
