"""A command with ``--fresh`` that fails or is killed is typed again with its own flags until it is
done: one charge, and a stream's releases are those of its store."""

import itertools
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import accounts
from tests.faults.filecalls.commands import COMMANDS, RUN, Command
from tests.faults.filecalls.disk import calls
from tests.faults.filecalls.server import Server

FRESH = [name for name in COMMANDS if name.endswith("--fresh")]
#: What happens at a call and, of an error, at every later one of the first attempt.
WHAT = ("ENOSPC", "kill", "EIO", "ENOSPC")
#: Attempts on the full disk before it has space again.
ATTEMPTS = 3
#: Cases of the fast lane; the slow lane has more of every command.
FAST, MORE = {"run --fresh": 2, "workload answer --fresh": 2, "choose --fresh": 1}, 40


class Case(NamedTuple):
    """One fault: ``what`` happens at call ``at`` (1 is the first)."""

    at: int
    what: str


def cases(name: str, calls_of_all: int) -> Iterator[Case]:
    """The last call, one behind the charge, and then any, for ever."""
    rng = random.Random(name)
    yield Case(calls_of_all, "ENOSPC")
    yield Case(9 * calls_of_all // 10, "ENOSPC")
    for what in itertools.cycle(WHAT):
        yield Case(rng.randint(1, calls_of_all), what)


def charges_of(folder: Path) -> list[str]:
    return [charge.run_id for charge in accounts.charges(folder / "account" / "ledger.db")]


def prepared(server: Server, command: Command, folder: Path) -> tuple[Path, int]:
    """The folder before the command, and how many calls it makes."""
    place, before = folder / "case", folder / "before"
    command.prepare(server, place)
    shutil.copytree(place, before, symlinks=True)
    ended = server.run(command.words, place, journal=folder / "journal", fixed=False)
    assert ended.code == 0, ended.stderr
    return before, len(list(calls(folder / "journal")))


def wrong_after(server: Server, command: Command, case: Case, before: Path) -> str:
    """What is wrong once the command was typed until it is done; empty if nothing is."""
    place = before.with_name("case")
    shutil.rmtree(place)
    shutil.copytree(before, place, symlinks=True)
    old = charges_of(place)
    for _ in range(1 if case.what == "kill" else ATTEMPTS):
        ended = server.run(
            command.words, place, at=case.at, action=case.what, sticky=True, fixed=False
        )
        if ended.code == 0:
            break
    if ended.code != 0:
        ended = server.run(command.words, place, fixed=False)
    if ended.code != 0:
        return f"exit {ended.code}: {ended.stderr[-300:]}"
    new = charges_of(place)
    if new[: len(old)] != old or len(new) != len(old) + 1:
        return f"{len(new) - len(old)} charges"
    return _of_store(server, place) if command is COMMANDS["run --fresh"] else ""


def _of_store(server: Server, place: Path) -> str:
    """Whether the releases are those of the store, and a plain run changes nothing."""

    def files(name: str) -> dict[str, bytes]:
        root = place / name
        paths = root.glob("window-*/*")
        return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}

    published = files("out")
    export = server.run(("state", "releases", "--out", "rel"), place)
    again = server.run(RUN, place)
    alike = files("rel") == published == files("out")
    return "" if (export.code, again.code, alike) == (0, 0, True) and published else "other bytes"


def failures(server: Server, name: str, number: int, folder: Path) -> list[str]:
    before, number_of_calls = prepared(server, COMMANDS[name], folder)
    chosen = itertools.islice(cases(name, number_of_calls), number)
    outcomes = ((case, wrong_after(server, COMMANDS[name], case, before)) for case in chosen)
    return [f"{name}, {case}: {what}" for case, what in outcomes if what]


@pytest.mark.parametrize("name", FAST)
def test_it_is_charged_once(name: str, server: Server, tmp_path: Path) -> None:
    assert failures(server, name, FAST[name], tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", FRESH)
def test_it_is_charged_once_at_many_calls(name: str, server: Server, tmp_path: Path) -> None:
    assert failures(server, name, MORE, tmp_path) == []


@pytest.mark.parametrize("name", ["sql --fresh", "session ask --fresh"])
def test_an_answer_that_could_not_be_printed_is_charged_once(
    name: str, server: Server, tmp_path: Path
) -> None:
    command, place = COMMANDS[name], tmp_path / "case"
    command.prepare(server, place)
    old = charges_of(place)
    typed = [sys.executable, "-m", "dpstream.pipelines.cli.main", *command.words]

    def code(stdout: str) -> int:
        with open(stdout, "wb") as file:
            return subprocess.run(typed, cwd=place, stdout=file, check=False).returncode

    assert [code("/dev/full"), code("/dev/full"), code("/dev/null")] == [4, 4, 0]
    assert len(charges_of(place)) == len(old) + 1
    assert code("/dev/null") == 0
    assert len(charges_of(place)) == len(old) + 2
