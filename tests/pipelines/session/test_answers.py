"""Answers: read again, handed out as tickets, and joined into unions."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.sessions.aggregates import COUNT, Question, average, sum_of
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.pipelines.formats.receipt import encoded, header_of
from dpstream.pipelines.session.ask import SessionRequest
from dpstream.pipelines.session.overview import transcript
from dpstream.pipelines.session.receipt import Header, decoded, ticket_name
from dpstream.pipelines.session.records.load import add
from dpstream.pipelines.session.records.manifest import read_manifest
from dpstream.pipelines.session.session import Session
from dpstream.pipelines.session.ticket import hand_out, opened, ticket_of
from dpstream.pipelines.session.union import Part, joined
from dpstream.state.ledger.contract import Answer, AnswerLog
from tests.golden.pinned import check, of_refusals
from tests.golden.refusals import Refused
from tests.pipelines.session.batching import KEY, RUN, Made, made, secret_file
from tests.pipelines.session.tables import RECORDS

ROWS = pa.table({"count": [3.0], "count_sd": [1.0], "count_low": [1.0], "count_high": [5.0]})
HEADER = Header(
    run_id="ab" * 16, plan_hash="12" * 16, table="cd" * 16, answered="2024-01-01T00:00:00Z",
    where="a < 2", question=Question(kind="rho", amount=5), drop=True, allotment="ef" * 16,
)  # fmt: skip


def committed(receipt: bytes) -> Answer:
    return Answer(HEADER.run_id, receipt, "digest", True)


def test_a_receipt_is_read_again() -> None:
    receipt = encoded(HEADER, ROWS)
    answer = decoded(committed(receipt), True)
    assert answer.header == HEADER == header_of(receipt, Header) and answer.table == ROWS
    assert (answer.value, answer.sd, answer.interval) == (3.0, 1.0, (1.0, 5.0))
    assert answer.charged and answer.insecure and answer.receipt == receipt


def test_receipts_that_are_refused() -> None:
    question = Question(kind="epsilon", amount=5, aggregates=(COUNT, sum_of("b")))
    header = msgspec.structs.replace(HEADER, question=question)
    several = decoded(committed(encoded(header, ROWS)), False)
    cells = decoded(committed(encoded(HEADER, pa.concat_tables([ROWS, ROWS]))), False)
    receipt = encoded(HEADER, ROWS)
    cuts = {f"cut at {cut}": receipt[:cut] for cut in (0, 3, 8, 40, -60)}
    calls: dict[str, Callable[[], object]] = {
        **{name: partial(decoded, committed(data), False)
           for name, data in {**cuts, "another byte": b"x" + receipt[1:]}.items()},
        "a value of several": lambda: several.value, "a value of cells": lambda: cells.sd,
    }  # fmt: skip
    check(Path(__file__).with_name("refusals_receipts.txt"), of_refusals(calls))


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    return made(tmp_path, monkeypatch)


def test_a_ticket_says_what_was_paid_and_is_of_its_key(
    table: Made, tmp_path: Path, refused: Refused
) -> None:
    parts = read_manifest(table.folder, table.table).parts
    with secret_file(tmp_path).ring() as keys:
        data, name = ticket_of(table.table, parts, table.question(), table.boxes, RUN, keys)
        ticket, again = opened(data, keys)
        assert name == again and name.encode() in data
        _, other = ticket_of(table.table, parts, table.question(), table.boxes, "6b" * 16, keys)
        assert other != name  # of the same records
        _, fewer = ticket_of(table.table, parts[1:], table.question(), table.boxes, RUN, keys)
        assert fewer != name
        assert (ticket.boxes == table.boxes).all() and ticket.run_id == RUN
        assert ticket.table == table.table and ticket.table.digest == table.table.digest
        assert ticket.question == table.question() and ticket.parts == parts
        assert KEY.encode() not in data
        changed = data.replace(b'"amount":700000', b'"amount":700001')
        assert changed != data
        for bad in (changed, data[:-5] + b"00000", b"", b"\n", data[1:]):
            refused(opened, bad, keys)
        # A form that this program does not know, of the right key.
        text = msgspec.json.encode({"form": 2})
        sealed = text + b"\n" + keys.source_fingerprint([b"session ticket", text]).encode()
        refused(opened, sealed, keys)
    with KeyRing(bytearray(range(32))) as stranger:
        refused(opened, data, stranger)


def test_a_question_has_one_ticket(session: Session, tmp_path: Path, refused: Refused) -> None:
    request = session.where("epsilon >= 1").request((COUNT,), 0.5, {"a": None})
    out = tmp_path / "ticket"
    paid = hand_out(session.open_table, request, out)
    assert paid.charged and out.stat().st_mode & 0o777 == 0o600
    ticket, name = opened(out.read_bytes(), session.open_table.ring)
    [(run_id, charge)] = session.open_table.account.history()
    assert ticket.run_id == paid.run_id == run_id
    assert ticket.boxes.tolist() == charge.read.tolist()
    committed = session.open_table.answers.read(paid.run_id)
    assert committed is not None and ticket_name(committed.receipt) == name
    before = out.read_bytes()
    one_more(session, tmp_path)
    assert not hand_out(session.open_table, request, out).charged and out.read_bytes() == before
    # A second ticket, of other records, would be a second answer of one charge.
    refused(hand_out, session.open_table, request, tmp_path / "second")
    refused(lambda: session.where("epsilon >= 1").histogram("a", 0.5))
    assert [line.what for line in transcript(session.open_table)] == ["ticket"]
    refused(lambda: session.where("epsilon >= 1").union())


def cut_off(session: Session, request: SessionRequest, out: Path, when: str) -> None:
    """Killed at the commit, before or behind it."""
    commit = AnswerLog.commit

    def dies(register: AnswerLog, *committed: Any) -> None:
        if when == "behind":
            commit(register, *committed)
        raise KeyboardInterrupt

    with mock.patch.object(AnswerLog, "commit", dies), pytest.raises(KeyboardInterrupt):
        hand_out(session.open_table, request, out)
    assert not out.exists()


def one_more(session: Session, folder: Path) -> None:
    (folder / "more.csv").write_text(RECORDS.splitlines()[0] + "\nx,1,1,2.0,0.5\n")
    add(session.open_table.config, [folder / "more.csv"])


@pytest.mark.parametrize("when", ["before", "behind"])
def test_whoever_is_cut_off_at_the_commit_goes_on_with_the_draft(
    session: Session, tmp_path: Path, when: str
) -> None:
    request, out = session.where("epsilon >= 1").request((COUNT,), 0.5), tmp_path / "ticket"
    cut_off(session, request, out, when)
    [draft] = tmp_path.glob("*.draft")
    written = draft.read_bytes()
    one_more(session, tmp_path)
    assert not hand_out(session.open_table, request, out).charged and out.read_bytes() == written
    assert not draft.exists() and out.stat().st_mode & 0o777 == 0o600


def test_no_ticket_is_left_beside_an_answer_of_other_records(
    session: Session, tmp_path: Path, refused: Refused
) -> None:
    where, out = session.where("epsilon >= 1"), tmp_path / "ticket"
    cut_off(session, where.request((COUNT,), 0.5), out, "before")
    one_more(session, tmp_path)
    assert not where.count(0.5).charged
    refused(lambda: hand_out(session.open_table, where.request((COUNT,), 0.5), out))
    assert not [*tmp_path.glob("ticket*")]


def test_what_was_answered_is_not_handed_out(
    session: Session, tmp_path: Path, refused: Refused
) -> None:
    session.where("epsilon >= 1").count(0.5)
    request = session.where("epsilon >= 1").request((COUNT,), 0.5)
    refused(hand_out, session.open_table, request, tmp_path / "ticket")
    assert hand_out(session.open_table, request._replace(fresh=True), tmp_path / "other").charged


def test_another_file_stays(session: Session, tmp_path: Path, refused: Refused) -> None:
    out = tmp_path / "mine"
    out.write_text("mine")
    request = session.where("epsilon >= 1").request((COUNT,), 0.5)
    refused(hand_out, session.open_table, request, out)
    assert out.read_text() == "mine" and session.open_table.account.history() == []


def test_parts_of_batches_and_questions_are_added_up(session: Session) -> None:
    rich = session.where("epsilon >= 1 AND b IS NOT NULL")
    cells = rich.grid({"a": None}, 0.25, (COUNT, sum_of("b"))).table
    one = rich.where("a = 3").count(0.5)
    entries = len(session.open_table.account.history())
    union = session.where("a >= 1 AND epsilon >= 1 AND b IS NOT NULL").union()
    counts, sds = (cells[name].to_numpy() for name in ("count", "count_sd"))
    # The part of the larger budget has less noise.
    assert one.value is not None and one.sd is not None
    assert union.value == pytest.approx(counts[1] + counts[2] + one.value)
    assert union.sd == pytest.approx(np.sqrt(sds[1] ** 2 + sds[2] ** 2 + one.sd**2))
    assert union.low < union.value < union.high and union.parts == 3
    assert len(union.run_ids) == 2 and union.first <= union.last
    total = session.where("epsilon >= 1 AND b IS NOT NULL").union(sum_of("b"))
    assert total.value == pytest.approx(cells["sum_b"].to_numpy().sum())
    assert len(session.open_table.account.history()) == entries  # free


def test_only_answers_that_read_some_of_it_are_looked_up(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    for a in range(3):
        session.where(f"epsilon >= 1 AND a = {a}").count(0.25)
    looked, read = list[str](), session.open_table.answers.read

    def noting(run_id: str) -> Any:
        looked.append(run_id)
        return read(run_id)

    monkeypatch.setattr(session.open_table.answers, "read", noting)
    union = session.where("epsilon >= 1 AND a >= 1 AND a < 3").union()
    assert tuple(looked) == union.run_ids and len(looked) == 2


def test_an_allotment_is_no_part_of_it(session: Session, refused: Refused) -> None:
    """Its receipt is empty: what was drawn on it is."""
    points = session.where("a = 1 AND epsilon >= 1")
    allotment = points.as_pinq(0.5)
    refused(points.union)
    drawn = allotment.count(0.25)
    assert points.union().run_ids == (drawn.header.run_id,)


def test_what_is_not_covered_is_named(session: Session) -> None:
    part = session.where("epsilon >= 1 AND a < 2")
    part.count(0.5)
    calls: dict[str, Callable[[], object]] = {
        "more": lambda: session.where("epsilon >= 1").union(),
        "a part of an answer": lambda: session.where("epsilon >= 1 AND a < 1").union(),
        "another figure": lambda: part.union(sum_of("b")),
        "an average": lambda: part.union(average("b")),
        "nobody": lambda: session.where("a < 0").union(),
        "no budget": lambda: session.where("epsilon < 0.25 AND rho < 0.25").union(),
    }
    check(Path(__file__).with_name("refusals_unions.txt"), of_refusals(calls))


def test_points_without_a_budget_are_not_missed(session: Session, refused: Refused) -> None:
    """No question can ask them, so no answer has them; those with the other budget are asked."""
    poor = session.where("rho < 0.25")
    answer = poor.count(0.25)
    again = poor.union()
    assert (again.value, again.run_ids) == (answer.value, (answer.header.run_id,))
    session.table.count(0.25, drop=True)
    refused(session.table.union)


def test_answers_that_overlap_are_not_added(session: Session, refused: Refused) -> None:
    session.where("epsilon >= 1 AND a < 3").count(0.25)
    session.where("epsilon >= 1 AND a >= 1").count(0.25)
    refused(lambda: session.where("epsilon >= 1").union())
    session.where("epsilon >= 1 AND a = 0").count(0.25)
    assert session.where("epsilon >= 1").union().parts == 2


def test_cells_of_many_answers_one_of_which_fills_the_rest(session: Session) -> None:
    """Answers that overlap each other in all ways: a cover is disjoint, complete and adds up."""
    rich = session.where("epsilon >= 1 AND b IS NOT NULL")
    for low in range(4):
        for high in range(low + 1, 5):
            session.where(f"epsilon >= 1 AND b IS NOT NULL AND a >= {low} AND a < {high}").count(
                0.02 + 0.01 * low
            )
    grid = rich.grid({"a": None}, 0.25).table
    union = rich.union()
    assert union.parts == 4 and len(union.run_ids) == 1
    assert union.value == pytest.approx(grid["count"].to_numpy().sum())
    assert union.sd == pytest.approx(np.sqrt((grid["count_sd"].to_numpy() ** 2).sum()))


def test_with_drop_it_is_what_was_read_that_counts(session: Session, refused: Refused) -> None:
    session.where("a < 2").count(0.5, drop=True)
    refused(lambda: session.where("a < 2").union())
    assert session.where("a < 2 AND epsilon >= 0.5").union().parts == 1


def test_intervals_of_sums_cover() -> None:
    """Sums of Laplace noise, at least 94.5% of 20,000 (95% less 5 sd of the frequency)."""
    rng = np.random.default_rng(5)
    scales = np.array([1.0, 2.0, 2.0, 5.0, 20.0])
    for chosen in (scales[:1], scales[:3], scales):
        noise = rng.laplace(0, chosen, (20_000, len(chosen)))
        parts = [Part(np.zeros((1, 1, 2), np.int64), 1, 0.0, np.sqrt(2) * s, np.log(20) * s,
                      "2024", "a") for s in chosen]  # fmt: skip
        union = joined(parts)
        share = (np.abs(noise.sum(axis=1)) <= union.high).mean()
        assert share >= 0.95 - 5 * np.sqrt(0.05 * 0.95 / 20_000)
        narrow = np.abs(noise.sum(axis=1)) <= union.high / 2
        assert narrow.mean() < 0.9  # the check can fail
