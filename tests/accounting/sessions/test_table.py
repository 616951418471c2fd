"""The public model of a table: what its digest covers, and what it refuses."""

from fractions import Fraction
from typing import Any

import msgspec
import pytest

from dpstream.accounting.errors import UsageError
from dpstream.accounting.regions.space import Budget, Category, Integer, Real, Timestamp
from dpstream.accounting.sessions.table import (
    AnyDimension,
    Quotas,
    Rules,
    SessionTable,
    Unlock,
    quota_of,
)

AGE = Integer(name="age", low=0, high=100, grid=5)
FARE = Real(name="fare", low=0, high=99.9, step=0.1, missing="point")
CITY = Category(name="city", codes=("A", "B"))
WHEN = Timestamp(name="when", low=0, high=86_400_000_000)
INITIAL = Budget(name="initial", most=1.5)
RHO = Budget(name="rho", kind="rho", most=0.5, step=10)


def rides(*dimensions: AnyDimension, name: str = "rides", cap: int = 10_000) -> SessionTable:
    return SessionTable(
        name=name, dimensions=dimensions or (AGE, FARE, CITY, WHEN, INITIAL, RHO), cap=cap
    )


def test_the_digest_is_that_of_the_first_version() -> None:
    """Ledgers name it: it must never move."""
    assert rides().digest == "bb80f9f9687fe46b879fb0b1ee65b3ae"


def test_equal_numbers_are_one_table() -> None:
    alike = msgspec.structs.replace(FARE, low=0.0, high=99.90, step=0.10)
    budget = msgspec.structs.replace(INITIAL, most="1.50")
    assert rides(AGE, alike, CITY, WHEN, budget, RHO).digest == rides().digest


CHANGES: list[tuple[int, dict[str, Any]]] = [
    (0, {"name": "years"}), (0, {"low": 1}), (0, {"high": 99}), (0, {"grid": 6}),
    (0, {"missing": "point"}), (1, {"low": 0.1}), (1, {"high": 100.0}), (1, {"step": 0.3}),
    (2, {"codes": ("B", "A")}), (3, {"low": 1}), (3, {"high": 86_400_000_001}), (3, {"step": 5}),
    (4, {"most": 1.6}), (4, {"step": 2}), (5, {"most": 0.6}),
]  # fmt: skip


@pytest.mark.parametrize(("place", "change"), CHANGES)
def test_whatever_is_fixed_of_a_dimension_moves_the_digest(
    place: int, change: dict[str, Any]
) -> None:
    changed = list(rides().dimensions)
    changed[place] = msgspec.structs.replace(changed[place], **change)
    assert rides(*changed).digest != rides().digest


def test_whatever_is_fixed_of_the_table_moves_the_digest() -> None:
    order = rides(FARE, AGE, CITY, WHEN, INITIAL, RHO)
    fewer = rides(AGE, FARE, CITY, WHEN, INITIAL)
    for other in (rides(name="flights"), rides(cap=9_999), order, fewer):
        assert other.digest != rides().digest


def test_it_is_written_and_read_again() -> None:
    text = msgspec.json.encode(rides())
    again = msgspec.json.decode(text, type=SessionTable)
    assert again == rides() and again.digest == rides().digest and again.space == rides().space


def test_its_unit_is_a_record() -> None:
    assert rides().identity.description == "record of rides (string), all records"
    assert rides().identity != rides(name="flights").identity


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: rides(name=""), "printable"),
        (lambda: rides(name="a\nb"), "printable"),
        (lambda: rides(cap=0), "1 to"),
        (lambda: rides(cap=1_000_000), "1 to"),
        (lambda: rides(AGE), "initial budget"),
        (lambda: rides(AGE, AGE, INITIAL), "different names"),
    ],
)
def test_what_is_no_table(make: object, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make()  # type: ignore[operator]


DAY = 86_400_000_000


def test_quotas_are_of_a_name_or_of_all_others() -> None:
    quotas = Quotas(epsilon={"ann": 5}, default_epsilon=2, rho={"bob": 7})
    assert [quotas.of("epsilon", who) for who in ("ann", "bob", "cyd")] == [5, 2, 2]
    assert [quotas.of("rho", who) for who in ("ann", "bob")] == [None, 7]
    assert Rules().quotas.of("epsilon", "ann") is None


def test_a_quota_is_rounded_down() -> None:
    assert quota_of("0.0000019") == 1 and quota_of(0) == 0
    with pytest.raises(UsageError, match="quota"):
        quota_of(-1)


def test_so_much_more_every_whole_day() -> None:
    unlock = Unlock(start=5 * DAY, share="0.3")
    amounts = [
        unlock.usable(at) for at in (0, 5 * DAY - 1, 5 * DAY, 6 * DAY - 1, 6 * DAY, 90 * DAY)
    ]
    tenth = Fraction(1, 10)
    assert amounts == [0, 0, 3 * tenth, 3 * tenth, 6 * tenth, 1]
    assert Unlock(start=0, share=0.1).usable(8 * DAY) == 9 * tenth


def test_millionths_are_rounded_down() -> None:
    rules = Rules(unlock=Unlock(start=0, share="0.0000009"))
    assert rules.usable(0) == 0 and rules.usable(DAY) == 1 and rules.usable(3 * DAY) == 3
    assert Rules().usable(-1) == 1_000_000 == Rules(unlock=Unlock(start=0, share=1)).usable(0)


@pytest.mark.parametrize("share", [0, -0.1, 1.01, "nan", "many"])
def test_a_share_that_is_none(share: float) -> None:
    with pytest.raises(UsageError, match="share"):
        Unlock(start=0, share=share)
