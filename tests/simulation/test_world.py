"""F10, and with it F1, F4, F5 and F6 in any combination: seeded histories, each checked whole."""

import pytest

from tests.simulation.stores import DRAWN
from tests.simulation.twins import TWINS
from tests.simulation.world import report, simulate

#: Seeds of the CI run, and how many one test takes; stores take turns with the seeds.
CI, TOGETHER = 300, 15
LONG = 20_000


def live_through(seeds: range) -> dict[str, int]:
    """Every seed must hold; what happened in all of them."""
    happened: dict[str, int] = {}
    for seed in seeds:
        outcome = simulate(seed)
        assert outcome.problem is None, report(seed)
        for name, amount in outcome.totals.items():
            happened[name] = happened.get(name, 0) + amount
    return happened


@pytest.mark.parametrize("first", range(0, CI, TOGETHER))
def test_histories(first: int) -> None:
    happened = live_through(range(first, first + TOGETHER))
    assert min(happened[name] for name in ("faults", "deaths", "zombies", "events")) > 0


def test_a_seed_is_one_history() -> None:
    for seed in (3, 8):
        once, again = simulate(seed), simulate(seed)
        assert once == again and len(once.trace) > 50


@pytest.mark.parametrize("name", TWINS)
def test_twin_is_caught(name: str) -> None:
    twin, store, rule = TWINS[name]
    number = list(DRAWN).index(store)
    with twin():
        for seed in range(number, CI, len(DRAWN)):
            problem = simulate(seed).problem
            if problem is not None and rule in problem:
                return
    raise AssertionError(f"{name} was not caught")


def test_a_failure_says_how_to_replay_it() -> None:
    with TWINS["half a group committed"].twin():
        seed = next(s for s in range(0, CI, len(DRAWN)) if simulate(s).problem)
        text = report(seed)
    assert text.startswith(f"seed {seed}: ")
    assert f"python -m tests.simulation.world --seed {seed}" in text and "--trace" in text


@pytest.mark.slow
def test_long() -> None:
    live_through(range(CI, LONG))
