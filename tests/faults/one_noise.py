"""A checker that sees commands from outside: one noise of one charge never meets two inputs.

It records what each attempt at a question read and drew.  Read is what the files held.  Drawn are
the blocks that the secret made, which are the randomness of every law of every system, whatever
they are named by.  Blocks that two attempts on different rows have both are one noise on two
inputs: the difference of the two answers is the exact difference of the rows.
"""

import contextlib
import itertools
import shutil
import sys
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from unittest import mock

from dpstream.accounting.arrays import Ids
from dpstream.dp_transforms.noise.prf import KeyRing, Prf
from dpstream.state.ledger.contract import AnswerLog
from dpstream.state.sqlite.store import SqliteStore
from tests.faults.filecalls.commands import COMMANDS
from tests.fixed import held_noise
from tests.pipelines.ask.kinds import KINDS, Kind, typed

#: When the copy is made that is put back later: between a question's charge and its receipt, behind
#: the charge and before the receipt; and of a stream, between two steps.
HOOKS = {
    "charged": (AnswerLog, "begin"),
    "drawn": (AnswerLog, "commit"),
    "step": (SqliteStore, "commit_step"),
}


def _more(name: str, like: str) -> Kind:
    """A command on the rows of a kind."""
    command = COMMANDS[name]
    return KINDS[like]._replace(
        command=command, ask=lambda *options: typed(*command.words, *options)
    )


def _stream(name: str, *lost: str) -> Kind:
    """A command whose releases come from a stream's store."""
    command = COMMANDS[name]
    return KINDS["sql"]._replace(command=command, ask=lambda: typed(*command.words), lost=lost)


STREAMS = {
    "run": _stream("run", "out"),
    "workload answer": _stream("workload answer", "answers"),
}
#: Kinds of questions, and commands that draw by other laws than the first of their kind.
QUESTIONS = KINDS | {"sql, quantiles": _more("sql, quantiles", "sql")}


def asked_of(name: str) -> NoReturn:
    """Ask a question, or run a stream, in the current folder, and exit as a command does."""
    outcome = (QUESTIONS | STREAMS)[name].ask()
    print(outcome.stdout, end="")
    print(outcome.stderr, end="", file=sys.stderr)
    sys.exit(outcome.code)


@contextlib.contextmanager
def any_input() -> Iterator[None]:
    """Sabotage: noise that does not know the numbers that it is added to, nor a stream's input."""
    one = mock.patch.object(KeyRing, "source_fingerprint", lambda *_: "0" * 32)
    with held_noise(), one:
        yield


class Attempt(NamedTuple):
    """What was read, and the blocks that were drawn, as bytes."""

    rows: str
    drawn: frozenset[bytes]


@contextlib.contextmanager
def recorded_noise() -> Iterator[set[bytes]]:
    """The blocks that secrets make in this process."""
    drawn = set[bytes]()
    nodes = weakref.WeakSet[Prf]()
    begin, blocks = KeyRing.__init__, Prf.blocks

    def begun(ring: KeyRing, secret: Any) -> None:
        begin(ring, secret)
        nodes.add(ring.node)

    def made(prf: Prf, given: Ids) -> Ids:
        out = blocks(prf, given)
        if prf in nodes:
            drawn.update(out.view("V16").reshape(-1).tolist())
        return out

    with mock.patch.object(KeyRing, "__init__", begun), mock.patch.object(Prf, "blocks", made):
        yield drawn


def reused(attempts: Sequence[Attempt]) -> list[tuple[str, str, int]]:
    """Pairs of attempts on different rows, and how many blocks both drew."""
    return [
        (a.rows, b.rows, len(a.drawn & b.drawn))
        for a, b in itertools.combinations(attempts, 2)
        if a.rows != b.rows and a.drawn & b.drawn
    ]


@contextlib.contextmanager
def copied(window: str, place: Path, copy: Path) -> Iterator[None]:
    """Copy a folder once, in the window of a question, or when a stream has committed a step."""
    owner, name = HOOKS[window]
    real = getattr(owner, name)

    def keep() -> None:
        if not copy.exists():
            shutil.copytree(place, copy, symlinks=True)

    def hooked(it: Any, *args: Any, **options: Any) -> Any:
        if window == "drawn":
            keep()
        out = real(it, *args, **options)
        keep()
        return out

    with mock.patch.object(owner, name, hooked):
        yield


def put_back(copy: Path, place: Path) -> None:
    """Put a copy of a folder in its place."""
    shutil.rmtree(place)
    shutil.copytree(copy, place, symlinks=True)
