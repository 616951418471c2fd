"""Asking: what is paid and when, re-asks, refusals, and that no record decides anything."""

import contextlib
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from dpstream.accounting.errors import PolicyError, RunError, UsageError
from dpstream.accounting.sessions.aggregates import COUNT
from dpstream.dp_transforms import session as drawing
from dpstream.pipelines.ask import sequence
from dpstream.pipelines.formats.receipt import table_of
from dpstream.pipelines.runners.bounded import Runner
from dpstream.pipelines.session import answer as answers
from dpstream.pipelines.session.ask import SessionQuestion, close_before, first_gap
from dpstream.pipelines.session.records.load import add, delete
from dpstream.state.ledger import regions
from dpstream.state.ledger.contract import AnswerLog, Ledger
from dpstream.state.ledger.orders import SessionRefusedError
from tests.golden.pinned import check, of_refusals
from tests.golden.refusals import Refused
from tests.pipelines.session.statements import Figures, Session
from tests.pipelines.session.tables import RECORDS, small_config_at
from tests.sessions import median, sum_of

EMPTY = RECORDS.splitlines()[0] + "\n"
OTHER = EMPTY + "".join(f"x{n},{n % 4},{n % 10},{n % 3},0.25\n" for n in range(40))


def test_an_answer_is_of_the_records_that_paid(session: Session) -> None:
    """Of 5 records, at noise so small that a value beyond 40 of them is seen once in 10^17."""
    with_budget = session.where("epsilon >= 1")
    answer = with_budget.count(1)
    assert answer.charged and answer.insecure and answer.value is not None
    assert abs(answer.value - 5) <= 40 and answer.sd is not None and 1.3 < answer.sd < 1.5
    [(run_id, charge)] = session.open_table.account.history()
    assert (charge.budget, charge.amount, charge.analyst) == ("epsilon", 1_000_000, "alice")
    assert answer.header.run_id == run_id
    low, high = answer.interval
    assert low is not None and high is not None and low < answer.value < high


def test_an_exact_re_ask_is_the_old_bytes_whoever_asks_it_however_it_is_written(
    session: Session,
) -> None:
    first = session.where("a >= 1 AND a < 3 AND epsilon >= 1").count(0.5)
    again = session.where("epsilon >= 1 AND NOT (a < 1 OR a >= 3)").count("0.50")
    assert first.charged and not again.charged and again.receipt == first.receipt
    add(session.open_table.config, [_more(session)])
    session.open_table.analyst = "bob"
    later = session.where("a >= 1 AND a < 3 AND epsilon >= 1").count(0.5)
    assert later.receipt == first.receipt and later.digest == first.digest
    fresh = session.where("a >= 1 AND a < 3 AND epsilon >= 1").count(0.5, fresh=True)
    assert fresh.charged and fresh.header.run_id != first.header.run_id
    # Another amount, figure, part or way to pay is another question.
    for question in (
        lambda s: s.count(0.25), lambda s: s.count(0.25, kind="rho"),
        lambda s: s.sum("b", 0.25, kind="rho"), lambda s: s.where("b >= 1").count(0.25),
    ):  # fmt: skip
        part = session.where("a >= 1 AND a < 3 AND epsilon >= 1.5 AND rho >= 0.5")
        assert question(part).charged


def _more(session: Session) -> Path:
    path = session.open_table.config.base / "more.csv"
    path.write_text(EMPTY + "r9,1,1,2.0,0.5\n")
    return path


def test_records_come_and_go_and_spent_budget_stays(session: Session, refused: Refused) -> None:
    rich = session.where("epsilon = 2")
    scans = _counted(session)
    rich.count(0.5)
    before = session.open_table.account.spent("epsilon")
    add(session.open_table.config, [_more(session)])
    gone = session.open_table.config.base / "gone.csv"
    gone.write_text("name\nr1\nr5\n")
    delete(session.open_table.config, [gone])
    assert (session.open_table.account.spent("epsilon").amounts == before.amounts).all()
    rich.count(1)
    assert scans == [3, 2]  # r1, r3, r5; then r3, r9: the new version is read
    refused(rich.count, 1.25)


