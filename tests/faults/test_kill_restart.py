"""F2, F3, F6: kill -9 at named and at random points, restart on the same store, two at once."""

import functools
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.faults.child import POINTS, Fault, plan_of
from tests.faults.processes import files, finish, run_to_the_end, start

LONG_KILLS = 200
NAMES = ("sticky", "rounds", "public", "combined")


@functools.cache
def undisturbed(name: str) -> dict[str, bytes]:
    """Files of a run that nothing happens to."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        run_to_the_end(name, f"{folder}/s.db", str(out))
        return files(out)


def check(name: str, out: Path) -> None:
    """The same files, byte for byte: nothing lost, doubled or changed."""
    line, expected = plan_of(name).timeline, undisturbed(name)
    assert len(expected) == line.windows * line.triggers
    assert any(len(data) > min(map(len, expected.values())) for data in expected.values())
    assert files(out) == expected


def killed_at(name: str, fault: Fault, folder: Path, in_beam: bool = False) -> None:
    """Kill a run at a point, then let another finish its work."""
    out = folder / "out"
    code = finish(start(name, f"{folder}/s.db", str(out), fault, in_beam))
    assert code == -signal.SIGKILL, f"{fault} was never reached"
    # The restart gets its input in another order and in other batches.
    run_to_the_end(name, f"{folder}/s.db", str(out), in_beam=in_beam, seed=fault.nth)
    check(name, out)


def nth_of(point: str, rng: np.random.Generator) -> int:
    """Some occurrence: 2 unit shards, 24 steps in groups of 4 (6 commits) and 12 files."""
    kinds = (("unit", 2), ("_write_steps", 6), ("write", 12))
    most = next((n for name, n in kinds if name in point), 24)
    return int(rng.integers(1, most + 1))


CI_FAULTS = [
    ("sticky", Fault("after commit_units", 1), False),
    ("sticky", Fault("before commit_step", 9), False),
    ("rounds", Fault("after commit_step", 7), False),
    ("public", Fault("after commit_step", 4), False),
    ("sticky", Fault("after _write_steps", 2), False),
    ("rounds", Fault("before _write_steps", 4), False),
    ("rounds", Fault("after write_release", 3), False),
    ("sticky", Fault("after commit_step", 11), True),
    # The second shard's units are decided after the restart, the first one's ranks recalled.
    ("combined", Fault("after commit_units", 1), False),
    ("combined", Fault("after commit_step", 9), False),
]


@pytest.mark.parametrize(("name", "fault", "in_beam"), CI_FAULTS)
def test_killed_at_a_point(tmp_path: Path, name: str, fault: Fault, in_beam: bool) -> None:
    killed_at(name, fault, tmp_path, in_beam)


def random_kills(name: str, folder: Path, seed: int, kills: int) -> int:
    """Kill a slow run at random instants, again and again; returns how many kills hit."""
    rng, out, hits = np.random.default_rng(seed), folder / "out", 0
    for n in range(kills):
        process = start(name, f"{folder}/s.db", str(out), pause=0.01, seed=n)
        process.join(float(rng.uniform(0.1, 1.5)))
        process.kill()
        hits += finish(process) == -signal.SIGKILL
    run_to_the_end(name, f"{folder}/s.db", str(out))
    check(name, out)
    return hits


def test_killed_at_random(tmp_path: Path) -> None:
    assert random_kills("sticky", tmp_path, 1, 3) > 0


def test_two_at_once(tmp_path: Path) -> None:
    """Two processes run the same job on one store: one value, both emit it."""
    outs = [tmp_path / "a", tmp_path / "b"]
    store = f"{tmp_path}/s.db"
    both = [start("sticky", store, str(out), pause=0.004) for out in outs]
    codes = [finish(process) for process in both]
    for out, code in zip(outs, codes, strict=True):
        if code:  # it lost the race for BOUND's decision; its retry must agree
            run_to_the_end("sticky", store, str(out))
        check("sticky", out)


def long_faults() -> Iterator[tuple[str, Fault, bool]]:
    rng = np.random.default_rng(11)
    for n in range(LONG_KILLS):
        point = POINTS[n % len(POINTS)]
        yield NAMES[n % len(NAMES)], Fault(point, nth_of(point, rng)), n % 10 == 0


@pytest.mark.slow
def test_killed_at_every_point(tmp_path: Path) -> None:
    for n, (name, fault, in_beam) in enumerate(long_faults()):
        folder = tmp_path / str(n)
        folder.mkdir()
        killed_at(name, fault, folder, in_beam)


@pytest.mark.slow
def test_killed_at_random_long(tmp_path: Path) -> None:
    hits = 0
    for n in range(LONG_KILLS // 8):
        folder = tmp_path / str(n)
        folder.mkdir()
        hits += random_kills(NAMES[n % len(NAMES)], folder, n, 8)
    assert hits >= LONG_KILLS // 2
