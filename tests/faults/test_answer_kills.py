"""Questions that are killed or typed again: one charge, and the answer is what was drawn first.

What was drawn before a kill is noted beside the job, as somebody who watched the memory could: the
answer that comes in the end must be made of it."""

import contextlib
import dataclasses
import hashlib
import itertools
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest

from dpstream.pipelines.ask import folder as folders
from dpstream.pipelines.cli.main import cli
from dpstream.pipelines.workload import registered, release
from dpstream.pipelines.workload.estimate import Estimate, TableEstimate
from dpstream.pipelines.workload.release import read_release
from dpstream.state.ledger.contract import AnswerLog
from tests import accounts
from tests.faults.filecalls.commands import (
    ANSWER,
    COMMANDS,
    RUN,
    STATEMENT,
    Command,
    catalog,
    nothing,
)
from tests.faults.filecalls.disk import calls
from tests.faults.filecalls.server import Server
from tests.faults.processes import LONGEST, files
from tests.pipelines.workload.survey import survey, write

#: Where a process can be told to die, in the order in which it passes them.
POINTS = (
    "before begin", "after begin", "before bounded", "after bounded", "after draw",
    "before commit", "after commit", "before publish_folder", "after publish_folder",
)  # fmt: skip
#: From here on the charge is made, and from here on something was drawn.
CHARGED, DRAWN = POINTS.index("after begin"), POINTS.index("after draw")
NOTES = "drawn.txt"


def answer(folder: Path, option: str, point: str | None) -> None:
    """Type the command; die at a point."""
    flags = [option, "--out", "out", "--cache", "cache", "--json"]
    with inside(folder), faulty(folder, point):
        cli(["workload", "answer", "asked.json", *flags], standalone_mode=False)


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Files are named from here."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def digest(estimate: Estimate | TableEstimate) -> str:
    """Names what was drawn."""
    parts = [estimate.cells] if isinstance(estimate, Estimate) else estimate.measured
    return hashlib.sha256(b"".join(np.ascontiguousarray(p).tobytes() for p in parts)).hexdigest()


@contextlib.contextmanager
def faulty(folder: Path, point: str | None) -> Iterator[None]:
    """Note what is drawn, and die where told to."""

    def at(name: str) -> None:
        if name == point:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(owner: Any, name: str) -> Any:
        real = getattr(owner, name)

        def called(*args: Any, **options: Any) -> Any:
            at(f"before {name}")
            result = real(*args, **options)
            at(f"after {name}")
            return result

        return mock.patch.object(owner, name, called)

    def write_estimate(into: Path, estimate: Any) -> None:
        """Called behind a draw alone: later the estimate comes from the archive."""
        with open(folder / NOTES, "a") as file:
            file.write(digest(estimate) + "\n")
        at("after draw")
        release.write_estimate(into, estimate)

    with contextlib.ExitStack() as stack:
        for owner, name in ((AnswerLog, "begin"), (registered, "bounded"), (AnswerLog, "commit"),
                            (folders, "publish_folder")):  # fmt: skip
            stack.enter_context(around(owner, name))
        stack.enter_context(mock.patch.object(registered, "write_estimate", write_estimate))
        yield


QUERIES: dict[str, list[dict[str, Any]]] = {
    "--mechanism=geometric": [{"factors": {"age": "range", "sex": "identity"}}],
    "--tables": [{"ways": 2}, {"ways": 1}],
}