def _counted(session: Session) -> list[int]:
    """True counts of all scans of a session from now on."""
    counts = list[int]()
    opened = session.open_table.scan

    def scan() -> Any:
        real = opened()

        class Spy:
            def totals(self, *given: Any) -> Any:
                totals = real.totals(*given)
                counts.append(int(totals.records.sum()))
                return totals

        return Spy()

    session.open_table.scan = scan  # type: ignore[method-assign]
    return counts


def test_a_record_without_budget_is_never_read(session: Session) -> None:
    scans = _counted(session)
    session.table.count(0.5, drop=True)
    session.table.count(0.5, drop=True, fresh=True)
    session.table.count(0.5, drop=True, fresh=True)
    assert scans == [6, 5, 4]  # r2 has 0.5, r0 has 1.0
    session.where("remaining_epsilon >= 0.5").count(0.5)
    assert scans[3:] == [3]  # r4 has 1.5


def test_a_refusal_names_what_lacks_and_charges_nothing(session: Session) -> None:
    scans = _counted(session)
    with pytest.raises(SessionRefusedError) as refused:
        session.where("a = 0").count(1)
    decision = refused.value.decision
    assert decision.largest == 250_000 and decision.lacking[0, 2].tolist() == [1, 4]
    with pytest.raises(SessionRefusedError) as second:
        session.where("a = 0 AND epsilon >= 0.5").count(1)
    assert second.value.decision.largest == 500_000
    with pytest.raises(SessionRefusedError) as third:  # nobody in this range has enough
        session.where("a = 0 AND epsilon < 1").count(1)
    assert third.value.enough == ""
    assert not scans and session.open_table.account.history() == []
    # What the refusal names is answered.
    assert refused.value.enough in refused.value.fix
    assert session.where(f"a = 0 AND {refused.value.enough}").count(1).charged


def test_a_question_of_everything_leaves_out_who_has_no_budget(
    session: Session, refused: Refused
) -> None:
    """At most one step of budgets: every point that has a budget at all has enough."""
    scans = _counted(session)
    assert session.table.count(0.25).charged and len(scans) == 1
    [(_, charge)] = session.open_table.account.history()
    assert charge.boxes[:, 2, 0].min() == charge.read[:, 2, 0].min() == 1
    refused(lambda: session.where("epsilon < 0.25").count(0.25))
    # Points that have a budget of the other kind are asked with that.
    assert session.where("epsilon < 0.25").count(0.25, kind="rho").charged


QUESTIONS: list[tuple[str, float, dict[str, Any]]] = [
    ("a < 2", 0.5, {"drop": True}),
    ("a < 2", 0.5, {}),
    ("epsilon >= 1", 0.75, {"cover": ("a",)}),
    ("a = 1 AND epsilon >= 1", 0.5, {}),
    ("remaining_epsilon >= 0.5", 0.5, {}),
    ("consumed_epsilon < 0.5", 0.25, {"drop": True}),
    ("a = 2", 0.25, {"kind": "rho", "drop": True}),
    ("a = 2", 0.25, {"drop": True}),
    ("a < 2", 0.5, {"drop": True}),
]


def transcript(folder: Path, records: str) -> list[Any]:
    """Refusals, charges and re-asks of some questions, but for run ids and instants."""
    entries = list[Any]()
    with Session(small_config_at(folder, records), analyst="alice") as session:
        for where, amount, how in QUESTIONS:
            try:
                answer = session.where(where).count(amount, **how)
                entries.append((answer.charged, answer.sd))
            except PolicyError as error:
                entries.append(
                    (str(error), session.open_table.account.spent("epsilon").amounts.tolist())
                )
        for _, charge in session.open_table.account.history():
            entries.append((charge.budget, charge.amount, charge.charged, charge.reads))
        plan = session.where("a < 3").plan(0.5)
        entries.append((plan.decision.accepted, plan.decision.largest, plan.read.tolist()))
    return entries


def test_the_transcript_is_the_same_on_other_and_on_empty_data(tmp_path: Path) -> None:
    one, *others = (
        transcript(tmp_path / str(n), text) for n, text in enumerate((RECORDS, OTHER, EMPTY))
    )
    assert others == [one, one] and len(one) > len(QUESTIONS) + 4


