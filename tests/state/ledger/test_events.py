"""The events of an account: their texts, their chain, and what a program refuses."""

import msgspec
import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.state.ledger.events import (
    Closed,
    Created,
    Event,
    Head,
    LimitChanged,
    Received,
    TableNamed,
    chained,
    event_of,
    is_id,
    name_of,
    text_of,
)
from dpstream.state.run_ids import new_id
from tests.state.ledger.conformance import charge

EVENTS: tuple[Event, ...] = (
    Created("0acc0acc0acc0acc", "flights", "user", "string", (1.0, 1e-6)),
    Created("0acc0acc0acc0acc", "rides", "record", "string", None),
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
    assert name_of(event) == (charge(1).name if event == charge(1) else None)
    with_more = msgspec.json.decode(text)
    for changed in (with_more | {"more": 1}, with_more | {"event": "other"}):
        with pytest.raises(PolicyError, match="another form"):
            event_of(msgspec.json.encode(changed).decode())


def test_ids() -> None:
    ids = {new_id() for _ in range(100)}
    assert len(ids) == 100 and all(map(is_id, ids))
    assert not any(map(is_id, ("", "0acc", "0ACC0ACC0ACC0ACC", "0acc0acc0acc0acg", "a" * 17)))


def test_a_digest_covers_the_one_before_it() -> None:
    one = chained("", text_of(EVENTS[0]))
    assert len(one) == 32
    assert len({one, chained(one, text_of(EVENTS[0])), chained(one, text_of(EVENTS[2]))}) == 3


def test_a_head_is_held_against_an_account() -> None:
    head = Head("id", 3, "digest")
    head.check("id", "digest")
    for id_, digest, field in (
        ("id", None, "account.path"),
        ("id", "other", "account.path"),
        ("no", "digest", "account.id"),
    ):
        with pytest.raises(PolicyError) as caught:
            head.check(id_, digest)
        assert caught.value.field == field
