"""One noise meets one input, whatever is put back or changed between a charge and its receipt."""

from pathlib import Path
from unittest import mock

import pytest

from dpstream.dp_transforms.noise.prf import KeyRing
from tests.faults.filecalls.commands import COMMANDS
from tests.faults.one_noise import Attempt, copied, put_back, recorded_noise, reused
from tests.fixed import held_noise
from tests.pipelines.ask.kinds import KINDS, Kind, typed, within
from tests.pipelines.ask.test_question import emptied, world


def _more(name: str, like: str) -> Kind:
    """A command on the rows of a kind."""
    command = COMMANDS[name]
    return KINDS[like]._replace(
        command=command, ask=lambda *options: typed(*command.words, *options)
    )


STREAM = KINDS["sql"]._replace(
    command=COMMANDS["run"], ask=lambda: typed(*COMMANDS["run"].words), lost=("out",)
)
#: What is put back: the account from a backup, or all that is not an input.
BACKUPS = {"account": "account", "store": "state", "clone": "."}
#: Kinds of questions, and commands that draw by other laws than the first of their kind.
ASKED = KINDS | {
    "sql, quantiles": _more("sql, quantiles", "sql"),
    "answer --tables": _more("answer --tables", "workload pure"),
}
FAST = [("frame", "drawn", "account"), ("session", "charged", "clone")]
ALL = [(k, w, what) for k in ASKED for w in ("charged", "drawn") for what in ("account", "clone")]
CASES = [pytest.param(*case, marks=[] if case in FAST else pytest.mark.slow) for case in ALL]


def attempt(kind: Kind, rows: str) -> Attempt:
    """Ask, and record what is read and drawn."""
    with recorded_noise() as drawn:
        said = kind.ask()
    assert said.code in (0, 3), said.stderr
    return Attempt(rows, frozenset(drawn))


def attempts(kind: Kind, window: str, what: str, folder: Path) -> list[Attempt]:
    """A question is answered; then, twice, what a window had is put back and it is asked again, on
    the same rows and without one unit's."""
    home, copy = folder / "world", folder / "copy"
    world(kind, home)
    with within(home), copied(window, home / BACKUPS[what], copy):
        out = [attempt(kind, "same")]
    for rows in ("same", "neighbour"):
        put_back(copy, home / BACKUPS[what])
        with within(home):
            emptied(kind)
            kind.change(rows)
            out.append(attempt(kind, rows))
    return out


@pytest.mark.parametrize(("name", "window", "what"), CASES)
def test_no_noise_meets_two_inputs(name: str, window: str, what: str, tmp_path: Path) -> None:
    first, again, changed = attempts(ASKED[name], window, what, tmp_path)
    assert first.drawn and changed.drawn
    assert again == first  # the charge goes on: the checker would see its noise
    assert reused([first, again, changed]) == []


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "frame" else pytest.mark.slow) for n in ASKED]
)
def test_noise_that_does_not_know_its_input_is_seen(name: str, tmp_path: Path) -> None:
    with held_noise():
        found = reused(attempts(ASKED[name], "drawn", "account", tmp_path))
    assert ("same", "neighbour") in {pair[:2] for pair in found}


@pytest.mark.parametrize(
    "what", [pytest.param(w, marks=[] if w == "store" else pytest.mark.slow) for w in BACKUPS]
)
def test_a_stream_draws_nothing_for_other_rows(what: str, tmp_path: Path) -> None:
    """It is refused on other rows, whatever is put back; on its own rows a clone draws again."""
    first, again, changed = attempts(STREAM, "step", what, tmp_path)
    assert first.drawn and not changed.drawn
    assert again.drawn == (first.drawn if what == "clone" else set())


def test_a_stream_that_does_not_know_its_input_is_seen(tmp_path: Path) -> None:
    with mock.patch.object(KeyRing, "source_fingerprint", lambda *_: "0" * 32):
        found = reused(attempts(STREAM, "step", "clone", tmp_path))
    assert ("same", "neighbour") in {pair[:2] for pair in found}
