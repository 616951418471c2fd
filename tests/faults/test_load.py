"""Limits of a machine: little memory, and load that is uneven."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms.flow import run_in_memory
from dpstream.dp_transforms.noise.ids import typed_ids
from dpstream.state import open as stores
from dpstream.state.disk_errors import MIN_ADDRESS_SPACE
from dpstream.state.idtable import shard_of
from tests import emulator
from tests.faults.child import plan_of
from tests.faults.filecalls.commands import COMMANDS, Command
from tests.faults.places import places, small_commits
from tests.streams import KEYS, STEP, Stream, begin, by_name, generate, key_name

SHARDS = 8


def uneven_keys(stream: Stream) -> Stream:
    """The same records with keys of which half are on shard 0 of ``SHARDS``."""
    numbers = np.arange(900)
    with KEYS.ring() as ring:
        ids = typed_ids(ring.key, [("string", pa.array([key_name(n) for n in numbers.tolist()]))])
    first = shard_of(ids, SHARDS) == 0
    half = (int(stream.key.max()) + 2) // 2
    chosen = np.stack([numbers[first][:half], numbers[~first][:half]], axis=1).reshape(-1)
    assert (shard_of(ids[chosen], SHARDS) == 0).mean() == 0.5
    return dataclasses.replace(stream, key=chosen[stream.key])


def burst(stream: Stream, plan: Plan) -> Stream:
    """The same records, but one trigger has ten times the share of another."""
    rng = np.random.default_rng(4)
    moved = rng.random(len(stream)) < 10 / (plan.timeline.windows * 6 + 9)
    event = np.where(moved, plan.timeline.start + 3 * STEP + stream.event % STEP, stream.event)
    return dataclasses.replace(stream, event=event, stamp=np.maximum(stream.stamp, event))


def streams(plan: Plan) -> dict[str, Stream]:
    even = generate(plan, 5, records=900, users=300, keys=40)
    return {"shard": uneven_keys(even), "burst": burst(even, plan)}


@pytest.mark.parametrize("kind", ["shard", "burst"])
@pytest.mark.parametrize("name", ["sticky", "threshold", "combined"])
def test_uneven_load_changes_no_release(tmp_path: Path, name: str, kind: str) -> None:
    plan = plan_of(name)
    batches = streams(plan)[kind].batches(97)
    releases = []
    for shards in (1, SHARDS):
        run = begin(plan, tmp_path / f"{shards}.db", shards)
        releases.append(by_name(run_in_memory(run, batches)[0]))
        stores.close_all()
    with emulator.running(), places("spanner", tmp_path) as place, small_commits():
        releases.append(by_name(run_in_memory(begin(plan, place(), SHARDS), batches)[0]))
    assert releases[0] == releases[1] == releases[2]
    assert len({len(data) for data in releases[0].values()}) > 3


DPSTREAM = (sys.executable, "-m", "dpstream")
PRISM = ("--runner", "PrismRunner")
#: Commands, and what is added to them.
NAMES = ("run", "run on Prism", "sql", "points", "census execute", "workload answer")


def command_of(name: str) -> tuple[Command, tuple[str, ...]]:
    """A command, and its words."""
    command = COMMANDS[name.removesuffix(" on Prism")]
    return command, (*command.words, *(PRISM if name.endswith("Prism") else ()))


def limited(folder: Path, limit: int, *words: str) -> subprocess.CompletedProcess[str]:
    """A command whose process may have so many bytes of address space."""
    program = (
        "import os, resource, sys; "
        f"resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit})); "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    return subprocess.run(
        [sys.executable, "-S", "-c", program, *DPSTREAM, *words],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("mebibytes", [850, 2048])
@pytest.mark.parametrize("name", NAMES)
def test_too_little_memory_is_refused_before_a_charge(
    tmp_path: Path, name: str, mebibytes: int
) -> None:
    command, words = command_of(name)
    command.world(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    ended = limited(tmp_path, mebibytes << 20, *words)
    assert ended.returncode == 4, ended.stderr
    assert "memory" in ended.stderr and f"ulimit -v {MIN_ADDRESS_SPACE >> 10}" in ended.stderr
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_help_and_plans_need_less(tmp_path: Path) -> None:
    COMMANDS["run"].world(tmp_path)
    for words in (("run", "--help"), ("plan",)):
        assert limited(tmp_path, 850 << 20, *words).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_limit_that_the_fix_names_is_enough(tmp_path: Path, name: str) -> None:
    command, arguments = command_of(name)
    command.world(tmp_path)
    for words in command.before:
        assert not callable(words)
        subprocess.run([*DPSTREAM, *words], cwd=tmp_path, check=True, capture_output=True)
    ended = limited(tmp_path, MIN_ADDRESS_SPACE, *arguments)
    assert ended.returncode == 0, ended.stderr
