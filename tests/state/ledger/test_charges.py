"""Charges: their names, and what a program refuses rather than skips."""

import msgspec
import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.state.ledger.events import event_of, text_of
from tests.state.ledger.conformance import charge


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
    with pytest.raises(PolicyError, match="of another form"):
        event_of(text.replace(old, new, 1))
