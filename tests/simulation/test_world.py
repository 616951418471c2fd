"""F10, and with it F1, F4, F5 and F6 in any combination: seeded histories, each checked whole."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dpstream.state.store import RunIdentity
from tests.lanes import few_first
from tests.simulation.account import BrokenError, Processes, live, processes
from tests.simulation.limited import Database, LimitedStore
from tests.simulation.sabotaged import SABOTAGED
from tests.simulation.stores import DRAWN
from tests.simulation.world import report, simulate
from tests.state.conformance import IDENTITY, KEY_SCHEMA, STREAMS, StoreConformance
from tests.state.life_conformance import OLD, RetentionBench, RetentionConformance

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


# The model of the contract passes the contract's own suites, whole and in small parts.


SIZES = [(1 << 30, None), (1 << 30, 1), (2, 2), (1, 3)]


@pytest.fixture(params=SIZES, ids=str)
def bench(request: pytest.FixtureRequest) -> Database:
    return Database(IDENTITY, KEY_SCHEMA, STREAMS, *request.param)


class TestLimitedStore(StoreConformance):
    """The suite every store passes."""


class LimitedLifeBench(Database, RetentionBench):
    def fresh(self, identity: RunIdentity) -> LimitedStore:
        return Database(identity, KEY_SCHEMA, STREAMS, self.limit, 5).open()


@pytest.fixture(params=SIZES, ids=str)
def life(request: pytest.FixtureRequest) -> LimitedLifeBench:
    return LimitedLifeBench(OLD, KEY_SCHEMA, STREAMS, *request.param)


class TestLimitedLife(RetentionConformance):
    """The suite of every store's own life."""


# Worlds of one account: processes that die, disks that lose what was not synced.


#: Sabotaged accounts, and what their worlds say.
SABOTAGED_ACCOUNTS = {
    "no sync": "charges are gone|cannot be read",
    "no limit": "beyond the limit",
    "no head": "an older account is used",
    "shows what it drew": "a shown answer is gone or another|two shown answers",
}


@pytest.fixture(scope="module")
def server() -> Iterator[Processes]:
    with processes() as running:
        yield running


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=[] if n in (2, 11) else pytest.mark.slow) for n in range(200)]
)
def test_a_world(seed: int, server: Processes, tmp_path: Path) -> None:
    world = live(server, seed, tmp_path)
    assert world.made
    assert world.restored == ("an older account is put back" in world.history)


def test_worlds_have_charges_answers_faults_and_losses(server: Processes, tmp_path: Path) -> None:
    history = "\n".join("\n".join(live(server, seed, tmp_path).history) for seed in (0, 1, 3))
    for part in ("charged", "shown", "refused", ": -9", "power lost", "limit", "older"):
        assert part in history, part


@pytest.mark.parametrize("name", SABOTAGED_ACCOUNTS)
def test_a_sabotaged_account_is_seen(name: str, server: Processes, tmp_path: Path) -> None:
    with pytest.raises(BrokenError, match=SABOTAGED_ACCOUNTS[name]):
        for seed in range(12):
            live(server, seed, tmp_path, name)
