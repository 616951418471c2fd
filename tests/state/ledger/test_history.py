"""An account in memory: its limit, its unit, and events that are taken back."""

import random

import msgspec
import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.accounting.plan.unit import UnitIdentity
from dpstream.state.ledger.events import (
    Closed,
    Created,
    Event,
    LimitChanged,
    Received,
    TableNamed,
)
from dpstream.state.ledger.history import History
from tests import accounts
from tests.state.ledger.conformance import charge

CREATED = Created(accounts.ID, "flights", "user", "string", accounts.LIMIT)
RECORDS = Created(accounts.ID, "rides", "record", "string", None)


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
        account.within([charge(9, 3.0)]),
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


def test_the_limit_is_the_last_that_was_set() -> None:
    assert book_of(CREATED).limit == accounts.LIMIT
    account = book_of(CREATED, LimitChanged((0.5, 1e-6)))
    with pytest.raises(PolicyError, match=r"epsilon 0\.5 at delta .*dpstream account limit"):
        account.check([charge(1, 1.0)])
    book_of(CREATED, LimitChanged((0.5, 1e-6)), LimitChanged((1.5, 1e-6))).check([charge(1, 1.0)])


def test_only_the_accounts_unit_is_charged() -> None:
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
    with pytest.raises(PolicyError, match="records have budgets of their own"):
        records.check([charge(1)])
    with pytest.raises(PolicyError) as caught:
        records.persons_limit()
    assert caught.value.field == "account.limit"
