"""Charges: their texts, the chain, and the book of a data set."""

import hashlib

import msgspec
import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.state.ledger.charges import Book, Charge, chained
from tests.state.ledger.conformance import LIMIT, charge


def test_a_text_is_read_as_it_was_written() -> None:
    one = msgspec.structs.replace(charge(1), mu=None, rho=0.1, epoch=2, periods=None)
    assert Charge.read(one.text) == one and one.name == f"{one.run_id}/2"
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
    text = charge(1).text
    assert old in text
    with pytest.raises(PolicyError, match="of another form"):
        Charge.read(text.replace(old, new, 1))


def test_the_chain_covers_data_set_text_and_the_entry_before() -> None:
    parts = ("00", "flights", "{}")
    digest = hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()
    assert chained(*parts) == digest  # as every program has computed it
    assert len({chained(*p) for p in (parts, ("01", *parts[1:]), ("00", "x", "{}"), ("00", "flights", ""))}) == 4  # fmt: skip  # noqa: E501


def test_a_book_takes_back_what_was_not_committed() -> None:
    book = Book()
    for run in (1, 2, 3):
        book.add(charge(run))
    assert book.find(charge(2).name) == charge(2) and book.find("x") is None
    assert not book.account.within([charge(4, 4.0)], *LIMIT)
    book.cut(3)
    assert len(book.charges) == 3
    book.cut(1)
    assert book.charges == [charge(1)] and book.find(charge(2).name) is None
    assert book.account.within([charge(4, 4.0)], *LIMIT)
