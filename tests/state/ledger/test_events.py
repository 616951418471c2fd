"""The events of an account: their texts, their chain, and what a program refuses.

Boxes in an entry: packed, read again, and whatever else stands there is refused.  Run ids are
random, and every system draws them in one place.

Charges: their names, and what a program refuses rather than skips.

An account in memory: its limit, its unit, and events that are taken back.

Rules of every account, and who may name a kind of storage.

The register of answers: charged, drawn, committed, seen, in this order and once.
"""

import base64
import contextlib
import random
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dpstream.accounting.composition import epsilon_spent
from dpstream.accounting.errors import PolicyError
from dpstream.accounting.plan.unit import UnitIdentity
from dpstream.state.ledger.contract import Answer, AnswerLog, Begun, Decision, Ledger
from dpstream.state.ledger.events import (
    Charge,
    Closed,
    Event,
    Head,
    LimitChanged,
    Received,
    RegionCharge,
    TableNamed,
    chained,
    is_id,
    new_id,
    new_run_id,
    packed,
    text_of,
    unpacked,
)
from dpstream.state.ledger.history import History
from dpstream.state.ledger.open import created_of
from tests import accounts
from tests.accounting import adversary
from tests.golden.refusals import Refused
from tests.state.ledger.conformance import (
    Asker,
    Draw,
    Open,
    asked_again,
    charge,
    in_a_fork,
    killed,
    two_at_once,
)


def event_of(text: str) -> Event:
    event: Event = msgspec.json.decode(text, type=Event)
    return event


RUN = Charge("run", "plan", "unit", 1.0, 0.0, None, 0.0, "session")


@pytest.mark.parametrize("shape", [(1, 1, 2), (3, 8, 2), (4_096, 16, 2), (0, 2, 2)])
def test_there_and_back(shape: tuple[int, ...]) -> None:
    boxes = np.random.default_rng(0).integers(0, 1 << 40, shape)
    unpacked_boxes = unpacked(packed(boxes))
    assert (
        (unpacked_boxes == boxes).all()
        and unpacked_boxes.dtype == np.int64
        and unpacked_boxes.shape == shape
    )
    assert (unpacked(packed(unpacked_boxes[::-1])) == boxes[::-1]).all()  # the order is kept


def test_a_grid_of_thousands_is_short() -> None:
    grid = np.stack(np.meshgrid(np.arange(64), np.arange(64)), -1).reshape(-1, 2)
    assert len(packed(np.stack([grid, grid + 1], axis=2))) < 4_000


def test_an_entry_without_regions_names_none() -> None:
    assert "regions" not in text_of(RUN) and event_of(text_of(RUN)) == RUN


def test_an_entry_with_regions_is_read_again() -> None:
    boxes = np.array([[[0, 5], [2, 3]]])
    region = RegionCharge.of("rho", 7, boxes, boxes[:0], "ann", 42)
    charge = Charge("run", "plan", "unit", 1.0, 0.0, None, 0.0, "session", rho=7e-6, regions=region)
    again = event_of(text_of(charge))
    assert again == charge and isinstance(again, Charge)
    assert isinstance(again.regions, RegionCharge)
    assert again.regions.boxes.tolist() == boxes.tolist() and not len(again.regions.read)


ZEROS = base64.b64encode(zlib.compress(bytes(16))).decode()


@pytest.mark.parametrize(
    "text",
    [
        "", "1x1", "1x1 ", "x " + ZEROS, "1x2 " + ZEROS, "2x1 " + ZEROS, "-1x-1 " + ZEROS,
        "1x1 " + ZEROS[:-3], "1x1 !" + ZEROS, "1x99 " + ZEROS, "99999999999x16 " + ZEROS,
        "0x0 " + ZEROS, "1x1x1 " + ZEROS,
        "1x1 " + base64.b64encode(zlib.compress(bytes(1 << 20))).decode(),
    ],
)  # fmt: skip
def test_what_is_none(text: str, refused: Refused) -> None:
    assert unpacked("1x1 " + ZEROS).tolist() == [[[0, 0]]]
    refused(lambda: unpacked(text))


def test_a_program_that_knows_less_refuses_the_entry() -> None:
    text = text_of(Charge("r", "p", "u", 1.0, 0.0, None, 0.0, "session"))
    region = '{"amount":1,"analyst":"a","at":0,"budget":"epsilon","charged":"","reads":"","new":1}'
    with pytest.raises(msgspec.MsgspecError):
        event_of(text[:-1] + f',"regions":{region}}}')


