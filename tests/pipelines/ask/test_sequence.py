"""The sequence itself, with a question that counts its own steps, on a real account."""

import contextlib
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.pipelines.ask.question import Asking
from dpstream.pipelines.ask.sequence import ask, ask_uncharged, request_of
from dpstream.state.ledger.contract import Answer, Decision
from dpstream.state.ledger.events import Charge, ChargeKind
from dpstream.state.ledger.history import History
from dpstream.state.ledger.open import open_path
from tests import accounts
from tests.state.ledger.conformance import Killed, charge

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


def test_a_label_is_another_question(path: Path) -> None:
    question = Counting(path)
    answers = [answer_of(question, Asking(as_of=label)) for label in ("", "May", "June", "May")]
    assert [answer.charged for answer in answers] == [True, True, True, False]
    assert answers[3].receipt == answers[1].receipt
    for label in ("a\nb", "x" * 401):
        with pytest.raises(UsageError) as caught:
            answer_of(question, Asking(as_of=label))
        assert caught.value.field == "as_of"


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


def test_fresh_continues_what_was_cut_off(path: Path) -> None:
    question = Counting(path)
    question.dies = "draw"
    with pytest.raises(Killed):
        answer_of(question)
    question.dies = ""
    assert not answer_of(question, Asking(fresh=True)).charged and len(charges(path)) == 1


def test_an_input_that_changes_while_it_is_read(path: Path) -> None:
    question, real = Counting(path), Counting.draw

    def moving(charge: Charge, ring: KeyRing) -> bytes:
        question.moved = not question.moved
        return real(question, charge, ring)

    question.draw = moving  # type: ignore[method-assign]
    with pytest.raises(PolicyError) as caught:
        answer_of(question)
    assert caught.value.field == "input" and len(charges(path)) == 1
    question.draw = lambda *of: real(question, *of)  # type: ignore[method-assign]
    assert not answer_of(question).charged and len(charges(path)) == 1


def test_beyond_the_limit_nothing_is_drawn(path: Path) -> None:
    question = Counting(path, epsilon=accounts.LIMIT[0] + 1)
    with pytest.raises(PolicyError) as caught:
        answer_of(question)
    assert caught.value.field == "account.limit"
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
