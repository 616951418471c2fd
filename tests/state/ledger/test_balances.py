"""States of a table's account: any way of reading the same entries makes the same one.

Snapshots: a shorter replay, never another state; torn, edited and foreign ones are not used.

An account in a wider space: what is refused; the rest is a scenario of every kind of account
(`region_conformance.widens`).
"""

import contextlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest

from dpstream.accounting.regions.amounts import CLOSED
from dpstream.accounting.regions.space import Budget, BudgetKind, Category
from dpstream.accounting.sessions.table import Quotas, Rules, SessionTable
from dpstream.state.ledger import balances, regions
from dpstream.state.ledger.balances import Balances, Owner, moved, region_of, widen, widened
from dpstream.state.ledger.events import Charge, RegionCharge, packed
from dpstream.state.ledger.regions import RegionAccount
from dpstream.state.seals import sealed_text
from tests import accounts
from tests.accounting.regions.spaces import amounts_of, some_boxes
from tests.golden.refusals import Refused
from tests.state.ledger.region_conformance import WIDER, Payer, account, order, table

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
    kinds: list[BudgetKind] = ["epsilon", "rho"]
    for kind, others in zip(kinds, reversed(kinds), strict=True):
        mine = [e for e in ENTRIES if e.regions.budget != others]  # type: ignore[union-attr]
        assert same(
            Balances(MODEL, spent={kind: balances.spent[kind]}),
            Balances(MODEL, spent={kind: Balances.first(MODEL).after(mine, "").spent[kind]}),
        )
        assert balances.spent[kind].amounts.max() == CLOSED


def test_an_analysts_own_from_the_start_or_later() -> None:
    owner: Owner = ("epsilon", "ann")
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
def test_entries_of_others(change: dict[str, Any], words: str, refused: Refused) -> None:
    bad = entry(1, **change)
    refused(lambda: region_of(bad, MODEL))
    refused(lambda: Balances.first(MODEL).after([bad], ""))


@pytest.mark.parametrize(
    "boxes",
    [
        MODEL.space.everything[:, :2],
        MODEL.space.everything + 1,
        np.repeat(MODEL.space.everything, 2, 0),
    ],
)
def test_entries_that_do_not_fit(boxes: Any, refused: Refused) -> None:
    for budget, amount in (("epsilon", 1), ("closed", 0)):
        bad = RegionCharge(budget, amount, packed(boxes), packed(boxes), "ann", 0)  # type: ignore
        refused(moved, Balances.first(MODEL).spent["epsilon"], "epsilon", bad)
    free = RegionCharge.of("epsilon", 0, MODEL.space.everything, MODEL.space.everything, "ann", 0)
    refused(lambda: moved(Balances.first(MODEL).spent["epsilon"], "epsilon", free))


RULES = Rules(quotas=Quotas(epsilon={"ann": 9}))


class Place:
    """A ledger, its snapshot, and how many entries were replayed by who opened them last."""

    def __init__(self, folder: Path, data_set: str = "people") -> None:
        folder.mkdir(exist_ok=True)
        self.ledger, self.file, self.data_set = folder / "l.db", folder / "account.npz", data_set

    def open(self) -> Any:
        return accounts.unsynced(accounts.of_records(self.ledger, self.data_set))

    def fill(self, entries: int, seed: int = 0, model: SessionTable | None = None) -> None:
        """Charges, with snapshots on the way."""
        model, rng = model or table(), np.random.default_rng(seed)
        with account(self.open, model=model, snapshot=self.file, rules=RULES) as one:
            boxes = [some_boxes(rng, model.space.sizes) for _ in range(200)]
            for number, box in enumerate(boxes):
                if len(one.history()) < entries and one.plan(order(box, drop=True)).read.size:
                    one.pay(f"{seed} {number}", order(box, drop=True))

    def replayed(self, model: SessionTable | None = None) -> int:
        """Entries that a process replays, whose state must be that of all entries."""
        model, real, calls = model or table(), balances.region_of, list[int]()

        def counted(*given: Any) -> Any:
            calls.append(1)
            return real(*given)

        with contextlib.ExitStack() as opened:
            with mock.patch.object(balances, "region_of", counted):
                mine = account(self.open, model=model, snapshot=self.file)
                snapshot_account = opened.enter_context(mine)
            number = len(calls)
            full_account = opened.enter_context(account(self.open, model=model))
            for kind in ("epsilon", "rho"):
                one, two = snapshot_account.spent(kind), full_account.spent(kind)  # type: ignore[arg-type]
                assert one.boxes.tobytes() == two.boxes.tobytes()
                assert one.amounts.tobytes() == two.amounts.tobytes()
        return number


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(regions, "_EVERY", 8)
    filled_place = Place(tmp_path / "here")
    filled_place.fill(20)
    return filled_place


