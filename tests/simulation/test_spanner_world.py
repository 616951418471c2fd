"""The same seeds on the Spanner emulator, with commits that hold two or three keys."""

from collections.abc import Iterator
from typing import Any

import pytest

from dpstream.state.spanner import retention, shards
from dpstream.state.spanner.shards import SpannerUnitShard
from dpstream.state.spanner.store import SpannerStore
from tests.simulation.stores import emulated, spanner
from tests.simulation.world import report, simulate

#: In these a decision cut short had gone further than the one that was made in its place.
REACHING = (777, 2429)
SEEDS = (0, 3, 8, 21, 102, 120, *REACHING)
#: Of jobs that skip what is published.
SKIPPING = range(8)
LONG = 500


@pytest.fixture(scope="module", autouse=True)
def running() -> Iterator[None]:
    with emulated():
        yield


@pytest.mark.parametrize("seed", SEEDS)
def test_histories(seed: int) -> None:
    outcome = simulate(seed, spanner)
    assert outcome.problem is None, report(seed, spanner, "spanner")


@pytest.mark.parametrize("seed", SKIPPING)
def test_histories_of_jobs_that_skip(seed: int) -> None:
    outcome = simulate(seed, spanner, skipping=True)
    assert outcome.problem is None, report(seed, spanner, "spanner", skipping=True)


def _without_reach(real: Any) -> Any:
    """What a decision cut short has left beyond the one in its place is not seen."""

    def load(shard: Any, *args: Any) -> None:
        real(shard, *args)
        shard.reach = 0

    return load


def _without_firsts(real: Any) -> Any:
    """Indices of first pairs are taken again once the records have gone."""
    return lambda gone, until, fresh: real(gone, until, None if fresh is None else 0 * fresh)


def _drops_nothing(real: Any) -> Any:
    return lambda *_: None


SABOTAGED = {
    "what reaches beyond a decision": (SpannerUnitShard, "load", _without_reach, REACHING),
    "states after an error": (SpannerStore, "_drop", _drops_nothing, range(60)),
    "records of a key of a unit that is loaded": (shards, "enter_keys", _drops_nothing, (0,)),
    "first pairs whose records expired": (retention, "pack_headers", _without_firsts, (2,)),
}


@pytest.mark.parametrize("name", SABOTAGED)
def test_sabotage_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, method, make, seeds = SABOTAGED[name]
    monkeypatch.setattr(owner, method, make(getattr(owner, method)))
    assert any(simulate(seed, spanner).problem for seed in seeds), f"{name} was not caught"


@pytest.mark.slow
def test_long() -> None:
    for seed in range(1000, 1000 + LONG):
        outcome = simulate(seed, spanner)
        assert outcome.problem is None, report(seed, spanner, "spanner")


@pytest.mark.slow
def test_long_of_jobs_that_skip() -> None:
    for seed in range(1000, 1000 + LONG // 5):
        outcome = simulate(seed, spanner, skipping=True)
        assert outcome.problem is None, report(seed, spanner, "spanner", skipping=True)
