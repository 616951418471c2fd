"""An account that is restored from a backup alone: refused, recovered as the message says, used.

The head file stays, because it lies beside the file that names the account.  Every command is typed
as a person types it; the command that recovers is taken from the refusal.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest

import dpstream
from dpstream.accounting.errors import DpstreamError
from dpstream.state.ledger.head import HeadFile
from tests import accounts
from tests.faults.filecalls.commands import ASK, BUDGET, POINTS
from tests.faults.one_noise import copied
from tests.pipelines.ask.kinds import (
    ALL,
    KINDS,
    STREAM,
    Kind,
    Outcome,
    emptied,
    fix_of,
    typed,
    within,
    world,
)

ACCOUNT, REFUSED = Path("account"), 3
#: All of it but for its head file, which lies beside it where no file names it.
FILE = ACCOUNT / "ledger.db"


def restored(backup: Path) -> None:
    """The account's file as it was."""
    shutil.copyfile(backup / "ledger.db", FILE)


def outcome_of(kind: Kind, *options: str) -> Outcome:
    """A question, also of the Python interface, as a command ends."""
    emptied(kind)
    try:
        return kind.ask(*options)
    except DpstreamError as error:
        return Outcome(error.exit_code, "", str(error))


def account_figures() -> dict[str, object]:
    out: dict[str, object] = json.loads(typed("account", "show", str(FILE), "--json").stdout)
    return out


def spent(of: dict[str, object]) -> float:
    pair = of["spent"]
    assert isinstance(pair, dict)
    return float(pair["epsilon"])


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Path]:
    with within(tmp_path):
        yield tmp_path


@pytest.mark.parametrize("name", ALL)
def test_restored_refused_recovered_and_asked_again(name: str, here: Path) -> None:
    kind = ALL[name]
    world(kind, here / "world")
    with within(here / "world"):
        first = outcome_of(kind)
        assert first.code == 0, first.stderr
        shutil.copytree(ACCOUNT, here / "backup")
        assert outcome_of(kind, "--fresh").code == 0
        before = account_figures()
        restored(here / "backup")
        refusal = outcome_of(kind)
        recover = fix_of(refusal)
        assert len(accounts.charges(str(FILE))) == before["charges"] - 1  # type: ignore[operator]
        outcome = typed(*recover)
        assert outcome.code == 0, outcome.stderr
        after = account_figures()
        assert after["charges"] == before["charges"] and spent(after) >= spent(before)
        again = outcome_of(kind)  # the first answer is in the backup
        assert again.code == 0, again.stderr
        assert account_figures()["charges"] == before["charges"]
        more = typed(*recover)
        assert more.code == 0 and account_figures() == after  # nothing more to do
        assert [len(one.stdout.splitlines()) for one in (outcome, more)] == [2, 1]
        new = outcome_of(kind, "--fresh")
        assert new.code == 0, new.stderr
        assert account_figures()["charges"] == before["charges"] + 1  # type: ignore[operator]


class Answers(NamedTuple):
    """What became of one question whose account was restored between its charge and its receipt.

    Attributes:
        codes: of the command as it was answered, after the restore, and after the recovery.
        charges: in the end; answers: that were shown.
    """

    codes: list[int]
    charges: int
    answers: int


def between(kind: Kind, folder: Path) -> Answers:
    """Charged, copied, answered; then restored, rows changed, and asked again."""
    world(kind, folder / "world")
    with within(folder / "world"):
        with copied("charged", ACCOUNT, folder / "copy"):
            codes = [outcome_of(kind).code]
        kind.change("neighbour")
        restored(folder / "copy")
        outcome = outcome_of(kind)
        codes.append(outcome.code)
        if outcome.code == REFUSED:
            assert typed(*fix_of(outcome)).code == 0
            outcome = outcome_of(kind)
            codes.append(outcome.code)
        return Answers(codes, len(accounts.charges(str(FILE))), codes.count(0))


def one_charge_one_answer(seen: Answers) -> bool:
    return seen.answers <= seen.charges


def test_without_the_check_a_charge_has_two_answers(here: Path) -> None:
    """Sabotaged: nobody looks at the head.  Every kind with it is in `ask.test_question`."""
    with mock.patch.object(HeadFile, "check", lambda *_: None):
        seen = between(KINDS["sql"], here)
    assert seen.codes == [0, 0] and not one_charge_one_answer(seen)


def test_a_damaged_account_is_restored_and_recovered(here: Path) -> None:
    """The refusal of a damaged account says "restore a backup": that is not the end."""
    kind = KINDS["sql"]
    world(kind, here / "world")
    with within(here / "world"):
        assert outcome_of(kind).code == 0
        shutil.copytree(ACCOUNT, here / "backup")
        assert outcome_of(kind, "--as-of", "May").code == 0
        data = bytearray(FILE.read_bytes())
        data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
        FILE.write_bytes(data)
        outcome = outcome_of(kind)
        assert outcome.code == REFUSED and "backup" in outcome.stderr
        restored(here / "backup")
        assert fix_of(typed("account", "show", "d")) == fix_of(outcome_of(kind))
        assert typed(*fix_of(outcome_of(kind))).code == 0
        assert outcome_of(kind).code == 0 and account_figures()["charges"] == 2


def in_a_child(work: Callable[[], object]) -> None:
    """Done by a process that is then killed: it closes nothing."""
    pid = os.fork()
    if not pid:
        try:
            work()
            os._exit(9)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


def test_a_session_that_was_killed_after_sixty_charges(here: Path) -> None:
    """No snapshot has its charges; a record pays nothing twice."""
    world(KINDS["session"], here / "world")
    with within(here / "world"):
        shutil.copytree(ACCOUNT, here / "backup")

        def ask_much() -> None:
            cursor = dpstream.connect(analyst="ann").cursor()
            for number in range(60):
                cursor.execute(POINTS("epsilon = 0.02", "COUNT(*) AS n"), as_of=str(number))

        in_a_child(ask_much)
        before = typed(*BUDGET).stdout
        restored(here / "backup")
        outcome = typed("sql", POINTS("epsilon = 1", "COUNT(*) AS n"))
        assert typed(*fix_of(outcome)).code == 0
        after = typed(*BUDGET).stdout
        assert after == before and len(accounts.charges(str(FILE))) == 60
        outcome = typed("sql", POINTS("epsilon = 1", "COUNT(*) AS n"))
        assert outcome.code == REFUSED  # 0.3 is left
        assert typed(*ASK).code == 0


def test_a_stream_whose_tokens_alone_are_older(here: Path) -> None:
    """The account is of a time when the run was going on: it has no entry less."""
    world(STREAM, here / "world")
    with within(here / "world"):
        with copied("step", ACCOUNT, here / "copy"):
            assert outcome_of(STREAM).code == 0
        before = account_figures()
        restored(here / "copy")
        assert account_figures()["charges"] == before["charges"]
        assert typed(*fix_of(outcome_of(STREAM))).code == 0
        assert outcome_of(STREAM).code == 0 and account_figures() == before