def test_only_newer_entries_are_replayed(place: Place) -> None:
    assert place.replayed() == 4
    assert stat.S_IMODE(os.stat(place.file).st_mode) == 0o600
    with account(place.open, snapshot=place.file) as snapshot_account:
        mine = snapshot_account.analyst_spent("epsilon", "ann")
        assert (amounts_of(mine) == amounts_of(snapshot_account.spent("epsilon"))).all()
    place.file.unlink()
    assert place.replayed() == 20
    assert place.replayed() == 0  # which wrote a new one


def edited(change: Callable[[dict[str, Any]], None]) -> Callable[[Place], None]:
    """The file with other contents, well formed."""

    def edit(place: Place) -> None:
        with np.load(place.file) as file:
            arrays = {name: file[name].copy() for name in file.files}
        change(arrays)
        with open(place.file, "wb") as out:
            np.savez(out, **arrays)

    return edit


def header(**changes: Any) -> Callable[[dict[str, Any]], None]:
    """Another header under a seal that fits it."""

    def change(arrays: dict[str, Any]) -> None:
        text = arrays["header"].tobytes().decode().partition(" ")[2]
        new = msgspec.json.decode(text) | changes
        sealed = sealed_text("session snapshot", msgspec.json.encode(new).decode())
        arrays["header"] = np.frombuffer(sealed.encode(), np.uint8)

    return change


def less_spent(arrays: dict[str, Any]) -> None:
    arrays["amounts0"] //= 2


def cut_short(place: Place) -> None:
    place.file.write_bytes(place.file.read_bytes()[:-200])