def test_a_decision_that_looks_at_records_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sabotaged twin: a question of which no record is asked is not charged."""
    decide = SessionQuestion.decide

    def looks(question: SessionQuestion, run_id: str, account: Any) -> Any:
        open_table, request = question.open_table, question.request
        boxes = request.selection.boxes(open_table.account)
        totals = open_table.scan().totals(boxes, request.question.cells,
                                    request.question.needs(open_table.space, boxes))  # fmt: skip
        if not totals.records.sum():
            raise PolicyError("where", "has no record", "ask elsewhere")
        return decide(question, run_id, account)

    monkeypatch.setattr(SessionQuestion, "decide", looks)
    assert transcript(tmp_path / "0", RECORDS) != transcript(tmp_path / "1", EMPTY)


def test_what_cannot_be_answered_is_refused_before_it_is_paid(session: Session) -> None:
    def sql(items: str, options: str = "epsilon = 1", more: str = "WHERE epsilon >= 1") -> object:
        text = f"SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS({options}) {items} FROM small {more}"
        return partial(session.ask, text)

    one = "COUNT(*) AS n"
    calls: Any = {
        "half a condition": sql(one, more="WHERE a <"),
        "no column": sql(one, more="WHERE nothing = 1"),
        "a sum of budgets": sql("SUM(epsilon) AS n"),
        "a sum of nothing": sql("SUM(nothing) AS n"),
        "a sum of two": sql("SUM(a + b) AS n"),
        "values": sql("COUNT(b) AS n"),
        "distinct values": sql("COUNT(DISTINCT b) AS n"),
        "a variance": sql("VAR(b) AS n"),
        "bounds": sql("SUM(b, contribution_bounds_per_row => (0, 5)) AS n"),
        "a figure of nothing": sql("a", more="GROUP BY a"),
        "no amount": sql(one, "drop = TRUE"),
        "two amounts": sql(one, "epsilon = 1, rho = 1"),
        "an amount of 0": sql(one, "epsilon = 0"),
        "too much": sql(one, "epsilon = 1e9"),
        "a text": sql(one, "epsilon = '1'"),
        "a delta": sql(one, "epsilon = 1, delta = 1e-9"),
        "two questions": partial(session.ask, " UNION ALL ".join(
            f"SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = {e}) COUNT(*) AS n FROM small"
            for e in (0.1, 0.2))),
        "drop = 1": sql(one, "epsilon = 1, drop = 1"),
        "a cover": sql(one, "epsilon = 1, cover = ['nothing']"),
        "an allotment": sql(one, "epsilon = 1, allotment = 'nothing'"),
        "a union that pays": sql(one, "epsilon = 1, union = TRUE"),
        "a union of groups": sql(f"a, {one}", "union = TRUE", "GROUP BY a"),
        "falling edges": sql(one, more="GROUP BY RANGE_BUCKET(a, [3, 2])"),
        "nobody": sql(one, more="WHERE a < 0"),
        "half a window": sql(one, "epsilon = 1, sliding = 'b'"),
        "an arrival of budgets": sql(one, "epsilon = 1, sliding = 'epsilon', width = 1, until = 2"),
        "no width": sql(one, "epsilon = 1, sliding = 'b', width = 0, until = 2"),
        "an allotment of groups": partial(
            session.ask, "CREATE ALLOTMENT n AS SELECT WITH DIFFERENTIAL_PRIVACY "
            "OPTIONS(epsilon = 1) a, COUNT(*) AS n FROM small GROUP BY a"),
        "no allotment": partial(session.ask, "DROP ALLOTMENT n"),
        "a plan of what is free": partial(session.ask, "EXPLAIN SELECT * FROM dpstream.budget"),
        "no system table": partial(session.ask, "SELECT * FROM dpstream.records"),
        "a system table beside": partial(session.ask, "SELECT * FROM dpstream.budget, small"),
        "before all": lambda: close_before(session.open_table, "b", "0"),
        **{
            f"a tick {name[:5]!r}": partial(tick, session, 6, name)
            for name in ("", "a\nb", "\udc80", "t" * 201)
        },
    }  # fmt: skip
    text = of_refusals(calls)
    (session.open_table.config.folder / "manifest.json").unlink()
    text += "\n" + of_refusals({"no table": lambda: session.where("epsilon >= 1").count(1)})
    check(
        Path(__file__).with_name("refusals_ask.txt"),
        text.replace(str(session.open_table.config.base), "FOLDER"),
    )
    assert session.open_table.account.history() == []


def test_the_charge_is_durable_before_a_record_is_read(session: Session, refused: Refused) -> None:
    def broken() -> Any:
        assert len(session.open_table.account.history()) == 1
        raise RunError("table", "is gone", "bring it back")

    real, session.open_table.scan = session.open_table.scan, broken  # type: ignore[method-assign]
    rich = session.where("epsilon >= 1")
    refused(lambda: rich.ask((median("b"),), 1))
    session.open_table.scan = real  # type: ignore[method-assign]
    answer = rich.ask((median("b"),), 1)
    assert not answer.charged and len(session.open_table.account.history()) == 1


def test_what_was_cut_off_continues_on_the_records_that_there_are(
    session: Session, refused: Refused
) -> None:
    def broken() -> Any:
        raise RunError("table", "is gone", "bring it back")

    rich = session.where("epsilon >= 1")
    real, session.open_table.scan = session.open_table.scan, broken  # type: ignore[method-assign]
    for how in ({}, {"fresh": True}):
        refused(rich.count, 1, **how)
    session.open_table.scan = real  # type: ignore[method-assign]
    add(session.open_table.config, [_more(session)])
    scans = _counted(session)
    answer = rich.count(1)
    assert not answer.charged and scans == [6]
    [(run_id, _)] = session.open_table.account.history()
    assert answer.header.run_id == run_id


def test_what_was_answered_needs_no_records(session: Session, refused: Refused) -> None:
    rich = session.where("epsilon >= 1")
    first, scans = rich.count(0.5), _counted(session)
    (session.open_table.config.folder / "manifest.json").unlink()
    assert rich.count(0.5).receipt == first.receipt and scans == []
    for how in ({"fresh": True}, {"as_of": "May"}):
        refused(rich.count, 0.5, **how)
    assert len(session.open_table.account.history()) == 1


def test_a_label_is_another_question(session: Session) -> None:
    rich = session.where("epsilon >= 2")
    first, may = rich.count(0.5), rich.count(0.5, as_of="May")
    assert may.charged and may.receipt != first.receipt
    add(session.open_table.config, [_more(session)])
    assert rich.count(0.5, as_of="May").receipt == may.receipt
    allotment = rich.as_pinq(0.5)
    assert allotment.count(0.25).charged and allotment.count(0.25, as_of="May").charged
    assert not allotment.count(0.25, as_of="May").charged and allotment.left == 0


def test_a_charge_after_the_scan_would_be_noticed(
    session: Session, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    """The sabotaged twin of the test above: the scan comes first."""
    check = SessionQuestion.check

    def early(question: SessionQuestion, keys: Any) -> None:
        check(question, keys)
        question.open_table.scan()

    monkeypatch.setattr(SessionQuestion, "check", early)
    with pytest.raises(AssertionError):
        test_the_charge_is_durable_before_a_record_is_read(session, refused)


def test_predicates_on_consumption_are_resolved_in_the_transaction_that_charges(
    tmp_path: Path,
) -> None:
    assert _raced(tmp_path / "0") == []


def test_a_predicate_that_is_resolved_before_the_lock_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sabotaged twin: boxes as they were when the question was written."""

    def early(open_table: Any, request: Any) -> Any:
        boxes = request.selection.boxes(open_table.account)
        return SessionQuestion(open_table, request._replace(window=lambda _: boxes))

    monkeypatch.setattr(answers, "SessionQuestion", early)
    assert _raced(tmp_path / "0") != []


