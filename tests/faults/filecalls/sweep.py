"""Cases: a command, a call of it, and what happens there; and what came of it.

``python -m tests.faults.filecalls.sweep --seconds 600 --seed 3 [COMMAND ...]`` runs cases drawn
from a seed and prints those that fail; ``--every`` takes every call of each command instead.
"""

import argparse
import errno
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from dpstream.state.disk_errors import PASSING, cause_of
from tests.faults.filecalls.commands import ALL, Command, Outcome
from tests.faults.filecalls.disk import HARMLESS, NAMES, NOTHING, OPEN, SYNC, Call, Disk, calls
from tests.faults.filecalls.operator import Stuck, obeyed
from tests.faults.filecalls.server import ERRORS, FUNCTIONS, Ended, Server, serving

#: At one call: the process dies before it, in it, or the call fails, once or from there on.
FAULTS = ("kill", "tear", *ERRORS)
#: Of the disk that is left after a loss of power at one call.
LOSSES = ("data", "entries")
#: The folder in which a command and all its cases run.
PLACE = "case"
#: What is left of a process after a loss of power.
KILLED = Ended(-9, "", "")
#: Exit codes of commands that were refused or failed in a way that a person can understand.
REFUSED = (2, 3, 4)


class Case(NamedTuple):
    """One fault: ``what`` of `FAULTS` or `LOSSES` at call ``at`` (1 is the first)."""

    command: str
    at: int
    what: str
    sticky: bool = False


@dataclass
class World:
    """A command's folder before it, its calls without a fault, and what it must come to."""

    before: Path
    recorded: list[Call]
    expected: Outcome


def world(server: Server, name: str, folder: Path) -> World:
    """Prepare a command, run it once without a fault, and once more.

    It is the folder of the cases too: a question is known by where its files lie.
    """
    command = ALL[name]
    done, before, journal = folder / PLACE, folder / "before", folder / "journal"
    command.prepare(server, done)
    shutil.copytree(done, before, symlinks=True)
    ended = server.run(command.words, done, journal=journal)
    assert ended.code == 0, ended.stderr
    expected = command.outcome(server, done, ended)
    if not command.anew:
        again = _obeyed(server, command, server.run(command.words, done), done)
        assert command.outcome(server, done, again) == expected, "a repeated command differs"
    return World(before, list(calls(journal)), expected)


def _obeyed(server: Server, command: Command, ended: Ended, folder: Path) -> Ended:
    """Do what the messages say; how the command itself ended, or the last that shows it."""
    run = partial(server.run, folder=folder)
    return obeyed(run, command.words, ended, command.renamed)


def failure(server: Server, made: World, case: Case, folder: Path) -> str:
    """What is wrong after a fault and whatever the messages say; empty if nothing is."""
    command, first = ALL[case.command], KILLED
    shutil.rmtree(folder, ignore_errors=True)
    if case.what in LOSSES:
        disk = Disk(made.before)
        for call in made.recorded[: case.at]:
            disk.replay(call)
        folder.mkdir()
        disk.write(folder, case.what, hash(case.at))
    else:
        shutil.copytree(made.before, folder, symlinks=True)
        first = server.run(command.words, folder, at=case.at, action=case.what, sticky=case.sticky)
        wrong = _unclear(first, case)
        if wrong:
            return f"at the fault: {wrong}"
    expected = made.expected
    if command.anew and first.code < 0 and command.outcome(server, folder, first) == expected:
        # Killed when all was done: it is another question.
        count, unanswered = expected.entries
        expected = expected._replace(entries=(count + 1, unanswered))
    try:
        again = _obeyed(server, command, first, folder)
    except Stuck as stuck:
        return f"afterwards: {stuck}"
    outcome = command.outcome(server, folder, again)
    if outcome not in (expected, made.expected):
        parts = [n for n in outcome._fields if getattr(outcome, n) != getattr(expected, n)]
        return f"afterwards: other {' and '.join(parts)}"
    return ""


def _unclear(ended: Ended, case: Case) -> str:
    """What a person could not understand of how a disturbed command ended."""
    if ended.code == 0 or (case.what in ("kill", "tear") and ended.code < 0):
        return ""
    if ended.code not in REFUSED:
        return f"exit {ended.code}: {ended.stderr[-400:]}"
    if re.search(r"Traceback|\b\w+Error\b|Exception", ended.stderr):
        return f"names an exception: {ended.stderr[-400:]}"
    if not any(reason in ended.stderr for reason in _reasons(case)):
        return f"names another cause: {ended.stderr.strip()[-400:]}"
    return ""