def test_a_text_is_read_as_it_was_written() -> None:
    one = msgspec.structs.replace(charge(1), mu=None, rho=0.1, epoch=2, periods=None)
    assert event_of(text_of(one)) == one and one.name == f"{one.run_id}/2"
    assert charge(1).name == charge(1).run_id


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"rho":null', '"rho":null,"regions":[]'),  # a field of a newer program
        ('"kind":"sql"', '"kind":"graph"'),  # a kind of a newer program
        ('"rho":null', '"rho":-1.0'),
        ('"rho":null', '"rho":0.5'),  # with a mu
        ('"epsilon":1.0', '"epsilon":"1"'),
        ("{", ""),
    ],
)
def test_what_is_not_known_is_refused_and_never_skipped(old: str, new: str) -> None:
    text = text_of(charge(1))
    assert old in text
    with pytest.raises(msgspec.MsgspecError):
        event_of(text.replace(old, new, 1))


EVENTS: tuple[Event, ...] = (
    accounts.CREATED,
    accounts.RECORDS,
    LimitChanged((2.0, 1e-6)),
    charge(1),
    Received("run", "digest"),
    Closed(("one", "two")),
    TableNamed("table"),
)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_event_is_read_as_it_was_written(event: Event) -> None:
    text = text_of(event)
    assert event_of(text) == event and text_of(event_of(text)) == text
    with_more = msgspec.json.decode(text)
    for changed in (with_more | {"more": 1}, with_more | {"event": "other"}):
        with pytest.raises(msgspec.MsgspecError):
            event_of(msgspec.json.encode(changed).decode())


def test_ids() -> None:
    ids = {new_id() for _ in range(100)}
    assert len(ids) == 100 and all(map(is_id, ids))
    assert not any(map(is_id, ("", "0acc", "0ACC0ACC0ACC0ACC", "0acc0acc0acc0acg", "a" * 17)))


def test_a_digest_covers_the_one_before_it() -> None:
    one = chained("", text_of(EVENTS[0]))
    assert len(one) == 32
    assert len({one, chained(one, text_of(EVENTS[0])), chained(one, text_of(EVENTS[2]))}) == 3


def test_a_head_is_held_against_an_account(refused: Refused) -> None:
    head = Head("id", 3, "digest")
    head.check("id", "digest")
    for id_, digest, field in (
        ("id", None, "account.path"),
        ("id", "other", "account.path"),
        ("no", "digest", "account.id"),
    ):
        caught = refused(head.check, id_, digest)
        assert caught.field == field


def test_run_ids_are_128_bits_that_never_come_twice() -> None:
    drawn = {new_run_id() for _ in range(1_000)}
    assert len(drawn) == 1_000 and all(len(bytes.fromhex(name)) == 16 for name in drawn)


