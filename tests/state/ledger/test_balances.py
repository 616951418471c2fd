"""States of a table's account: any way of reading the same entries makes the same one."""

from typing import Any

import msgspec
import numpy as np
import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.accounting.regions.amounts import MOST
from dpstream.state.ledger.balances import Balances, moved, region_of
from dpstream.state.ledger.charges import Charge
from dpstream.state.ledger.region_charge import RegionCharge, packed
from tests.accounting.regions.spaces import amounts_of, some_boxes
from tests.state.ledger.region_conformance import table

MODEL = table()


def entry(number: int, budget: Any = "epsilon", analyst: str = "ann", **changes: Any) -> Charge:
    rng = np.random.default_rng(number)
    boxes = some_boxes(rng, MODEL.space.sizes)
    region = RegionCharge.of(budget, 0 if budget == "closed" else 1 + number, boxes, boxes, analyst,
                             1_000 - number)  # fmt: skip
    charge = Charge(f"{number}", MODEL.digest, "", 1.0, 0.0, None, 0.0, "session", regions=region)
    return msgspec.structs.replace(charge, **changes)


ENTRIES = [
    entry(0),
    entry(1, "rho"),
    entry(2, analyst="bob"),
    entry(3, "closed"),
    entry(4),
    entry(5, "rho"),
]


def same(one: Balances, two: Balances) -> bool:
    assert one.spent.keys() == two.spent.keys()
    return all(
        (amounts_of(one.spent[kind]) == amounts_of(two.spent[kind])).all() for kind in one.spent
    )


def test_all_at_once_or_one_after_the_other() -> None:
    first = Balances.first(MODEL)
    batch_balances, step = first.after(ENTRIES, "end"), first
    for number, one in enumerate(ENTRIES):
        step = step.after([one], f"digest {number}")
        assert (step.entries, step.name) == (number + 1, one.name)
    assert same(batch_balances, step) and (
        batch_balances.entries,
        batch_balances.name,
        batch_balances.digest,
    ) == (6, "5", "end")
    assert batch_balances.at == 1_000  # the latest, whatever the order
    assert same(first, Balances.first(MODEL))  # as it was
    assert not same(batch_balances, first.after(ENTRIES[:5], ""))


def test_each_kind_pays_its_own_and_closing_is_for_both() -> None:
    balances = Balances.first(MODEL).after(ENTRIES, "")
    for kind, others in (("epsilon", "rho"), ("rho", "epsilon")):
        mine = [e for e in ENTRIES if e.regions.budget != others]  # type: ignore[union-attr]
        assert same(
            Balances(MODEL, spent={kind: balances.spent[kind]}),
            Balances(MODEL, spent={kind: Balances.first(MODEL).after(mine, "").spent[kind]}),
        )
        assert balances.spent[kind].amounts.max() >= MOST


def test_an_analysts_own_from_the_start_or_later() -> None:
    owner = ("epsilon", "ann")
    early = Balances.first(MODEL).with_own(owner, []).after(ENTRIES, "")
    late = Balances.first(MODEL).after(ENTRIES, "").with_own(owner, ENTRIES)
    assert (amounts_of(early.own[owner]) == amounts_of(late.own[owner])).all()
    without = Balances.first(MODEL).with_own(owner, [e for e in ENTRIES if e.name != "2"])
    assert (amounts_of(without.own[owner]) == amounts_of(late.own[owner])).all()
    assert (amounts_of(late.own[owner]) != amounts_of(late.spent["epsilon"])).any()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "sql"}, "another privacy unit"),
        ({"regions": msgspec.UNSET}, "another privacy unit"),
        ({"plan_hash": "other"}, "another table"),
    ],
)
def test_entries_of_others(change: dict[str, Any], words: str) -> None:
    bad = entry(1, **change)
    with pytest.raises(PolicyError, match=words):
        region_of(bad, MODEL)
    with pytest.raises(PolicyError, match=words):
        Balances.first(MODEL).after([bad], "")


@pytest.mark.parametrize(
    "boxes",
    [
        MODEL.space.everything[:, :2],
        MODEL.space.everything + 1,
        np.repeat(MODEL.space.everything, 2, 0),
    ],
)
def test_entries_that_do_not_fit(boxes: Any) -> None:
    for budget, amount in (("epsilon", 1), ("closed", 0)):
        bad = RegionCharge(budget, amount, packed(boxes), packed(boxes), "ann", 0)  # type: ignore
        with pytest.raises(PolicyError, match="does not fit"):
            moved(Balances.first(MODEL).spent["epsilon"], "epsilon", bad)
    free = RegionCharge.of("epsilon", 0, MODEL.space.everything, MODEL.space.everything, "ann", 0)
    with pytest.raises(PolicyError, match="does not fit"):
        moved(Balances.first(MODEL).spent["epsilon"], "epsilon", free)
