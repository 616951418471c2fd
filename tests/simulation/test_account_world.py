"""Worlds of one account: processes that die, disks that lose what was not synced.

The longer run is ``python -m tests.simulation.account --seeds 1000``.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.simulation.account import BrokenError, Processes, live, processes

#: Sabotaged accounts, and what their worlds say.
SABOTAGED = {
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


@pytest.mark.parametrize("name", SABOTAGED)
def test_a_sabotaged_account_is_seen(name: str, server: Processes, tmp_path: Path) -> None:
    with pytest.raises(BrokenError, match=SABOTAGED[name]):
        for seed in range(12):
            live(server, seed, tmp_path, name)