def attempt(folder: Path, option: str, point: str | None) -> int:
    """Exit code of one try."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.faults.test_answer_kills"])
    process = context.Process(target=answer, args=(folder, option, point), daemon=True)
    process.start()
    process.join(LONGEST)
    code = process.exitcode
    process.kill()
    assert code is not None, "a child process hung"
    return code


def charges(folder: Path) -> list[str]:
    if not (folder / "ledger.db").exists():
        return []
    with contextlib.closing(accounts.opened(folder / "ledger.db", "people")) as ledger:
        return [charge.kind for charge in ledger.entries()]


def killed(folder: Path, option: str, points: tuple[str, ...]) -> None:
    """A try that dies at each of the points, then one that does not."""
    survey(folder, 300)
    write(folder / "asked.json", QUERIES[option])
    most = -1
    for point in points:
        assert attempt(folder, option, point) == -signal.SIGKILL
        most = max(most, POINTS.index(point))
        assert charges(folder) == ["workload"] * (most >= CHARGED)
        assert (folder / "out").exists() == (most == len(POINTS) - 1)
    assert attempt(folder, option, None) == 0
    assert charges(folder) == ["workload"]
    drawn = (folder / NOTES).read_text().split()
    committed = POINTS.index("after commit")
    deaths = sum(DRAWN <= POINTS.index(point) < committed for point in points)
    assert len(drawn) == deaths + 1 and set(drawn) == {
        digest(read_release(folder / "out").estimate)
    }
    contents = files(folder / "out")
    shutil.rmtree(folder / "out")
    assert attempt(folder, option, None) == 0
    assert files(folder / "out") == contents and charges(folder) == ["workload"]


def test_between_charge_and_draw_and_before_the_receipt(tmp_path: Path) -> None:
    killed(tmp_path, "--tables", ("after begin", "before commit"))


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("option", QUERIES)
def test_anywhere(option: str, point: str, tmp_path: Path) -> None:
    killed(tmp_path, option, (point,))


@pytest.mark.slow
@pytest.mark.parametrize("option", QUERIES)
def test_again_and_again(option: str, tmp_path: Path) -> None:
    killed(tmp_path, option, POINTS)


def test_another_draw_would_be_seen(tmp_path: Path) -> None:
    """What is noted differs where the noise is not that of the first try."""
    survey(tmp_path, 300)
    write(tmp_path / "asked.json", QUERIES["--tables"])
    assert attempt(tmp_path, "--tables", "after draw") == -signal.SIGKILL
    accounts.emptied(tmp_path / "ledger.db")  # another run id: a program that forgot its charge
    assert attempt(tmp_path, "--tables", None) == 0
    first, second = (tmp_path / NOTES).read_text().split()
    assert first != second


FRESH = [name for name in COMMANDS if name.endswith("--fresh")]
#: What happens at a call and, of an error, at every later one of the first attempt.
WHAT = ("ENOSPC", "kill", "EIO", "ENOSPC")
#: Attempts on the full disk before it has space again.
ATTEMPTS = 3
#: Cases of the fast lane; the slow lane has more of every command.
FAST, MORE = {"run --fresh": 2, "workload answer --fresh": 2, "choose --fresh": 1}, 40
#: Every command that prints an answer behind a charge.
PRINTED = {
    name: COMMANDS[name] for name in FRESH if name not in ("run --fresh", "choose --fresh")
} | {
    "choose --fresh --json": dataclasses.replace(  # as text it prints its plan before the charge
        COMMANDS["choose --fresh"], words=(*COMMANDS["choose --fresh"].words, "--json")
    ),
    "workload answer --fresh, of a store": dataclasses.replace(
        COMMANDS["workload answer --fresh"],
        words=(*ANSWER, "again", "--fresh"),
        before=((*ANSWER, "answers"),),
    ),
}


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


def _printing(server: Server, command: Command, place: Path) -> Callable[..., tuple[int, int]]:
    """A function that types the command, and returns its exit code and the charges made so far."""
    command.prepare(server, place)
    old = len(charges_of(place))

    def typed(stdout: str, words: tuple[str, ...] = command.words) -> tuple[int, int]:
        process = [sys.executable, "-m", "dpstream.pipelines.cli.main", *words]
        with open(stdout, "wb") as file:
            code = subprocess.run(process, cwd=place, stdout=file, check=False).returncode
        return code, len(charges_of(place)) - old

    return typed


@pytest.mark.parametrize("name", PRINTED)
def test_an_answer_that_could_not_be_printed_is_charged_once(
    name: str, server: Server, tmp_path: Path
) -> None:
    command = PRINTED[name]
    typed = _printing(server, command, tmp_path / "case")
    assert [typed("/dev/full"), typed("/dev/full"), typed("/dev/null")] == [(4, 1), (4, 1), (0, 1)]
    used, other = command.renamed or ("", "")
    anew = tuple(other if word == used else word for word in command.words)
    assert typed("/dev/null", anew) == (0, 2)


def test_a_file_of_statements_is_charged_once_until_all_are_answered(
    server: Server, tmp_path: Path
) -> None:
    refused = STATEMENT.replace("epsilon = 5", "epsilon = 99")
    words = "sql", f"{STATEMENT}; {refused}", "--fresh"
    typed = _printing(server, Command(catalog, words, nothing), tmp_path / "case")
    assert [typed("/dev/null"), typed("/dev/null")] == [(3, 1), (3, 1)]
    both = "sql", f"{STATEMENT}; {STATEMENT.replace('5', '6')}", "--fresh"
    assert [typed("/dev/full", both), typed("/dev/null", both)] == [(4, 1), (0, 2)]
    assert typed("/dev/null", both) == (0, 4)  # once all are delivered, both are charged again


def test_a_statement_twice_in_a_file_is_charged_once(server: Server, tmp_path: Path) -> None:
    words = "sql", f"{STATEMENT}; {STATEMENT}", "--fresh"
    typed = _printing(server, Command(catalog, words, nothing), tmp_path / "case")
    assert [typed("/dev/null"), typed("/dev/null")] == [(0, 1), (0, 2)]
