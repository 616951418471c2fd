"""What every kind of question keeps (`kinds`): asked again, cut off, at the limit, at once, on
neighbouring rows, on a runner, and where it fails.

The sequence itself, with each of its steps killed, is in `test_sequence`; every command is broken
at its file calls by `tests.faults.test_file_calls`, and restored accounts are held against noise by
`tests.faults.test_one_noise`; released bytes of every kind are those of `tests.golden`.
"""

import contextlib
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from dpstream.dp_transforms.noise.inputs import InputDigest
from dpstream.pipelines.ask import sequence
from dpstream.state.ledger.answers import Register
from tests import accounts
from tests.faults.one_noise import Attempt, copied, recorded_noise, reused
from tests.fixed import fixed_run_ids
from tests.pipelines.ask.kinds import (
    KINDS,
    ROWS,
    Kind,
    Said,
    account_of,
    fix_of,
    left,
    typed,
    within,
)

ACCOUNT = Path("account/ledger.db")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


def world(kind: Kind, folder: Path) -> None:
    """The files of a kind's world, in a new folder."""
    folder.mkdir()
    kind.command.world(folder)
    job = folder / "job.toml"
    if job.exists():  # so that several questions fit into the limit
        job.write_text(job.read_text().replace("epsilon = 15.0", "epsilon = 9.0"))
    with within(folder):
        for words in kind.command.before:
            if callable(words):
                words(Path())
                continue
            said = typed(*words)
            assert said.code == 0, said.stderr


def emptied(kind: Kind) -> None:
    """Remove the output, as somebody does who wants it again."""
    for name in kind.lost:
        for path in [Path(name), *Path(name).rglob("*")][::-1]:
            path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)


def entries() -> int:
    """How many charges the account has."""
    return len(accounts.charges(ACCOUNT))


def test_asking_again_tells_nothing_of_the_rows(kind: Kind, tmp_path: Path) -> None:
    """After one answer the question is answered from the account: whether rows are the same,
    without one unit's, or gone."""
    seen = list[tuple[Said, object]]()
    world(kind, tmp_path / "world")
    with within(tmp_path / "world"):
        first = kind.ask()
        assert first.code == 0, first.stderr
        for rows in ROWS:
            kind.change(rows)
            emptied(kind)
            seen.append((kind.ask(), left(Path(), kind.private)))
        assert entries() == 1
    assert seen[0][0].code == 0, seen[0][0].stderr
    assert seen[1] == seen[0]
    assert seen[2] == seen[0]


def test_as_of_and_fresh_are_new_charges(kind: Kind, tmp_path: Path) -> None:
    world(kind, tmp_path / "world")
    with within(tmp_path / "world"):
        kind.ask()
        for number, options in enumerate((("--as-of", "May"), ("--fresh",)), 2):
            emptied(kind)
            said = kind.ask(*options)
            assert said.code == 0, said.stderr
            assert entries() == number
        emptied(kind)
        assert kind.ask("--as-of", "May").code == 0
        assert entries() == 3


def test_an_account_that_was_rolled_back(kind: Kind, tmp_path: Path) -> None:
    """Its backup is from between the charge and the receipt of the second of two questions.

    Nothing is drawn before it is recovered.  Then the first question has its answer still, and the
    second is a new charge with a noise of its own: no noise meets two inputs.
    """
    world(kind, tmp_path / "world")
    with within(tmp_path / "world"), recorded_noise() as drawn:

        def attempt(rows: str, *options: str) -> tuple[Said, Attempt]:
            drawn.clear()
            emptied(kind)
            said = kind.ask(*options)
            return said, Attempt(rows, frozenset(drawn))

        kept, first = attempt("same")
        with copied("charged", ACCOUNT.parent, tmp_path / "backup"):
            shown, second = attempt("same", "--as-of", "May")
        assert (kept.code, shown.code, entries()) == (0, 0, 2), (kept.stderr, shown.stderr)
        kind.change("neighbour")
        shutil.copyfile(tmp_path / "backup" / ACCOUNT.name, ACCOUNT)
        refused, nothing = attempt("neighbour", "--as-of", "May")
        recover = fix_of(refused)
        assert nothing.drawn == frozenset() and entries() == 2
        assert typed(*recover).code == 0
        again, nothing = attempt("neighbour")
        assert again.code == 0 and nothing.drawn == frozenset() and entries() == 2, again.stderr
        new, third = attempt("neighbour", "--as-of", "May")
        assert new.code == 0 and entries() == 3, new.stderr
        assert first.drawn and second.drawn and third.drawn
        assert reused([first, second, third]) == []


def shape(text: str) -> str:
    """A text without its figures and digests."""
    text = re.sub(r"\b[0-9a-f]{16}([0-9a-f]{16})?\b", "digest", text)
    return re.sub(r"-?\d+(\.\d+)?(e[+-]?\d+)?", "#", text)


def test_first_answers_on_neighbours_differ_in_released_values_alone(
    kind: Kind, tmp_path: Path
) -> None:
    seen = []
    for rows in ("same", "neighbour"):
        world(kind, tmp_path / rows)
        with within(tmp_path / rows), fixed_run_ids():
            kind.change(rows)
            said = kind.ask()
            files = {
                name: None for name in left(Path(), (*kind.private, "account/ledger.db.answers"))
            }
            charges = [shape(line) for line in account_of(ACCOUNT) if '"entries"' in line]
        seen.append((said.code, shape(said.stdout), said.stderr, files, charges))
    assert seen[0] == seen[1]