def _raced(folder: Path) -> list[int]:
    """Numbers of the entries whose boxes are not what their predicate meant at their place."""
    where = "consumed_epsilon < 0.5 AND epsilon >= 1"
    config = small_config_at(folder)
    with Session(config, analyst="alice") as mine, Session(config, analyst="bob") as other:
        transact = mine.open_table.ledger.transact

        def slow(work: Any, **options: Any) -> Any:
            with contextlib.suppress(PolicyError):
                other.where("a = 0 AND epsilon >= 1").count(0.5)  # just before the lock
            return transact(work, **options)

        with mock.patch.object(mine.open_table.ledger, "transact", slow):
            mine.where(where).count(0.25)
        history = mine.open_table.account.history()
        wanted = mine.where("NOT a = 0 AND epsilon >= 1").boxes()
        return [n for n, (_, charge) in enumerate(history)
                if charge.analyst == "alice" and not _same(charge.read, wanted)]  # fmt: skip


def _same(boxes: Any, others: Any) -> bool:
    return sorted(boxes.tolist()) == sorted(others.tolist())


@pytest.mark.slow
def test_a_runner_gives_the_same_bytes(tmp_path: Path) -> None:
    config = small_config_at(tmp_path)
    runner = Runner("DirectRunner", (), 1)
    with (
        Session(config, analyst="alice", runner=runner) as there,
        Session(config, analyst="alice") as here,
    ):
        given = ((COUNT, sum_of("b"), median("b")), 1, {"a": None})
        answer = there.where("epsilon >= 1").ask(*given)
        again = here.where("epsilon >= 1").ask(*given)
        assert answer.charged and not again.charged and again.receipt == answer.receipt
        charge = here.open_table.ledger.history().find(answer.header.run_id)
        assert charge is not None
        request = here.where("epsilon >= 1").request(*given)
        same = SessionQuestion(here.open_table, request).draw(charge, here.open_table.ring)
        assert table_of(same) == table_of(answer.receipt)
        with pytest.raises(UsageError):
            Session(config, analyst="alice", runner=Runner("Nobody", (), 1)).where(
                "epsilon = 2"
            ).count(1)