def _reasons(case: Case) -> Iterator[str]:
    """What may be named: SQLite and DuckDB do not report the number of an error that passed."""
    yield cause_of(OSError(getattr(errno, case.what), "")).reason
    if case.what == "ENOMEM":  # of a call that no file is named for
        yield "there is not enough"
    if not case.sticky:
        yield PASSING.reason


def cases(name: str, made: World, seed: int) -> Iterator[Case]:
    """Cases of one command, for ever."""
    rng = random.Random(f"{name} {seed}")
    numbers = [n for n, call in enumerate(made.recorded, 1) if call.kind != NOTHING]
    while True:
        at = rng.choice(numbers)
        yield _case(name, made, at, rng, "kill")


def _case(name: str, made: World, at: int, rng: random.Random, *more: str) -> Case:
    """A fault that the system can have at a call."""
    call = made.recorded[at - 1]
    errors = [error for error, kinds in ERRORS.items() if call.kind in kinds]
    if name in FUNCTIONS and call.path == "in.csv":  # the caller reads it
        errors = ["kill"]
    others = () if call.kind in HARMLESS else ("tear", *LOSSES, *more)
    what = rng.choice((*errors, *others))
    # A call that is interrupted for ever is tried for ever, by SQLite and by Python.
    return Case(name, at, what, what in errors and what != "EINTR" and rng.random() < 0.5)


def at_every_call(name: str, made: World, seed: int) -> Iterator[Case]:
    """Each call of a command: the process dies before it, and one of the other faults.

    A kill behind a call that changed no byte leaves the files of the kill before that call.
    """
    rng = random.Random(f"{name} {seed}")
    for at in range(1, len(made.recorded) + 1):
        if at == 1 or changes(made.recorded[at - 2]):
            yield Case(name, at, "kill")
        if made.recorded[at - 1].kind != NOTHING:
            yield _case(name, made, at, rng)


def changes(call: Call) -> bool:
    """Whether a call changes a file: a sync does not, nor an open that makes and cuts none."""
    return call.kind not in (SYNC, *HARMLESS) and not (call.kind == OPEN and call.flags == 0)


def written(recorded: Iterable[Call]) -> list[Call]:
    """The calls that changed a file: a sync changes none.

    SQLite opens for writing what it only reads, to roll back what a killed process left, and has
    its index of a log in a file.
    """
    return [
        call
        for call in recorded
        if call.kind not in (SYNC, *HARMLESS)
        and not call.path.endswith(("-shm", "-wal"))
        and not (call.kind == OPEN and call.flags == 0 and call.path.endswith(".db"))
    ]


def described(made: World, case: Case) -> str:
    """A case in words."""
    call = made.recorded[case.at - 1]
    return (
        f"{case.command}, call {case.at} of {len(made.recorded)} ({NAMES[call.kind]} "
        f"{call.path}{' to ' * bool(call.other)}{call.other}), {case.what}"
        f"{' and after' * case.sticky}"
    )


def main(arguments: Sequence[str]) -> int:
    """Run cases for a time; the number of those that fail."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commands", nargs="*", default=list(ALL))
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--every", action="store_true", help="every call, however long it takes")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    seconds = float("inf") if options.every else options.seconds / len(options.commands)
    drawn = at_every_call if options.every else cases
    failed = run = 0
    with serving() as server, tempfile.TemporaryDirectory() as scratch:
        for name in options.commands:
            folder = Path(scratch) / name.replace(" ", "_")
            folder.mkdir()
            made = world(server, name, folder)
            begin, before = time.monotonic(), run
            for case in drawn(name, made, options.seed):
                wrong = failure(server, made, case, folder / PLACE)
                run += 1
                if wrong:
                    failed += 1
                    print(f"{described(made, case)}: {wrong}", flush=True)
                if time.monotonic() - begin > seconds:
                    break
            print(f"{name}: {len(made.recorded)} calls, {run - before} cases, "
                  f"{time.monotonic() - begin:.0f} s", flush=True)  # fmt: skip
    print(f"{run} cases, {failed} failed")
    return failed


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
