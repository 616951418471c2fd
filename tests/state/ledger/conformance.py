"""What every ledger must pass, and every register of answers on it.

A scenario is a function of how a ledger is opened (again: as another process would) and of the
register's class, so that sabotaged registers run through the same ones.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from unittest import mock

import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.accounting.gaussian import mu_of
from dpstream.accounting.plan.unit import UnitIdentity
from dpstream.state.ledger.contract import Answer, AnswerLog, Begun, Decision, Ledger
from dpstream.state.ledger.events import Charge, ChargeKind, Closed, LimitChanged, TableNamed
from tests import accounts

Open = Callable[[], Ledger]
UNIT = accounts.USER


def charge(run: int, epsilon: float = 1.0, unit: str = UNIT, kind: ChargeKind = "sql") -> Charge:
    mu = mu_of(epsilon, 1e-7)
    return Charge(f"{run:032x}", "question", unit, epsilon, 1e-7, mu, 0.0, kind)


Draw = Callable[[str], bytes]


class Asker(AnswerLog):
    """A register with all steps of an answer, which `pipelines.ask.sequence` makes one by one."""

    def answered(self, charge: Charge, request: str, draw: Draw, fresh: bool = False) -> Answer:
        begun = self.charged(charge, request, fresh)
        return self.finish(begun.run_id, draw)._replace(charged=begun.charged)

    def charged(self, charge: Charge, request: str, fresh: bool = False) -> Begun:
        return self.begin(request, lambda _, __: Decision(charge), fresh)

    def finish(self, run_id: str, draw: Draw) -> Answer:
        if self.read(run_id) is None:
            self.commit(run_id, draw(run_id))
        answer = self.read(run_id)
        assert answer is not None
        return answer


class Killed(BaseException):
    """The process is gone."""


class Draws:
    """Draws answers, each with other noise, after a look at what stands in the ledger by then."""

    def __init__(self, open_again: Open, noise: str = "first") -> None:
        self.open, self.noise, self.runs = open_again, noise, list[str]()

    def __call__(self, run_id: str) -> bytes:
        with contextlib.closing(self.open()) as ledger:
            entry = ledger.history().find(run_id)
            assert entry is not None, "rows are read before the charge"
        self.runs.append(run_id)
        return f"{self.noise} answer {len(self.runs)} of {run_id}\0\xff".encode("latin-1")


@contextlib.contextmanager
def register(open_again: Open, make: type[Asker]) -> Iterator[Asker]:
    with contextlib.closing(open_again()) as ledger:
        yield make(ledger, "sql")


def ask(open_again: Open, make: type[Asker], run: int, request: str, draw: Draws) -> Answer:
    """One process asks."""
    with register(open_again, make) as answers:
        return answers.answered(charge(run), request, draw)


def limited(open_again: Open, limit: tuple[float, float]) -> None:
    with contextlib.closing(open_again()) as ledger:
        ledger.set_limit(limit)


def charged(open_again: Open) -> list[str]:
    with contextlib.closing(open_again()) as ledger:
        return [entry.run_id for entry in ledger.entries()]


def asked_again(open_again: Open, make: type[Asker]) -> None:
    """An exact re-ask reads the old bytes: no charge, no draw; another question is another."""
    draw = Draws(open_again)
    first = ask(open_again, make, 1, "asked", draw)
    assert first.charged and first.run_id == charge(1).run_id
    assert ask(open_again, make, 2, "asked", draw) == first._replace(charged=False)
    assert len(draw.runs) == 1 and charged(open_again) == [first.run_id]
    other = ask(open_again, make, 3, "other", draw)
    assert other.receipt != first.receipt and other.charged
    assert charged(open_again) == [first.run_id, other.run_id] == draw.runs


#: Where an asker can die: inside the first transaction, behind it, in the draw, inside the second
#: transaction, and behind it.
POINTS = ("append", "add_request", "begun", "draw", "add_receipt", "committed")


def in_process(work: Callable[[], object]) -> None:
    """It dies by an exception that nobody catches."""
    with pytest.raises(Killed):
        work()


def in_a_fork(work: Callable[[], object]) -> None:
    """It dies as by SIGKILL: nothing is rolled back, closed or written any more."""
    pid = os.fork()
    if not pid:
        try:
            with mock.patch(f"{__name__}.die", lambda: os._exit(9)):
                work()
        finally:  # never go on as another pytest
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


def die() -> None:
    raise Killed


def killed(
    open_again: Open,
    make: type[Asker],
    dies: Callable[[Callable[[], object]], None] = in_process,
) -> None:
    """Killed at any point: what was charged is charged once, and goes on under its run id."""
    limited(open_again, (99.0, 1e-3))
    for number, point in enumerate(POINTS):
        request, run = f"asked {point}", 2 * number + 1
        before, draw = charged(open_again), Draws(open_again, "second")

        def first(point: str = point, request: str = request, run: int = run) -> None:
            with register(open_again, make) as answers, dying(answers, point):
                drawn = dying_draw(Draws(open_again), point)
                answers.answered(charge(run), request, drawn)

        dies(first)
        paid = charged(open_again)[len(before) :]
        lost = point in ("append", "add_request")
        assert paid == ([] if lost else [charge(run).run_id]), point
        with register(open_again, make) as answers:
            answer = answers.answered(charge(run + 1), request, draw)
        assert answer.charged is lost, point
        assert charged(open_again)[len(before) :] == [answer.run_id], point
        assert answer.run_id == charge(run + lost).run_id, point
        # Whoever died behind the commit was answered already.
        assert answer.receipt.startswith(b"first" if point == "committed" else b"second"), point
        assert len(draw.runs) == (point != "committed"), point
        assert ask(open_again, make, 99, request, draw).receipt == answer.receipt, point


def dying_draw(draw: Draws, point: str) -> Callable[[str], bytes]:
    def dies(run_id: str) -> bytes:
        die()
        return b""

    return dies if point == "draw" else draw


@contextlib.contextmanager
def dying(answers: AnswerLog, point: str) -> Iterator[None]:
    """Let an asker die at a point."""
    ledger = answers._ledger
    if point in ("append", "add_request", "add_receipt"):
        real = getattr(ledger, point)

        def dies(*given: object) -> None:
            real(*given)
            die()

        with mock.patch.object(ledger, point, dies):
            yield
    elif point in ("begun", "committed"):
        transaction, left = ledger.transaction, [1 if point == "begun" else 2]

        @contextlib.contextmanager
        def ends() -> Iterator[None]:
            with transaction():
                yield
            left[0] -= 1
            if not left[0]:
                die()

        with mock.patch.object(ledger, "transaction", ends):
            yield
    else:
        yield


def two_at_once(open_again: Open, make: type[Asker]) -> None:
    """Two processes ask the same: one charge, one run id, and both see the receipt that stands."""
    draw, drawn, seen = Draws(open_again), threading.Barrier(2, timeout=30), list[Answer]()

    def both(run_id: str) -> bytes:
        receipt = draw(run_id)
        drawn.wait()  # neither has committed when the other draws
        return receipt

    def asker(run: int) -> None:
        with register(open_again, make) as answers:
            seen.append(answers.answered(charge(run), "asked", both))

    threads = [threading.Thread(target=asker, args=(run,)) for run in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 2 and len({(a.run_id, a.receipt, a.digest) for a in seen}) == 1
    assert sum(a.charged for a in seen) == 1 and len(charged(open_again)) == 1
    assert set(draw.runs) == {seen[0].run_id} and len(draw.runs) == 2
    assert ask(open_again, make, 3, "asked", draw).receipt == seen[0].receipt


def refused(open_again: Open, make: type[Asker]) -> None:
    """Beyond the limit, or of another unit: nothing is read, charged or kept."""
    draw = Draws(open_again)
    with register(open_again, make) as answers:
        for bad in (charge(1, 4.5), charge(1, 9.0)):
            with pytest.raises(PolicyError, match="this would spend"):
                answers.answered(bad, "asked", draw)
        answers.answered(charge(2), "asked", draw)
        other = UnitIdentity("other", "string").text
        with pytest.raises(PolicyError, match="another privacy unit"):
            answers.answered(charge(3, unit=other), "else", draw)
        # What was refused left no row behind.
        assert answers.answered(charge(4), "else", draw).charged
        # What was answered is read again whatever the limit has become.
        limited(open_again, (0.1, 1e-9))
        again = answers.answered(charge(5), "asked", draw)
        assert not again.charged and again.run_id == charge(2).run_id
    assert charged(open_again) == draw.runs == [charge(2).run_id, charge(4).run_id]


def closed(open_again: Open, make: type[Asker]) -> None:
    """What a recovery closed is never answered: who asks again is charged again."""
    draw, run_id = Draws(open_again), charge(1).run_id
    with register(open_again, make) as answers:
        assert answers.charged(charge(1), "asked").charged
        with contextlib.closing(open_again()) as ledger, ledger.transaction():
            ledger.append(Closed((run_id,)))
        with pytest.raises(PolicyError, match="closed by a recovery"):
            answers.commit(run_id, b"late")
        assert answers.read(run_id) is None
    again = ask(open_again, make, 2, "asked", draw)
    assert again.charged and again.run_id == charge(2).run_id
    assert charged(open_again) == [run_id, again.run_id]


SCENARIOS = (asked_again, killed, two_at_once, refused, closed)


def rows(open_again: Open) -> None:
    """The contract's rows: what a transaction changed is there for others, or nothing of it."""
    one, two = open_again(), open_again()
    start = one.head()
    assert (start.seq, start.id, one.id, one.data_set) == (1, accounts.ID, accounts.ID, "flights")
    assert (one.history().digest_at(1), one.history().digest_at(2), one.entries()) == (
        start.digest,
        None,
        [],
    )
    with one.transaction():
        one.append(charge(1))
        one.add_token("run", "a", None)
        one.add_token("run", "b", "a")
        one.add_request(charge(1).run_id, "asked")
    assert two.head() == one.head() and two.entries() == one.entries() == [charge(1)]
    assert (
        two.history().digest_at(2) == two.history().digest_of(charge(1).name) == two.head().digest
    )
    assert two.tokens("run") == {"a": None, "b": "a"} and two.tokens("other") == {}
    with pytest.raises(ZeroDivisionError), two.transaction():
        two.append(charge(2))
        two.drop_token("run", "a")
        two.add_receipt(charge(1).run_id, b"\xff", "digest")
        two.append(LimitChanged((9.0, 1e-3)))
        two.append(TableNamed("table"))
        two.append(Closed(("run",)))
        assert two.entries() == [charge(1), charge(2)] and two.tokens("run") == {"b": "a"}
        assert two.history().limit == (9.0, 1e-3) and two.history().tables == {"table"}
        1 / 0  # noqa: B018
    for ledger in (one, two):
        assert ledger.entries() == [charge(1)] and ledger.head().seq == 2
        assert ledger.tokens("run") == {"a": None, "b": "a"}
        assert ledger.history().limit == accounts.LIMIT
        assert not ledger.history().tables and not ledger.history().closed
        question_row = (charge(1).run_id, "asked", None, None)
        assert ledger.request_of(charge(1).run_id) == question_row
    with two.transaction():
        two.add_receipt(charge(1).run_id, b"\xff", "digest")
        two.drop_token("run", "a")
        two.append(charge(2))
        two.add_request(charge(2).run_id, "asked")
        two.append(TableNamed("table"))
    assert [*one.requests_alike("asked").items()] == [
        (charge(1).run_id, True),
        (charge(2).run_id, False),
    ]
    first = two.request_of(charge(1).run_id)
    assert first is not None and first[2:] == (b"\xff", "digest")
    assert one.request_of("none") is None and one.requests_alike("none") == {}
    assert one.tokens("run") == {"b": "a"} and one.entries() == [charge(1), charge(2)]
    assert one.head() == two.head() and one.head().seq == 5 and one.history().tables == {"table"}
    for write in (
        lambda: one.append(charge(3)),
        lambda: one.add_token("run", "c", None),
        lambda: one.add_request(charge(3).run_id, "x"),
    ):
        with pytest.raises(AssertionError, match="transaction"):
            write()
    assert two.entries() == [charge(1), charge(2)]
    one.close()
    two.close()


def limits(open_again: Open) -> None:
    """The limit is the account's: changed by an entry, read in the transaction that charges."""
    one, two = open_again(), open_again()
    assert one.history().limit == two.history().limit == accounts.LIMIT
    with pytest.raises(PolicyError, match="is epsilon 4 at delta"):
        one.charge(charge(1, 4.5))
    assert two.set_limit((9.0, 1e-3)) == accounts.LIMIT
    assert one.charge(charge(1, 4.5))  # opened before the limit was raised
    assert two.set_limit((0.5, 1e-6)) == (9.0, 1e-3)
    with pytest.raises(PolicyError, match=r"is epsilon 0\.5 at delta"):
        one.charge(charge(2, 0.1))
    assert two.set_limit((0.5, 1e-6)) == (0.5, 1e-6) and one.head().seq == 4
    one.close()
    two.close()
