"""The promise, enumerated: |ln p0/p1| <= the sum of the initial budgets of the differing records.

An adaptive analyst asks a tiny table through sessions: ledger, predicates, ``drop``, quotas,
allotments, updates in between.  Answers are not drawn but enumerated, and each transcript's
probability is the product of the exact geometric law of its answers.  What the analyst is
answered, and nothing else, decides what is asked, so that the same transcript has one probability
on each pair of databases.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import PolicyError
from dpstream.accounting.sessions.aggregates import COUNT
from dpstream.accounting.sessions.calibration import calibrated
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.pipelines.formats.receipt import encoded
from dpstream.pipelines.session import ask as asking
from dpstream.pipelines.session.ask import SessionQuestion, SessionRequest
from dpstream.pipelines.sql.receipt import Header, Points, read
from dpstream.state.ledger import orders, regions
from dpstream.state.ledger.balances import region_of
from dpstream.state.ledger.events import Charge
from tests.pipelines.session.statements import Session
from tests.pipelines.session.tables import RECORDS, small_config_at

EMPTY = RECORDS.splitlines()[0] + "\n"
QUOTA = "\n[table.small.quota]\nepsilon = 1.25\n"
ANSWERS = (0, 3)


class Step(NamedTuple):
    """A count that was paid: what it read, at which noise, what was answered, and when."""

    read: Int64
    scale: float
    value: int
    updates: int


@dataclasses.dataclass(frozen=True)
class Enumerated(SessionQuestion):
    """A question whose answer is enumerated instead of drawn."""

    analyst: "Analyst"

    def draw(self, charge: Charge, ring: KeyRing) -> bytes:
        analyst, read = self.analyst, region_of(charge, self.open_table.table).read
        value = analyst.answers.pop(0)
        [measures] = calibrated(self.open_table.space, self.request.question, read)
        scale = measures.each[0].noises[0].scale
        analyst.steps.append(Step(read, scale, value, analyst.updates))
        points = Points(self.open_table.table.digest, self.request.question.canonical)
        cost = {"epsilon": 0.0, "delta": 0.0, "mu": None, "threshold_delta": 0.0}
        header = Header(run_id=charge.run_id, plan_hash=charge.plan_hash, **cost, points=points)  # type: ignore[arg-type]
        return encoded(header, pa.table({"value": [value]}))


class Analyst:
    """Asks, and chooses the next question by the answers so far."""

    def __init__(self, session: Session, answers: tuple[int, ...]) -> None:
        self.session, self.answers, self.updates = session, list(answers), 0
        self.steps = list[Step]()

    def count(self, request: SessionRequest) -> int | None:
        """The next answer of the enumeration, ``None`` if it is refused."""
        question = Enumerated(self.session.open_table, request, self)
        try:
            answer = asking.committed(question.open_table, question, request.how)
            return int(read(answer.receipt)[1]["value"][0].as_py())
        except PolicyError:
            return None

    def ask(self, where: str, amount: float, **how: Any) -> int | None:
        return self.count(self.session.where(where).request((COUNT,), amount, **how))

    def run(self) -> None:
        """The analysis: what is left decides, and what was answered."""
        first = self.ask("a = 0", 0.5, drop=True)
        self.updates = 1
        if first:
            self.ask("a < 2 AND consumed_epsilon > 0", 0.5, drop=True)
        else:
            self.ask("a <= 1 AND epsilon >= 0.75", 0.75)
        self.session.open_table.analyst = "bob"
        second = self.ask("a = 0 AND remaining_epsilon >= 0.25", 0.25)
        allotted = self.session.where("a = 0 AND remaining_epsilon >= 0.5")
        try:
            allotment = allotted.as_pinq(0.5)
        except PolicyError:
            return
        self.updates = 2
        self.count(allotment.request((COUNT,), 0.25))
        part = allotment.where("epsilon >= 1") if second else allotment
        self.count(part.request((COUNT,), 0.25, fresh=True))
        self.count(part.request((COUNT,), 0.25, fresh=True))  # one too many


def transcripts(folder: Path) -> Iterator[list[Step]]:
    """Every run of the analysis; a run asks at most six times."""
    seen = set[tuple[int, ...]]()
    for number, answers in enumerate(itertools.product(ANSWERS, repeat=6)):
        if any(answers[: len(prefix)] == prefix for prefix in seen):
            continue
        config = small_config_at(folder / str(number), EMPTY, QUOTA)
        with Session(config, analyst="alice") as session:
            analyst = Analyst(session, answers)
            analyst.run()
        seen.add(answers[: len(analyst.steps)])
        yield analyst.steps


def records() -> Int64:
    """(n, 4) every point that a differing record may be at, of few values."""
    return np.array([[a, 1, e, 0] for a in (0, 1) for e in range(9)])


def histories() -> list[tuple[int, ...]]:
    """When a record is there: in which of the three times between updates."""
    return [when for when in itertools.product((0, 1), repeat=3) if any(when)]


def worst(folder: Path) -> float:
    """The largest loss of a transcript, less the initial budgets of the differing records.

    Pairs of databases differ in one record or two, each there for a while, over a base of other
    records.
    """
    at, when = records(), np.array(histories())
    most = -np.inf
    for steps in transcripts(folder):
        moved = np.zeros((len(steps), len(at) * len(when)))
        for number, step in enumerate(steps):
            inside = np.zeros(len(at), bool)
            for box in step.read:
                inside |= ((at >= box[:, 0]) & (at < box[:, 1])).all(axis=1)
            moved[number] = (inside[:, None] & (when[:, step.updates] == 1)).reshape(-1)
        budget = np.repeat(at[:, 2] * 0.25, len(when))
        scale, value = (np.array([getattr(s, name) for s in steps]) for name in ("scale", "value"))
        for base in (0, 2):
            noise = np.abs(value - base)
            one = (np.abs(value[:, None] - base - moved) - noise[:, None]) / scale[:, None]
            most = max(most, float((np.abs(one.sum(axis=0)) - budget).max()))
            for first in range(0, len(budget), 7):  # a second record beside some first ones
                both = np.abs(value[:, None] - base - moved - moved[:, [first]])
                two = ((both - noise[:, None]) / scale[:, None]).sum(axis=0)
                most = max(most, float((np.abs(two) - budget - budget[first]).max()))
    return most


def test_no_transcript_tells_more_than_the_initial_budgets(tmp_path: Path) -> None:
    excess = worst(tmp_path)
    assert -0.01 < excess <= 1e-9  # some record pays all that it has


def _reads_what_is_dropped(planned: Callable[..., Any]) -> Callable[..., Any]:
    def changed(order: Any, state: Any, rules: Any, at: int) -> Any:
        plan = planned(order, state, rules, at)
        if not plan.decision.accepted:
            return plan
        return plan._replace(read=order.resolve(orders.Views(state, 1_000_000)))

    return changed


def _charges_nothing_dropped(planned: Callable[..., Any]) -> Callable[..., Any]:
    def changed(order: Any, state: Any, rules: Any, at: int) -> Any:
        plan = planned(order, state, rules, at)
        return plan._replace(decision=plan.decision._replace(charged=plan.decision.charged[:0]))

    return changed


def _forgets_the_drawn(_: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *_: None


@pytest.mark.parametrize(
    ("name", "twin"),
    [
        ("planned", _reads_what_is_dropped),
        ("planned", _charges_nothing_dropped),
        ("check_draw", _forgets_the_drawn),
    ],
)
def test_a_twin_that_breaks_the_promise_is_noticed(
    name: str, twin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regions, name, twin(getattr(regions, name)))
    assert worst(tmp_path) > 0.2


def test_quotas_hold_at_every_point(tmp_path: Path) -> None:
    most = 0.0
    for number, answers in enumerate(((0,) * 6, (3,) * 6)):
        with Session(
            small_config_at(tmp_path / str(number), EMPTY, QUOTA), analyst="alice"
        ) as session:
            Analyst(session, answers).run()
            for who in ("alice", "bob"):
                spent = session.open_table.account.analyst_spent("epsilon", who)
                most = max(most, int(spent.amounts.max()) / 1e6)
    assert 0.5 < most <= 1.25
