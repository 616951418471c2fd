"""What every kind of question keeps (`kinds`): asked again, cut off, at the limit, at once, on
neighbouring rows, on a runner, and where it fails.

The sequence itself is killed at each of its steps.  Every command is broken at its file calls by
`tests.faults.test_file_calls`, and restored accounts are held against noise by
`tests.faults.test_one_noise`; released bytes of every kind are those of `tests.golden`.
"""

import contextlib
import hashlib
import inspect
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest

import dpstream
from dpstream.accounting.errors import DpstreamError
from dpstream.dp_transforms.noise.inputs import InputDigest
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.pipelines.ask import sequence
from dpstream.pipelines.ask.question import Asking
from dpstream.pipelines.ask.sequence import ask, ask_uncharged, request_of
from dpstream.state.ledger.contract import Answer, AnswerLog, Decision
from dpstream.state.ledger.events import Charge, ChargeKind, Created, Received
from dpstream.state.ledger.history import History
from dpstream.state.ledger.open import make, open_path
from tests import accounts
from tests.faults.one_noise import Attempt, copied, recorded_noise, reused
from tests.fixed import fixed_run_ids
from tests.golden.refusals import Refused
from tests.pipelines.ask.kinds import (
    ACCOUNT,
    ALL,
    KINDS,
    NO_ROWS,
    ROWS,
    Kind,
    Outcome,
    emptied,
    fix_of,
    left,
    public_part,
    typed,
    within,
    world,
)
from tests.runners.engines import need_flink
from tests.runners.prism import binary
from tests.state.ledger.conformance import Killed, charge


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


def entries() -> int:
    """How many charges the account has."""
    return len(accounts.charges(ACCOUNT))


def test_asking_again_tells_nothing_of_the_rows(kind: Kind, tmp_path: Path) -> None:
    """After one answer the question is answered from the account: whether rows are the same,
    without one unit's, gone, or their file or folder is gone, or is none."""
    seen = list[tuple[Outcome, object]]()
    world(kind, tmp_path / "world")
    with within(tmp_path / "world"):
        first = kind.ask()
        assert first.code == 0, first.stderr
        for rows in (rows for rows in ROWS if rows not in NO_ROWS or not kind.in_memory):
            kind.change(rows)
            emptied(kind)
            seen.append((kind.ask(), left(Path(), kind.private)))
        assert entries() == 1
    assert seen[0][0].code == 0, seen[0][0].stderr
    assert [again == seen[0] for again in seen] == [True] * len(seen)


def test_as_of_and_fresh_are_new_charges(kind: Kind, tmp_path: Path) -> None:
    world(kind, tmp_path / "world")
    with within(tmp_path / "world"):
        kind.ask()
        for number, options in enumerate((("--as-of", "May"), ("--fresh",)), 2):
            emptied(kind)
            outcome = kind.ask(*options)
            assert outcome.code == 0, outcome.stderr
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

        def attempt(rows: str, *options: str) -> tuple[Outcome, Attempt]:
            drawn.clear()
            emptied(kind)
            outcome = kind.ask(*options)
            return outcome, Attempt(rows, frozenset(drawn))

        undated, first = attempt("same")
        with copied("charged", ACCOUNT.parent, tmp_path / "backup"):
            dated, second = attempt("same", "--as-of", "May")
        assert (undated.code, dated.code, entries()) == (0, 0, 2), (undated.stderr, dated.stderr)
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


def first_answers(kind: Kind, folder: Path) -> list[dict[str, object]]:
    """What the first answers on the rows and without one unit's are, but for released values."""
    seen, place = [], folder / "place"  # a question is known by where its inputs lie
    world(kind, folder / "world")
    for rows in ("same", "neighbour"):
        shutil.copytree(folder / "world", place)
        with within(place), fixed_run_ids():
            kind.change(rows)
            outcome = kind.ask()
            assert outcome.code == 0, outcome.stderr
            seen.append(public_part(kind, outcome))
        shutil.rmtree(place)
    return seen


@pytest.mark.parametrize("name", ALL)
def test_first_answers_on_neighbours_differ_in_released_values_alone(
    name: str, tmp_path: Path
) -> None:
    same, neighbour = first_answers(ALL[name], tmp_path)
    assert same == neighbour


def test_a_question_that_is_known_by_its_rows_is_seen(tmp_path: Path) -> None:
    """Sabotaged."""

    def of_rows(*_: object) -> str:
        return hashlib.sha256(Path("in.csv").read_bytes()).hexdigest()[:32]

    with mock.patch.object(sequence, "request_of", of_rows):
        same, neighbour = first_answers(KINDS["sql"], tmp_path)
    assert same != neighbour


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
            outcome = typed("account", "limit", str(ACCOUNT), *amounts, "--allow-large-delta")
            assert outcome.code == 0, outcome.stderr
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


