"""Tickets: what was paid, and nobody's but the key's."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.accounting.sessions.aggregates import COUNT
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.pipelines.session.ask import SessionRequest
from dpstream.pipelines.session.overview import transcript
from dpstream.pipelines.session.receipt import ticket_name
from dpstream.pipelines.session.records.load import add
from dpstream.pipelines.session.records.manifest import read_manifest
from dpstream.pipelines.session.session import Session
from dpstream.pipelines.session.ticket import hand_out, opened, ticket_of
from dpstream.state.ledger.answers import AnswerLog
from tests.pipelines.session.batching import KEY, RUN, Made, made, secret_file
from tests.pipelines.session.small import RECORDS, config_at


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    return made(tmp_path, monkeypatch)


def test_a_ticket_says_what_was_paid_and_is_of_its_key(table: Made, tmp_path: Path) -> None:
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
            with pytest.raises(PolicyError, match="secret"):
                opened(bad, keys)
        # A form that this program does not know, of the right key.
        text = msgspec.json.encode({"form": 2})
        sealed = text + b"\n" + keys.source_fingerprint([b"session ticket", text]).encode()
        with pytest.raises(PolicyError, match="secret"):
            opened(sealed, keys)
    with KeyRing(bytearray(range(32))) as stranger, pytest.raises(PolicyError, match="secret"):
        opened(data, stranger)


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    with Session(config_at(tmp_path), analyst="alice") as session:
        yield session


def test_a_question_has_one_ticket(session: Session, tmp_path: Path) -> None:
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
    with pytest.raises(PolicyError, match="not the one"):
        hand_out(session.open_table, request, tmp_path / "second")
    with pytest.raises(PolicyError, match="handed out as a ticket"):
        session.where("epsilon >= 1").histogram("a", 0.5)
    assert [line.what for line in transcript(session.open_table)] == ["ticket"]
    with pytest.raises(PolicyError, match="disjoint parts"):
        session.where("epsilon >= 1").union()


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
    session: Session, tmp_path: Path
) -> None:
    where, out = session.where("epsilon >= 1"), tmp_path / "ticket"
    cut_off(session, where.request((COUNT,), 0.5), out, "before")
    one_more(session, tmp_path)
    assert not where.count(0.5).charged
    with pytest.raises(PolicyError, match="not the one"):
        hand_out(session.open_table, where.request((COUNT,), 0.5), out)
    assert not [*tmp_path.glob("ticket*")]


def test_what_was_answered_is_not_handed_out(session: Session, tmp_path: Path) -> None:
    session.where("epsilon >= 1").count(0.5)
    request = session.where("epsilon >= 1").request((COUNT,), 0.5)
    with pytest.raises(PolicyError, match="not the one"):
        hand_out(session.open_table, request, tmp_path / "ticket")
    assert hand_out(session.open_table, request._replace(fresh=True), tmp_path / "other").charged


def test_another_file_stays(session: Session, tmp_path: Path) -> None:
    out = tmp_path / "mine"
    out.write_text("mine")
    request = session.where("epsilon >= 1").request((COUNT,), 0.5)
    with pytest.raises(UsageError, match="something else"):
        hand_out(session.open_table, request, out)
    assert out.read_text() == "mine" and session.open_table.account.history() == []