def limited(kind: Kind, folder: Path) -> tuple[str, ...]:
    """Make a world whose account allows one charge, and not two; options to ask with then."""
    world(kind, folder)
    limit = kind.limit
    if not kind.large and limit is None:
        shutil.copytree(folder, folder.with_name("priced"))
        with within(folder.with_name("priced")):
            kind.ask()
            [charge] = accounts.charges(ACCOUNT)
        limit = 1.2 * charge.epsilon, max(charge.delta, 1e-9)
    if limit is not None:
        amounts = "--epsilon", repr(limit[0]), "--delta", repr(limit[1])
        with within(folder):
            said = typed("account", "limit", str(ACCOUNT), *amounts, "--allow-large-delta")
            assert said.code == 0, said.stderr
    return kind.large


def test_beyond_the_limit_nothing_is_read_or_written(kind: Kind, tmp_path: Path) -> None:
    large = limited(kind, tmp_path / "world")
    with within(tmp_path / "world"):
        first = kind.ask(*large)
        assert first.code == 0, first.stderr
        emptied(kind)
        before = left(Path(), kind.private)
        with mock.patch.object(sequence, "drawn", side_effect=AssertionError("it is drawn")):
            other = kind.ask(*large, "--as-of", "another day")
        assert other.code == 3, other.stderr
        assert left(Path(), kind.private) == before and entries() == 1
        assert kind.ask(*large).code == 0 and entries() == 1  # what was answered stays free


SLOW = [
    pytest.param(name, marks=() if name in ("sql", "keys") else pytest.mark.slow) for name in KINDS
]


@pytest.mark.parametrize("name", SLOW)
def test_processes_that_ask_at_once_at_the_limit(name: str, tmp_path: Path) -> None:
    """Two ask one question and get one answer; one asks another, and one of both is charged."""
    kind = KINDS[name]
    large = limited(kind, tmp_path / "world")
    words = [sys.executable, "-m", "tests.pipelines.ask.kinds", name, *large]
    own: dict[str, Any] = {
        "cwd": tmp_path / "world", "stdout": subprocess.PIPE, "stderr": subprocess.PIPE,
        "text": True, "env": {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    }  # fmt: skip
    options = ((), (), ("--as-of", "another day"))
    asking = [subprocess.Popen([*words, *more], **own) for more in options]
    ended = [(*process.communicate(timeout=120), process.returncode) for process in asking]
    with within(tmp_path / "world"):
        assert entries() == 1
    codes = [code for *_, code in ended]
    if codes[2] == 0:
        assert codes[:2] == [3, 3], ended
    else:
        assert codes == [0, 0, 3], ended
        assert figures(ended[0][0]) == figures(ended[1][0])


def figures(text: str) -> list[str]:
    """The released values in what a question printed."""
    return re.findall(r"\bp\d+\b|-?\d+\.\d+", text)


def test_fresh_continues_what_was_cut_off(kind: Kind, tmp_path: Path) -> None:
    world(kind, tmp_path / "world")
    with within(tmp_path / "world"):
        cut_off = mock.patch.object(Register, "commit", side_effect=KeyboardInterrupt)
        with cut_off, contextlib.suppress(KeyboardInterrupt):
            kind.ask()
        assert entries() == 1 and not answered()
        kind.change("neighbour")
        said = kind.ask("--fresh")
        assert said.code == 0, said.stderr
        assert entries() == 1 and answered()


def answered() -> bool:
    """Whether the account has an answer."""
    return any('"event":"receipt"' in line for line in account_of(ACCOUNT))


RUNNERS = [
    pytest.param(name, marks=() if name == "keys in SQL" else pytest.mark.slow)
    for name, kind in KINDS.items()
    if kind.runner
]


@pytest.mark.parametrize("name", RUNNERS)
def test_workers_of_a_runner_give_the_same_bytes(name: str, tmp_path: Path) -> None:
    kind, seen = KINDS[name], []
    for options in ((), ("--runner", "DirectRunner")):
        folder = tmp_path / f"world {len(seen)}"
        world(kind, folder)
        with within(folder), fixed_run_ids():
            said = kind.ask(*options)
            assert said.code == 0, said.stderr
            names = kind.lost or ("no output",)
            files = left(Path(), kind.private).items()
            lost = {name: data for name, data in files if name.startswith(names)}
            seen.append((re.sub(r"\b[0-9a-f]{32}\b", "digest", said.stdout), lost))
    assert seen[0] == seen[1]


CANARY = "canary-7d1f"


def failing(_: InputDigest) -> bytes:
    """Breaks a draw, with a private value in the text of the error."""
    raise ValueError(CANARY)


def test_no_private_value_is_shown_where_a_question_fails(
    kind: Kind, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows with a rare value, an error with it in the middle of a draw, and an answer then."""
    caplog.set_level(logging.DEBUG)
    texts = list[str]()
    world(kind, tmp_path / "world")
    with within(tmp_path / "world"):
        kind.plant(CANARY)
        # A DataFrame function passes the error on to whoever has the rows; a command does not.
        passed_on = contextlib.suppress(ValueError) if kind.raises else contextlib.nullcontext()
        with mock.patch.object(InputDigest, "value", property(failing)), passed_on:
            said = kind.ask()
            assert said.code == 4
            texts += said.stdout, said.stderr
        done = kind.ask()
        assert done.code == 0 and entries() == 1, done.stderr
        texts += done.stdout, done.stderr
        for path in Path().rglob("*"):
            if not path.as_posix().startswith(kind.private) and path.suffix != ".log":
                texts += path.as_posix(), path.read_text(errors="replace") if path.is_file() else ""
    assert [text for text in (*texts, caplog.text) if CANARY in text] == []