@pytest.mark.parametrize("name", ALL)
def test_an_account_that_is_absent_or_another_is_refused(name: str, tmp_path: Path) -> None:
    """A question makes no account, and charges none that its file does not name."""
    kind = ALL[name]
    world(kind, tmp_path / "world")
    with within(tmp_path / "world"):
        created = accounts.events(ACCOUNT)[0]
        assert isinstance(created, Created)
        for other in (None, msgspec.structs.replace(created, id="0" * 16)):
            shutil.rmtree(ACCOUNT.parent)
            ACCOUNT.parent.mkdir()
            if other is not None:
                make(ACCOUNT, other)
            before = left(Path(), (*kind.private, "cache"))  # a strategy is solved before
            try:
                code = kind.ask().code
            except DpstreamError as error:
                code = error.exit_code
            assert code == (2 if other is None else 3)
            assert left(Path(), (*kind.private, "cache")) == before


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
        cut_off = mock.patch.object(AnswerLog, "commit", side_effect=KeyboardInterrupt)
        with cut_off, contextlib.suppress(KeyboardInterrupt):
            kind.ask()
        assert entries() == 1 and not answered()
        kind.change("neighbour")
        outcome = kind.ask("--fresh")
        assert outcome.code == 0, outcome.stderr
        assert entries() == 1 and answered()


def answered() -> bool:
    """Whether the account has an answer."""
    return any(isinstance(event, Received) for event in accounts.events(ACCOUNT))


RUNNERS = {
    "DirectRunner": (), "PrismRunner": (), "FlinkRunner": ("--parallelism", "2"),
}  # fmt: skip
#: Of one kind Flink alone is slow.
ON_RUNNERS = [
    pytest.param(
        name, runner,
        marks=() if name == "keys in SQL" and runner != "FlinkRunner" else pytest.mark.slow,
    )
    for name, kind in KINDS.items()
    if not kind.no_runner
    for runner in RUNNERS
]  # fmt: skip


@pytest.mark.parametrize(("name", "runner"), ON_RUNNERS)
def test_workers_of_a_runner_give_the_same_bytes(name: str, runner: str, tmp_path: Path) -> None:
    {"FlinkRunner": need_flink, "PrismRunner": binary}.get(runner, lambda: None)()
    kind, seen = KINDS[name], list[tuple[str, dict[str, bytes | list[str]]]]()
    world(kind, tmp_path / "world")
    for options in ((), ("--runner", runner, *RUNNERS[runner])):
        folder = tmp_path / f"world {len(seen)}"
        shutil.copytree(tmp_path / "world", folder)
        with within(folder), fixed_run_ids():
            outcome = kind.ask(*options)
            assert outcome.code == 0, outcome.stderr
            names = kind.lost or ("no output",)
            files = left(Path(), kind.private).items()
            lost = {name: data for name, data in files if name.startswith(names)}
            seen.append((re.sub(r"\b[0-9a-f]{32}\b", "digest", outcome.stdout), lost))
    assert seen[0] == seen[1] and bool(kind.lost) == bool(seen[0][1])


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.no_runner])
def test_a_kind_that_no_runner_reads_takes_none(name: str, tmp_path: Path) -> None:
    """Its command refuses a runner before a charge; a function has no such argument."""
    kind = KINDS[name]
    if kind.in_memory:
        assert "runner" not in inspect.signature(dpstream.count).parameters
        return
    world(kind, tmp_path / "world")
    with within(tmp_path / "world"):
        assert kind.ask("--runner", "PrismRunner").code == 2
        assert entries() == 0


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
        passed_on = contextlib.suppress(ValueError) if kind.in_memory else contextlib.nullcontext()
        with mock.patch.object(InputDigest, "value", property(failing)), passed_on:
            outcome = kind.ask()
            assert outcome.code == 4
            texts += outcome.stdout, outcome.stderr
        done = kind.ask()
        assert done.code == 0 and entries() == 1, done.stderr
        texts += done.stdout, done.stderr
        for path in Path().rglob("*"):
            if not path.as_posix().startswith(kind.private) and path.suffix != ".log":
                texts += path.as_posix(), path.read_text(errors="replace") if path.is_file() else ""
    assert [text for text in (*texts, caplog.text) if CANARY in text] == []


RING = KeyRing(bytes(range(32)))


class Counting:
    """A question that notes what is called, and looks at the account while it draws."""

    kind: ChargeKind = "sql"

    def __init__(self, path: Path, name: str = "q", epsilon: float = 1.0) -> None:
        self.path, self.name, self.epsilon = path, name, epsilon
        self.steps, self.rows, self.dies = list[str](), "rows", ""
        self.wait: threading.Barrier | None = None
        self.moved = False

    @property
    def identity(self) -> Sequence[bytes]:
        return [self.name.encode()]

    def _step(self, step: str) -> None:
        self.steps.append(step)
        if self.dies == step:
            raise Killed

    def check(self, ring: KeyRing) -> None:
        self._step("check")

    def decide(self, run_id: str, account: History) -> Decision:
        self._step("decide")
        made = charge(int(run_id, 16), self.epsilon)
        return Decision(made)

    def stamp(self) -> object:
        return ("stamp", self.moved)

    def draw(self, charge: Charge, ring: KeyRing) -> bytes:
        with contextlib.closing(open_path(self.path)) as other:
            assert other.history().find(charge.run_id) is not None, "drawn before it is charged"
        self._step("draw")
        if self.wait is not None:
            self.wait.wait(30)
        return f"{self.rows} {charge.run_id}".encode()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    accounts.create(tmp_path / "ledger.db", "d")
    return tmp_path / "ledger.db"