def tick(
    session: Session, until: int, name: str, where: str = "epsilon >= 1", width: int = 2
) -> Figures:
    """One tick of a count of 0.4 in a window of ``b``."""
    options = f"epsilon = 0.4, sliding = 'b', width = {width}, until = {until}"
    head = f"SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS({options}) COUNT(*) AS n"
    return session.ask(f"{head} FROM small WHERE {where}", as_of=name)


def windows(session: Session) -> list[list[int]]:
    history = session.open_table.account.history()
    return [charge.read[0, 1].tolist() for _, charge in history if len(charge.read)]


def test_the_window_stays_while_it_has_budget_and_then_slides(
    session: Session, refused: Refused
) -> None:
    for number in range(6):
        assert tick(session, 6, f"t{number}").charged
    assert windows(session) == [[0, 2], [0, 2], [2, 4], [2, 4], [4, 6], [4, 6]]
    refused(lambda: tick(session, 6, "t6"))
    assert tick(session, 8, "t6").charged  # newer arrivals
    assert windows(session)[-1] == [6, 8]


def test_a_tick_is_answered_once(session: Session) -> None:
    query = partial(tick, session, where="epsilon >= 2")
    first, again = query(6, "monday"), query(8, "monday")
    assert first.charged and not again.charged and again.receipt == first.receipt
    assert query(6, "tuesday").charged
    # A question of that label, and a window of another width, are other questions.
    assert session.where("epsilon >= 2").count("0.4", as_of="monday").charged
    assert query(8, "monday", width=3).charged


def test_others_spend_budget_too(session: Session) -> None:
    session.where("b = 1 AND epsilon >= 1").count(1)
    tick(session, 10, "a")
    assert windows(session)[-1] == [2, 4]
    session.where("b = 2 AND epsilon >= 2").count(1.5)
    tick(session, 10, "b")
    assert windows(session)[-1] == [3, 5]


def test_gaps() -> None:
    ranges = np.array([[8, 9], [0, 2], [3, 4], [3, 6]])
    assert first_gap(ranges, 0, 20, 1, 1) == 2
    assert first_gap(ranges, 0, 20, 2, 1) == 6
    assert first_gap(ranges, 0, 20, 3, 1) == 9 and first_gap(ranges, 0, 11, 3, 1) is None
    assert first_gap(ranges, 0, 20, 5, 5) == 10 and first_gap(ranges[:0], 0, 5, 5, 5) == 0


