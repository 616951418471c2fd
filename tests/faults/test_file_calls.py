"""Faults at file calls of real commands: killed, torn, failed, and after a loss of power.

The longer run is ``python -m tests.faults.filecalls.sweep --seconds 3600``.
"""

import errno
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from dpstream.accounting.limits import BUSY_SECONDS
from tests.faults.filecalls.commands import (
    ALL,
    APART,
    COMMANDS,
    READ_ONLY,
    Command,
    command_of,
    every_command,
)
from tests.faults.filecalls.disk import LOCK, LOOK, NAMES, OPEN, WRITE, Disk, calls
from tests.faults.filecalls.disk import READ as READ_CALL
from tests.faults.filecalls.server import ACTIONS, ERRORS, FUNCTIONS, Server, kinds_of, library
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
    "points": 3,
    "sql, of Parquet": 3,
    "workload answer --mechanism=geometric": 1,
    "sql --fresh": 3,
    "account show": 4,
    "init": 2,
    "secret new": 3,
}
FAST_READ = ("plan", "sql --explain")
ARM = """
import ctypes, fcntl, os, sys
os.chdir({folder!r})
ctypes.CDLL(os.environ["LD_PRELOAD"]).filecalls_arm(
    {folder!r}.encode(), ctypes.c_long({at}), {action}, {code}, 0, {kinds}, {journal!r}.encode())
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
#: How a file is read: an open, a lock and a read, and the number of the first error.
READ = """
try:
    fd = os.open("it", os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    assert os.read(fd, 9) == b"first"
except OSError as error:
    sys.exit(error.errno)
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


@pytest.fixture(scope="module")
def limited(server: Server, tmp_path_factory: pytest.TempPathFactory) -> World:
    return world(server, "account limit", tmp_path_factory.mktemp("limited"))


@pytest.mark.parametrize("name", FAST)
def test_a_sample_of_calls(name: str, server: Server, tmp_path: Path) -> None:
    made = world(server, name, tmp_path)
    sample = itertools.islice(cases(name, made, seed=1), FAST[name])
    assert failures(server, made, sample, tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
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


@pytest.mark.parametrize("name", ["init", "table init", "secret new"])
def test_a_command_that_is_done_says_what_shows_it(
    name: str, server: Server, tmp_path: Path
) -> None:
    """Typed once more, it is refused, and what the refusal says to type works."""
    world(server, name, tmp_path)
    command = COMMANDS[name]
    again = server.run(command.words, tmp_path / PLACE)
    if name == "secret new":  # it is another secret, whatever the messages say
        assert "another name" in again.stderr
    else:
        assert "`dpstream " in again.stderr


#: Calls of the account's file, what fails there from then on, and seconds until it is named.
AT_THE_ACCOUNT = {
    "ENOLCK": (LOCK, "account/ledger.db"),
    "EACCES": (OPEN, "account/ledger.db"),
    "EROFS": (OPEN, "account/ledger.db-journal"),
    "EDQUOT": (WRITE, "account/ledger.db-journal"),
    "ENOSPC": (WRITE, "account/ledger.db-journal"),
    "EIO": (READ_CALL, "account/ledger.db"),
    "ESTALE": (READ_CALL, "account/ledger.db"),
    "EMFILE": (OPEN, "account/ledger.db"),
}


@pytest.mark.parametrize("error", AT_THE_ACCOUNT)
def test_an_account_that_cannot_be_used_says_why(
    error: str, limited: World, server: Server, tmp_path: Path
) -> None:
    """At once, and with a fix after which the same command works."""
    kind, path = AT_THE_ACCOUNT[error]
    at = next(
        number
        for number, call in enumerate(limited.recorded, 1)
        if (call.kind, call.path) == (kind, path)
    )
    begun = time.monotonic()
    assert failure(server, limited, Case("account limit", at, error, True), tmp_path / PLACE) == ""
    assert time.monotonic() - begun < BUSY_SECONDS / 2


def test_a_lost_answer_is_seen(server: Server, tmp_path: Path) -> None:
    """The check fails where a disturbed command leaves other results."""
    made = world(server, "points", tmp_path)
    made.expected = made.expected._replace(files={"rows": []})
    what = failure(server, made, Case("points", 10, "kill"), tmp_path / PLACE)
    assert "other files" in what


def run(folder: Path, script: str, at: int = 0, action: str = "count", code: int = 0) -> int:
    """A script below the library; its exit code."""
    journal = str(folder.with_suffix(".journal"))
    arm = ARM.format(
        folder=str(folder),
        at=at,
        action=ACTIONS[action],
        code=code,
        kinds=kinds_of(action),
        journal=journal,
    )
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
    if action == "EINTR" or (action in ERRORS and WRITE not in ERRORS[action]):
        assert code == 0 and (place / "it").read_bytes() == b"second"  # Python calls again
        return
    expected = {"kill": (-signal.SIGKILL, b""), "tear": (-signal.SIGKILL, b"sec")}
    assert (code, (place / "new").read_bytes()) == expected.get(action, (1, b""))


@pytest.mark.parametrize("action", ERRORS)
@pytest.mark.parametrize(("at", "kind"), [(1, LOOK), (2, LOCK), (3, READ_CALL)])
def test_opens_locks_and_reads_fail_too(at: int, kind: int, action: str, tmp_path: Path) -> None:
    """Each with the errors that a system has there, and no others."""
    place = tmp_path / "place"
    place.mkdir()
    (place / "it").write_bytes(b"first")
    code = run(place, READ, at, action, getattr(errno, action))
    assert code == (getattr(errno, action) if kind in ERRORS[action] else 0)
