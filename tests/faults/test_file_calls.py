"""Faults at file calls of real commands: killed, torn, failed, and after a loss of power.

The longer run is ``python -m tests.faults.filecalls.sweep --seconds 3600``.
"""

import errno
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.faults.filecalls.commands import (
    APART,
    COMMANDS,
    READ_ONLY,
    Command,
    command_of,
    every_command,
)
from tests.faults.filecalls.disk import NAMES, Disk, calls
from tests.faults.filecalls.server import ACTIONS, FUNCTIONS, Server, library
from tests.faults.filecalls.sweep import (
    FAULTS,
    PLACE,
    Case,
    World,
    at_every_call,
    cases,
    described,
    failure,
    world,
    written,
)

#: Commands of the fast lane, and how many cases of each; the slow lane takes every call of all.
FAST = {
    "session ask": 3,
    "sql": 3,
    "workload answer --mechanism=geometric": 1,
    "choose": 1,
    "init": 2,
    "secret new": 3,
}
FAST_READ = ("plan", "sql --explain")
ARM = """
import ctypes, os
os.chdir({folder!r})
ctypes.CDLL(os.environ["LD_PRELOAD"]).filecalls_arm(
    {folder!r}.encode(), ctypes.c_long({at}), {action}, {code}, 0, {journal!r}.encode())
"""
#: How a file can be replaced: with nothing synced, its bytes, or its bytes and its name.
REPLACED = """
fd = os.open("new", os.O_CREAT | os.O_WRONLY)
os.write(fd, b"second")
{file}
os.close(fd)
os.rename("new", "it")
{folder}
"""
SYNC_FILE = "os.fsync(fd)"
SYNC_FOLDER = "os.fsync(os.open('.', os.O_RDONLY))"


def failures(server: Server, made: World, chosen: Iterable[Case], folder: Path) -> list[str]:
    """The cases that fail."""
    wrong = []
    for case in chosen:
        what = failure(server, made, case, folder / PLACE)
        if what:
            wrong.append(f"{described(made, case)}: {what}")
    return wrong


@pytest.mark.parametrize("name", FAST)
def test_a_sample_of_calls(name: str, server: Server, tmp_path: Path) -> None:
    made = world(server, name, tmp_path)
    sample = itertools.islice(cases(name, made, seed=1), FAST[name])
    assert failures(server, made, sample, tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_every_call(name: str, server: Server, tmp_path: Path) -> None:
    made = world(server, name, tmp_path)
    assert failures(server, made, at_every_call(name, made, seed=2), tmp_path) == []


def test_every_command_is_here() -> None:
    """A new command is tested, declared to write nothing, or set apart with a reason."""
    write, read = ({command_of(case) for case in cases} for cases in (COMMANDS, READ_ONLY))
    assert write - {*FUNCTIONS} | read | APART.keys() == every_command()
    anew = {command_of(case) for case in COMMANDS if case.endswith("--fresh")}
    assert anew == every_command("--fresh") & write


def _writes(server: Server, command: Command, folder: Path) -> list[str]:
    place, journal = folder / "place", folder / "journal"
    command.prepare(server, place)
    ended = server.run(command.words, place, journal=journal)
    assert ended.code == 0, ended.stderr
    return [f"{NAMES[call.kind]} {call.path}" for call in written(calls(journal))]


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in FAST_READ else pytest.mark.slow) for n in READ_ONLY],
)
def test_a_command_that_reads_writes_nothing(name: str, server: Server, tmp_path: Path) -> None:
    assert _writes(server, READ_ONLY[name], tmp_path) == []


def test_a_command_that_writes_is_seen(server: Server, tmp_path: Path) -> None:
    assert _writes(server, COMMANDS["secret new"], tmp_path) != []


def test_a_lost_answer_is_seen(server: Server, tmp_path: Path) -> None:
    """The check fails where a disturbed command leaves other results."""
    made = world(server, "session ask", tmp_path)
    made.expected = ({"rows": []}, made.expected[1])
    what = failure(server, made, Case("session ask", 10, "kill"), tmp_path / PLACE)
    assert "other results" in what


def run(folder: Path, script: str, at: int = 0, action: str = "count", code: int = 0) -> int:
    """A script below the library; its exit code."""
    journal = str(folder.with_suffix(".journal"))
    arm = ARM.format(folder=str(folder), at=at, action=ACTIONS[action], code=code, journal=journal)
    env = os.environ | {"LD_PRELOAD": str(library())}
    return subprocess.run([sys.executable, "-c", arm + script], env=env, check=False).returncode


def replaced(tmp_path: Path, file: str, folder: str) -> dict[str, set[bytes]]:
    """What "it" holds after a loss of power at the end, by model."""
    place, before = tmp_path / "place", tmp_path / "before"
    for path in (place, before):
        path.mkdir()
        (path / "it").write_bytes(b"first")
    assert run(place, REPLACED.format(file=file, folder=folder)) == 0
    held = dict[str, set[bytes]]()
    for model, seed in [("data", 0), *(("entries", seed) for seed in range(20))]:
        disk, after = Disk(before), tmp_path / f"{model}-{seed}"
        for call in calls(place.with_suffix(".journal")):
            disk.replay(call)
        after.mkdir()
        disk.write(after, model, seed)
        held.setdefault(model, set()).add((after / "it").read_bytes())
    return held


@pytest.mark.parametrize(
    ("file", "folder", "data", "entries"),
    [
        ("", "", {b""}, {b"", b"first", b"second"}),
        (SYNC_FILE, "", {b"second"}, {b"first", b"second"}),
        ("", SYNC_FOLDER, {b""}, {b"", b"second"}),
        (SYNC_FILE, SYNC_FOLDER, {b"second"}, {b"second"}),
    ],
)
def test_what_a_loss_of_power_leaves(
    file: str, folder: str, data: set[bytes], entries: set[bytes], tmp_path: Path
) -> None:
    held = replaced(tmp_path, file, folder)
    assert held == {"data": data, "entries": entries}


@pytest.mark.parametrize("action", FAULTS)
def test_a_fault_happens_at_its_call(action: str, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    code = run(place, REPLACED.format(file="", folder=""), 2, action, getattr(errno, action, 0))
    if action == "EINTR":  # Python calls again
        assert code == 0 and (place / "it").read_bytes() == b"second"
        return
    expected = {"kill": (-signal.SIGKILL, b""), "tear": (-signal.SIGKILL, b"sec")}
    assert (code, (place / "new").read_bytes()) == expected.get(action, (1, b""))