def answer_of(question: Counting, how: Asking | None = None) -> Answer:
    with contextlib.closing(open_path(question.path)) as ledger:
        return ask(question, ledger, RING, how or Asking())


def charges(path: Path) -> list[Charge]:
    with contextlib.closing(open_path(path)) as ledger:
        return ledger.entries()


def test_the_steps_in_their_order_and_once(path: Path) -> None:
    question = Counting(path)
    first = answer_of(question)
    assert first.charged and question.steps == ["check", "decide", "draw"]
    question.rows = "other rows"
    assert answer_of(question) == first._replace(charged=False)
    assert question.steps == ["check", "decide", "draw"] and len(charges(path)) == 1
    fresh = answer_of(question, Asking(fresh=True))
    assert fresh.charged and fresh.receipt.startswith(b"other rows") and len(charges(path)) == 2
    assert answer_of(question).receipt == fresh.receipt


def test_a_label_is_another_question(path: Path, refused: Refused) -> None:
    question = Counting(path)
    answers = [answer_of(question, Asking(as_of=label)) for label in ("", "May", "June", "May")]
    assert [answer.charged for answer in answers] == [True, True, True, False]
    assert answers[3].receipt == answers[1].receipt
    for label in ("a\nb", "x" * 401):
        refused(answer_of, question, Asking(as_of=label))


@pytest.mark.parametrize("step", ["check", "decide", "draw"])
def test_killed_at_a_step(path: Path, step: str) -> None:
    question = Counting(path)
    question.dies = step
    with pytest.raises(Killed):
        answer_of(question)
    before = [made.run_id for made in charges(path)]
    assert len(before) == (step == "draw")
    question.dies, question.rows = "", "other rows"
    answer = answer_of(question)
    assert answer.receipt.startswith(b"other rows") and answer.charged == (step != "draw")
    assert [made.run_id for made in charges(path)] == (before or [answer.run_id])


def test_fresh_continues_each_step(path: Path) -> None:
    question = Counting(path)
    question.dies = "draw"
    with pytest.raises(Killed):
        answer_of(question)
    question.dies = ""
    assert not answer_of(question, Asking(fresh=True)).charged and len(charges(path)) == 1


def test_an_input_that_changes_while_it_is_read(path: Path, refused: Refused) -> None:
    question, real = Counting(path), Counting.draw

    def moving(charge: Charge, ring: KeyRing) -> bytes:
        question.moved = not question.moved
        return real(question, charge, ring)

    question.draw = moving  # type: ignore[method-assign]
    caught = refused(answer_of, question)
    assert caught.field == "input" and len(charges(path)) == 1
    question.draw = lambda *of: real(question, *of)  # type: ignore[method-assign]
    assert not answer_of(question).charged and len(charges(path)) == 1


def test_beyond_the_limit_nothing_is_drawn(path: Path, refused: Refused) -> None:
    question = Counting(path, epsilon=accounts.LIMIT[0] + 1)
    refused(answer_of, question)
    assert question.steps == ["check", "decide"] and charges(path) == []


def test_two_at_once_see_the_one_receipt(path: Path) -> None:
    wait, seen = threading.Barrier(2), list[Answer]()

    def asker(rows: str) -> None:
        question = Counting(path)
        question.rows, question.wait = rows, wait
        seen.append(answer_of(question))

    threads = [threading.Thread(target=asker, args=(rows,)) for rows in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({(answer.receipt, answer.digest) for answer in seen}) == 1
    assert sum(answer.charged for answer in seen) == 1 and len(charges(path)) == 1


def test_a_request_is_of_the_question_and_the_secret(path: Path) -> None:
    one = request_of("sql", [b"a", b"b"], RING)
    others = [
        request_of("table", [b"a", b"b"], RING), request_of("sql", [b"ab"], RING),
        request_of("sql", [b"a", b"b"], RING, "May"),
        request_of("sql", [b"a", b"b"], KeyRing(bytes(32))),
    ]  # fmt: skip
    assert len({one, *others}) == 5


def test_without_an_account_every_answer_has_a_run_of_its_own(path: Path) -> None:
    question = Counting(path)
    question.draw = lambda charge, ring: f"{charge.run_id} {ring.fingerprint}".encode()  # type: ignore[method-assign]
    one, other = (ask_uncharged(question).split() for _ in range(2))
    assert one[0] != other[0] and one[1] != other[1]
    fields = ask_uncharged(question, RING).split()
    assert fields[1] == RING.fingerprint.encode()