def flipped(place: Place) -> None:
    data = bytearray(place.file.read_bytes())
    data[len(data) // 2] ^= 4
    place.file.write_bytes(data)


def one_array(place: Place) -> None:
    with open(place.file, "wb") as out:
        np.save(out, np.zeros(3))


def edited_header(arrays: dict[str, Any]) -> None:
    text = arrays["header"].tobytes().replace(b'"entries":16', b'"entries":20')
    arrays["header"] = np.frombuffer(text, np.uint8)


@pytest.mark.parametrize(
    "harm",
    [
        cut_short,
        flipped,
        edited(less_spent),
        edited(edited_header),
        edited(lambda arrays: arrays.pop("boxes1")),
        edited(lambda arrays: arrays.update(boxes0=arrays["boxes0"][:, :, :0])),
        edited(lambda arrays: arrays.update(boxes0=np.zeros(3), amounts0=np.zeros(3))),
        edited(header(version=2)),
        edited(header(accounts=[])),
        edited(header(new="field")),
        lambda place: place.file.write_bytes(b""),
        one_array,
        lambda place: place.file.write_bytes(b"PK\3\4 no zip"),
    ],
)
def test_what_is_not_what_was_written_is_replayed(
    place: Place, harm: Callable[[Place], None]
) -> None:
    harm(place)
    assert place.replayed() == 20


def test_another_tables_or_data_sets_is_replayed(place: Place, tmp_path: Path) -> None:
    for name, model, data_set in (
        ("table", table(grid=2), "people"),
        ("set", table(), "others"),
    ):
        foreign = Place(tmp_path / name, data_set)
        foreign.fill(9, 1, model)
        foreign.file.write_bytes(place.file.read_bytes())
        assert foreign.replayed(model) == 9


def test_a_snapshot_of_entries_that_are_gone_is_not_used(place: Place, tmp_path: Path) -> None:
    other = Place(tmp_path / "other")
    other.fill(3)
    for entries in (3, 30):  # an older ledger, or another one that went on
        other.fill(entries, 2)
        other.file.write_bytes(place.file.read_bytes())
        assert other.replayed() == entries
        other.file.unlink()


@pytest.mark.parametrize("change", [{"digest": "0" * 32}, {"name": "0" * 32}, {"entries": 15}])
def test_the_entry_it_names_must_be_there(place: Place, change: dict[str, Any]) -> None:
    edited(header(**change))(place)
    assert place.replayed() == 20


def test_without_the_look_at_the_chain_budget_comes_back(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sabotaged: a snapshot is taken as it is."""
    monkeypatch.setattr(
        regions,
        "read_snapshot",
        lambda path, model, ledger: balances._read_snapshot(path, model, ledger.data_set),
    )
    edited(header(entries=20, name=place.open().entries()[-1].run_id,
                  digest=place.open().head().digest))(place)  # fmt: skip
    with pytest.raises(AssertionError):
        place.replayed()


def test_a_snapshot_that_cannot_be_written_harms_nobody(place: Place) -> None:
    place.file.unlink()
    place.file.mkdir()
    assert place.replayed() == 20
    assert isinstance(RegionAccount(place.open(), table(), snapshot=place.file), RegionAccount)


def test_two_arrays_may_not_change_places(place: Place) -> None:
    def swapped(arrays: dict[str, Any]) -> None:
        for name in ("boxes", "amounts"):
            arrays[f"{name}0"], arrays[f"{name}1"] = arrays[f"{name}1"], arrays[f"{name}0"]

    edited(swapped)(place)
    assert place.replayed() == 20


def test_tables_that_do_not_fit(refused: Refused) -> None:
    wider = SessionTable(name="people", dimensions=WIDER)
    for old, new in ((table(), SessionTable(name="others", dimensions=WIDER)), (table(), table()),
                     (wider, table())):  # fmt: skip
        refused(widened, old, new)
    assert widened(table(), wider).new == wider.digest


def test_the_account_of_another_table(tmp_path: Path, refused: Refused) -> None:
    wider = SessionTable(name="people", dimensions=WIDER)
    with contextlib.closing(accounts.of_records(tmp_path / "ledger.db")) as ledger:
        other = table(grid=2)
        Payer(ledger, other).pay("a", order(other.space.box(initial=("0.000008", None))))
        before = ledger.head()
        refused(lambda: widen(ledger, table(), wider))
        assert ledger.head() == before
        assert widen(ledger, other, wider) == 1
        refused(
            lambda: widen(ledger, other, SessionTable(name="people", dimensions=(*WIDER, MORE)))
        )


MORE = Category(name="more", codes=("x",))


def test_a_charge_that_would_have_too_many_boxes_is_refused_before_it_is_written(
    tmp_path: Path, refused: Refused
) -> None:
    codes = tuple(f"{n:02d}" for n in range(60))
    apart = tuple(part for code in codes for part in (code, f"new {code}"))
    budget = Budget(name="initial", most=1.0)

    def model(of: tuple[str, ...]) -> SessionTable:
        sides = [Category(name=name, codes=of) for name in ("c", "d", "e")]
        return SessionTable(name="people", dimensions=(*sides, budget))

    with contextlib.closing(accounts.of_records(tmp_path / "ledger.db")) as ledger:
        old = model(codes)
        Payer(ledger, old).pay("a", order(old.space.box(initial=(0.5, None))))
        before = ledger.head()
        refused(lambda: widen(ledger, old, model(apart)))
        assert ledger.head() == before