def test_a_closed_range_refuses_every_query_for_ever(session: Session, refused: Refused) -> None:
    answer = session.where("b < 4 AND epsilon >= 1").count(0.5)
    allotment = session.where("b < 6 AND epsilon >= 1").as_pinq(0.5)
    assert close_before(session.open_table, "b", "4") and not close_before(
        session.open_table, "b", "4"
    )
    assert not session.where("b < 4 AND epsilon >= 1").count("0.000001").charged  # it is known
    for where in ("b < 3 AND epsilon >= 1", "b = 0 AND epsilon = 2", "b = 3 AND epsilon = 2"):
        with pytest.raises(SessionRefusedError):
            session.where(where).count("0.000001")
    refused(allotment.count, 0.25)
    assert allotment.where("b >= 4").count(0.25).charged
    tick(session, 8, "t")
    assert windows(session)[-1][0] >= 4
    assert session.where("b < 4 AND epsilon >= 1").count(0.5).receipt == answer.receipt
    assert len(session.open_table.account.spent("epsilon").boxes) <= 8


# kill -9 between decision, charge, scan and answer: nothing is under-counted, and one answer
# stands.


#: What is killed, and whether its charge stands: before the end of the transaction nothing does.
FAULTS: dict[str, tuple[Any, str, bool]] = {
    "decision": (regions, "planned", False),
    "append": (Ledger, "append", False),
    "charge": (AnswerLog, "begin", True),
    "scan": (drawing, "answered", True),
    "draw": (sequence, "drawn", True),
    "answer": (AnswerLog, "commit", True),
}


def killed(work: Callable[[], Any], home: Any, name: str) -> bytes:
    """Do something in a process that dies as soon as a function has returned; what it said."""
    real = getattr(home, name)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)

        def once(*given: Any, **more: Any) -> Any:
            outcome = real(*given, **more)
            if name == "drawn":
                os.write(writing, outcome)
            os.kill(os.getpid(), signal.SIGKILL)
            return outcome

        setattr(home, name, once)
        try:
            work()
        finally:  # never go on as another pytest
            os._exit(1)
    os.close(writing)
    with open(reading, "rb") as pipe:
        output = pipe.read()
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    return output


@pytest.mark.parametrize("fault", FAULTS)
def test_whoever_is_killed_has_paid_before_records_are_read(fault: str, tmp_path: Path) -> None:
    config = small_config_at(tmp_path)
    home, name, stands = FAULTS[fault]

    def work() -> None:
        with Session(config) as session:
            session.where("epsilon >= 1").ask((COUNT,), 0.5, {"a": None})

    receipt = killed(work, home, name)
    with Session(config) as session:
        assert len(session.open_table.account.history()) == stands
        assert session.table.max_consumed() == 0.5 * stands
        answer = session.where("epsilon >= 1").ask((COUNT,), 0.5, {"a": None})
        assert answer.charged != stands and len(session.open_table.account.history()) == 1
        if fault == "draw":  # the same run id is the same noise
            assert table_of(receipt) == table_of(answer.receipt)
        again = session.where("epsilon >= 1").ask((COUNT,), 0.5, {"a": None})
        assert again.receipt == answer.receipt and session.table.max_consumed() == 0.5


@pytest.mark.parametrize("fault", ["charge", "draw"])
def test_a_draw_that_is_killed_is_counted(fault: str, tmp_path: Path) -> None:
    config = small_config_at(tmp_path)
    with Session(config) as session:
        session.where("epsilon >= 1").as_pinq(1, "night")

    def work() -> None:
        with Session(config) as session:
            session.allotment("night").count(0.75)

    home, name, _ = FAULTS[fault]
    killed(work, home, name)
    with Session(config) as session:
        allotment = session.allotment("night")
        assert allotment.left == 0.25
        assert not allotment.count(0.75).charged
        assert allotment.left == 0.25 and allotment.count(0.25).charged
