"""The events of an account: their texts, their chain, and what a program refuses.

Boxes in an entry: packed, read again, and whatever else stands there is refused.  Run ids are
random, and every system draws them in one place.

Charges: their names, and what a program refuses rather than skips.
"""

import base64
import zlib

import msgspec
import numpy as np
import pytest

from dpstream.accounting.errors import PolicyError
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
from tests import accounts
from tests.state.ledger.conformance import charge


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
def test_what_is_none(text: str) -> None:
    assert unpacked("1x1 " + ZEROS).tolist() == [[[0, 0]]]
    with pytest.raises(PolicyError, match="another form"):
        unpacked(text)


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


def test_run_ids_are_128_bits_that_never_come_twice() -> None:
    drawn = {new_run_id() for _ in range(1_000)}
    assert len(drawn) == 1_000 and all(len(bytes.fromhex(name)) == 16 for name in drawn)


def test_an_environment_fixes_no_run_id(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DPSTREAM_RUN_ID", "RUN_ID", "PYTHONHASHSEED"):
        monkeypatch.setenv(name, "22" * 16)
    assert new_run_id() != new_run_id()