def test_an_environment_fixes_no_run_id(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DPSTREAM_RUN_ID", "RUN_ID", "PYTHONHASHSEED"):
        monkeypatch.setenv(name, "22" * 16)
    assert new_run_id() != new_run_id()


CREATED, RECORDS = accounts.CREATED, accounts.RECORDS


def book_of(*events: Event) -> History:
    account = History()
    for number, event in enumerate(events, 1):
        account.add(event, str(number))
    return account


def state(account: History) -> object:
    """All that a book answers."""
    return (
        account.entries, account.limit, list(account.charges), set(account.tables),
        set(account.closed),
        dict(account.receipts), account.digest_of(charge(1).name), account.find(charge(2).name),
        account.spent,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_what_is_cut_was_never_there(seed: int) -> None:
    draw = random.Random(seed)
    events: list[Event] = [CREATED]
    for run in range(20):
        choices: list[Event] = [
            charge(run, 0.5), LimitChanged((draw.choice([1.0, 9.0]), 1e-5)),
            Received(str(run), "d"), Closed((str(run),)), TableNamed(str(run)),
        ]  # fmt: skip
        events.append(draw.choice(choices))
    cut = draw.randrange(1, 20)
    account = book_of(*events)
    account.cut(cut)
    assert state(account) == state(book_of(*events[:cut]))
    for number, event in enumerate(events[cut:], cut + 1):
        account.add(event, str(number))
    assert state(account) == state(book_of(*events))


def test_the_first_event_says_what_an_account_is_of() -> None:
    for events in ((), (charge(1),), (CREATED, CREATED)):
        with pytest.raises(PolicyError, match="is damaged"):
            book_of(*events).created  # noqa: B018


def test_the_limit_is_the_last_that_was_set(refused: Refused) -> None:
    assert book_of(CREATED).limit == accounts.LIMIT
    account = book_of(CREATED, LimitChanged((0.5, 1e-6)))
    refused(lambda: account.check([charge(1, 1.0)]))
    book_of(CREATED, LimitChanged((0.5, 1e-6)), LimitChanged((1.5, 1e-6))).check([charge(1, 1.0)])


def test_an_adaptive_analyst_stays_within_the_limit() -> None:
    """The best strategy against the account itself, `tests/accounting/adversary.py`; one of its
    paths used to be 4.7 times the limit's delta."""

    def accepts(charges: list[adversary.Charge]) -> bool:
        made = [
            Charge(f"{n:032x}", "q", accounts.USER, one.epsilon, one.delta, one.mu, 0.0)
            for n, one in enumerate(charges)
        ]
        try:
            checked = book_of(created_of(accounts.ID, "d", CREATED.unit, (1.0, 1e-6))).check(made)
        except PolicyError:
            return False
        return not any(one.takes for one in checked)

    analyst = adversary.Analyst(accepts, 1.0)
    assert 0.7e-6 < analyst.delta(0.158, analyst.on_grid(0.5), 2, 2) <= 1e-6


def test_a_first_charge_takes_the_account_for_good(refused: Refused) -> None:
    sharp = msgspec.structs.replace(charge(1, 4.0), delta=1e-6, threshold_delta=9e-7)
    [first] = book_of(CREATED).check([sharp])
    assert first.takes and not book_of(CREATED).check([charge(1)])[0].takes
    account = book_of(CREATED, first, LimitChanged((50.0, 1e-4)))
    refused(lambda: account.check([charge(2, 0.01)]))
    assert '"takes":true' in text_of(first)


def test_what_a_recovery_brings_back_may_be_over_the_limit(refused: Refused) -> None:
    """Nothing is asked, nothing is promised then, and every further charge is refused."""
    account = book_of(CREATED, charge(1, 3.9), charge(2, 3.9))
    [piece] = account.spent.pieces
    assert piece.over(account.filters)
    for little in (charge(3, 0.001), charge(3, 0.001, kind="table")):
        refused(account.check, [little])


def test_only_the_accounts_unit_is_charged(refused: Refused) -> None:
    other = {
        "unit.name": [
            msgspec.structs.replace(charge(1), identity=UnitIdentity("person", "string").text),
            msgspec.structs.replace(charge(1), identity=UnitIdentity("user", "int").text),
        ],
        "data_set": [charge(1, kind="session")],
    }
    for field, charges in other.items():
        for each in charges:
            with pytest.raises(PolicyError) as caught:
                book_of(CREATED).check([each])
            assert caught.value.field == field
    records = book_of(RECORDS)
    records.check([charge(1, 99.0, kind="session")])
    refused(lambda: records.check([charge(1)]))
    refused(records.persons_limit)


def test_spent_fits_and_check(ledger: Ledger, refused: Refused) -> None:
    ledger.set_limit(accounts.LIMIT)
    for run in (1, 2):
        ledger.charge(charge(run))
    [piece] = ledger.history().spent.pieces
    assert epsilon_spent(piece.total, 1e-6) == epsilon_spent([charge(1), charge(2)], 1e-6)
    ledger.history().check([charge(3)])
    refused(lambda: ledger.history().check([charge(3, 4.4)]))
    refused(lambda: ledger.history().check([charge(3, unit=UnitIdentity("other", "string").text)]))
    assert len(ledger.entries()) == 2


def test_no_caller_names_a_kind_of_ledger() -> None:
    """Another one joins in `state.ledger.open` alone."""
    root = Path(__file__).parents[3]
    inside = root / "state" / "ledger"
    named = re.compile(r"AccountStorage|ledger(?:\.| import )(?:sqlite|spanner|log)\b")
    for package in ("accounting", "state", "dp_transforms", "pipelines"):
        for path in (root / package).rglob("*.py"):
            if path.parent != inside:
                assert not named.search(path.read_text()), path
    assert named.search((inside / "open.py").read_text())


@pytest.fixture
def again(tmp_path: Path) -> Open:
    accounts.create(tmp_path / "ledger.db", "flights")
    return lambda: accounts.opened(tmp_path / "ledger.db")


@pytest.fixture
def ledger(again: Open) -> Iterator[Ledger]:
    with contextlib.closing(again()) as made:
        yield made


def test_a_process_that_is_gone_at_any_point(again: Open) -> None:
    killed(again, Asker, in_a_fork)


class ReadsFirst(Asker):
    """Charges when the answer is known."""

    def answered(self, charge: Charge, request: str, draw: Draw, fresh: bool = False) -> Answer:
        receipt = draw(charge.run_id)
        return super().answered(charge, request, lambda _: receipt)


class ShowsFirst(Asker):
    """Shows what it has drawn, and commits it then."""

    def finish(self, run_id: str, draw: Draw) -> Answer:
        answer = self.read(run_id)
        if answer is not None:
            return answer
        receipt = draw(run_id)
        with contextlib.suppress(BaseException):
            self.commit(run_id, receipt)
        return Answer(run_id, receipt, "", False)


class ShowsItsOwn(Asker):
    """Commits first, and shows what it has drawn rather than what stands."""

    def finish(self, run_id: str, draw: Draw) -> Answer:
        drawn = list[bytes]()

        def draw_once(run_id: str) -> bytes:
            drawn.append(draw(run_id))
            return drawn[-1]

        answer = super().finish(run_id, draw_once)
        return answer._replace(receipt=drawn[0]) if drawn else answer


class ChargesAgain(Asker):
    """Does not look for an answer that was paid for."""

    def find(self, request: str) -> str | None:
        return None


class ForgetsTheKilled(Asker):
    """Looks for answers, not for requests that have none yet."""

    def find(self, request: str) -> str | None:
        run_id = super().find(request)
        return run_id if run_id is not None and self.read(run_id) is not None else None


class TwoTransactions(Asker):
    """Charges and keeps the request one after the other."""

    def begin(
        self,
        request: str,
        decide: Callable[[str, History], Decision],
        fresh: bool = False,
        alike: Sequence[str] = (),
    ) -> Begun:
        if self.find(request) is not None:
            return super().begin(request, decide, fresh, alike)
        charge = decide("", History()).charge
        self._ledger.charge(charge)
        with self._ledger.transaction():
            self._ledger.add_request(charge.run_id, request)
        return Begun(charge.run_id, charge, True, None)


class DrawsAgain(Asker):
    """Commits over what stands."""

    def finish(self, run_id: str, draw: Draw) -> Answer:
        receipt = draw(run_id)
        return super().finish(run_id, draw)._replace(receipt=receipt)


@pytest.mark.parametrize(
    ("sabotaged", "scenario"),
    [
        (ReadsFirst, asked_again),
        (ShowsFirst, killed),
        (ShowsItsOwn, two_at_once),
        (ChargesAgain, asked_again),
        (ForgetsTheKilled, killed),
        (TwoTransactions, killed),
        (DrawsAgain, asked_again),
    ],
)
def test_a_sabotaged_register_is_caught(
    again: Open, sabotaged: type[Asker], scenario: Callable[[Open, type[Asker]], None]
) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        scenario(again, sabotaged)


def test_kinds_are_apart(ledger: Ledger) -> None:
    sql, table = Asker(ledger, "sql"), Asker(ledger, "table")
    first = sql.answered(charge(1), "asked", lambda _: b"rows")
    assert table.find("asked") is None and table.read(first.run_id) is None
    second = table.answered(charge(2, kind="table"), "asked", lambda _: b"cells")
    assert (second.charged, second.receipt) == (True, b"cells")
    assert sql.find("asked") == first.run_id and table.find("asked") == second.run_id
    with pytest.raises(AssertionError, match="question's kind"):
        sql.begin("other", lambda _, __: Decision(charge(3, kind="table")))


def test_the_first_receipt_stays(ledger: Ledger, refused: Refused) -> None:
    register = AnswerLog(ledger, "sql")
    begun = register.begin("asked", lambda _, __: Decision(charge(1)))
    assert begun.charged and register.read(begun.run_id) is None
    register.commit(begun.run_id, b"8")
    register.commit(begun.run_id, b"9")
    answer = register.read(begun.run_id)
    assert answer is not None and answer.receipt == b"8"
    again = register.begin("asked", lambda _, __: Decision(charge(2)))
    assert again == begun._replace(charged=False, receipt=b"8")
    refused(lambda: register.commit(charge(7).run_id, b"8"))
    assert [c.run_id for c in ledger.entries()] == [begun.run_id]


def test_a_receipt_without_a_draw_is_committed_with_its_charge(ledger: Ledger) -> None:
    register = AnswerLog(ledger, "sql")
    begun = register.begin("asked", lambda _, __: Decision(charge(1), b""))
    assert begun.receipt == b"" and register.read(begun.run_id) is not None
    assert register.begin("asked", lambda _, __: Decision(charge(2), b""), True).charged


def test_a_receipt_of_another_charge_is_noticed(again: Open, refused: Refused) -> None:
    """By the digest that binds it to its charge, whatever the log holds."""
    with contextlib.closing(again()) as ledger:
        register = Asker(ledger, "sql")
        first = register.answered(charge(1), "asked", lambda _: b"C = 8")
        register.charged(charge(2), "other")
        with ledger.transaction():
            ledger.add_receipt(charge(2).run_id, first.receipt, first.digest)
    with contextlib.closing(again()) as ledger:
        assert Asker(ledger, "sql").read(charge(1).run_id) is not None
        refused(lambda: Asker(ledger, "sql").read(charge(2).run_id))


def test_only_bytes_that_stand_in_the_ledger_are_large(ledger: Ledger) -> None:
    """A megabyte of rows is an answer like any other, byte for byte."""
    rows = bytes(range(256)) * 4096
    register = Asker(ledger, "sql")
    assert register.answered(charge(1), "asked", lambda _: rows).receipt == rows
    assert register.answered(charge(2), "asked", lambda _: b"").receipt == rows
