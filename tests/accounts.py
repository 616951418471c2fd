"""Accounts of tests: made with a fixed id, so that no byte of a test is drawn.

``write`` takes a file as a person writes it, with the limit that its account is to have, and the
period: it makes the account, and writes the file with the account's id in the limit's place.
"""

import contextlib
import functools
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

import msgspec

from dpstream.accounting.composition import Limit as Filters
from dpstream.accounting.composition import Spend, Total, default_parts
from dpstream.accounting.errors import PolicyError
from dpstream.accounting.fields import FieldType
from dpstream.accounting.periods import Piece, Room, Spent
from dpstream.accounting.plan.unit import UnitIdentity
from dpstream.pipelines.project.text import duration_micros, instant_micros
from dpstream.state.ledger.contract import Ledger
from dpstream.state.ledger.events import RECORD, Charge, Created, Event, Limit, TableNamed
from dpstream.state.ledger.history import History
from dpstream.state.ledger.open import (
    AccountPlace,
    create_account,
    created_of,
    ledger_exists,
    make,
    open_path,
    place_below,
    read_ledger,
)
from dpstream.state.ledger.sqlite import AccountStorage
from dpstream.state.sqlite.database import sqlite3

ID = "0acc0acc0acc0acc"
LIMIT = (4.0, 1e-6)
#: The unit of charges that tests make up.
USER = UnitIdentity("user", "string").text
#: First entries of an account of persons, and of records with budgets of their own.
CREATED = created_of(ID, "flights", UnitIdentity("user", "string"), LIMIT)
RECORDS = created_of(ID, "rides", UnitIdentity(RECORD, "string"), None)


def create(
    path: str | Path, data_set: str, limit: Limit | None = LIMIT, unit: str | UnitIdentity = "user",
    type_: str = "string", id_: str = ID, first: Charge | None = None,
) -> AccountPlace:  # fmt: skip
    """An account, made unless one is there; one that is there gets this limit."""
    assert type_ in get_args(FieldType)
    if not ledger_exists(path):
        if isinstance(unit, str):
            unit = UnitIdentity(unit, type_)  # type: ignore[arg-type]
        make(path, created_of(id_, data_set, unit, limit, first))
    elif limit is not None:
        set_limit(path, limit)
    return AccountPlace(str(path), data_set, id_)


def room(limit: Limit, *spends: Spend) -> Room:
    """The room that some spends leave in an account of persons, whose limit is divided by
    default."""
    unit, filters = UnitIdentity.read(USER), Filters(*limit, default_parts(*limit))
    total = functools.reduce(Total.plus, spends, Total(order=filters.parts.order))
    return Room(filters, Spent(unit, (), (Piece(total),)), unit)


def within(charges: Iterable[Charge], epsilon: float, delta: float) -> bool:
    """Whether an account that is made for persons, with a limit divided by default, accepts some
    charges one after the other."""
    account = History()
    account.add(created_of(ID, "flights", CREATED.unit, (epsilon, delta)), "")
    try:
        return bool(account.check(list(charges)))
    except PolicyError:
        return False


def created(path: str | Path, limit: Limit = LIMIT) -> Created:
    """An account as `dpstream account create` makes it."""
    return create_account(path, "flights", UnitIdentity.read(USER), limit)


def unsynced(ledger: Ledger) -> Ledger:
    """The account in a file, which is not synced: the disk is not what is tested."""
    assert isinstance(ledger.storage, AccountStorage)
    ledger.storage.db.execute("PRAGMA synchronous = OFF")
    return ledger


def shorten(path: str | Path, rows: int) -> None:
    """Make an account's file what it was after its first rows, as a backup of it is."""
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute("DELETE FROM log WHERE number > ?", (rows,))
        last = "(SELECT digest FROM log WHERE number = ?)"
        db.execute(f"UPDATE log SET digest = {last} WHERE number = 0", (rows,))


def set_limit(path: str | Path, limit: Limit) -> None:
    with contextlib.closing(open_path(path)) as ledger:
        ledger.set_limit(limit)


def opened(path: str | Path, data_set: str = "flights", **given: Any) -> Ledger:
    """An account that is made if none is there."""
    if not ledger_exists(path):
        create(path, data_set, **given)
    return open_path(path)


def events(path: str | Path) -> list[Event]:
    return [entry.event for entry in read_ledger(path)] if ledger_exists(path) else []


def charges(path: str | Path) -> list[Charge]:
    """Charges of an account; none where there is no account."""
    return [event for event in events(path) if isinstance(event, Charge)]


def undated(charged: Iterable[Charge]) -> list[Charge]:
    """Charges as they were before an account dated them."""
    return [msgspec.structs.replace(charge, at=msgspec.UNSET) for charge in charged]


def write(path: Path, text: str, id_: str = ID) -> None:
    """Write a project file; see the module."""
    with contextlib.suppress(tomllib.TOMLDecodeError):
        text = _with_accounts(path.absolute().parent, tomllib.loads(text), text, id_)
    path.write_text(text, encoding="utf-8")


def _with_accounts(folder: Path, tables: dict[str, Any], text: str, id_: str) -> str:
    """The text of a project file whose data sets' accounts are made: ``account = { path, limit }``
    gets the id in the place of the limit, ``account = { path }`` of records the id."""
    for name, section in tables.get("data_set", {}).items():
        account, unit = section.get("account"), section.get("unit")
        if not isinstance(account, dict) or "id" in account or "path" not in account:
            continue
        limit = account.get("limit")
        line = re.search(rf'(?m)^account = \{{ path = "{re.escape(account["path"])}"(.*)\}}$', text)
        assert line is not None, account
        place = place_below(folder, account["path"])
        if unit is None:
            create(place, name, None, RECORD, "string", id_)
        else:
            assert limit is not None, account
            pair = (limit["epsilon"], limit["delta"])
            create(place, name, pair, _unit(unit, account), id_=id_)
        new = f'account = {{ path = "{account["path"]}", id = "{id_}" }}'
        text = text[: line.start()] + new + text[line.end() :]
    return text


def _unit(unit: dict[str, Any], account: dict[str, Any]) -> UnitIdentity:
    """The privacy unit of an account: with ``covers``, ``time`` and ``start`` per period."""
    plain = UnitIdentity(unit["name"], unit.get("type", "string"))
    if "covers" not in account:
        return plain
    period = duration_micros("covers", account["covers"])
    phase = instant_micros("start", account["start"]) % period
    return UnitIdentity(plain.name, plain.type, account["time"], period, phase)


def of_records(path: str | Path, data_set: str = "people") -> Ledger:
    """The account of a table whose records have budgets of their own."""
    return opened(path, data_set, limit=None, unit=RECORD)


def emptied(path: Path) -> None:
    """The account as it was made, with its limit and tables of now and without a charge."""
    first, limit = events(path)[0], opened(path).history().limit
    tables = [event.id for event in events(path) if isinstance(event, TableNamed)]
    assert isinstance(first, Created)
    path.unlink()
    for head_file in path.parent.glob("dpstream-*.head"):
        head_file.unlink()
    make(path, msgspec.structs.replace(first, limit=limit))
    with contextlib.closing(open_path(path)) as ledger:
        for table in tables:
            ledger.name_table(table)


def of_catalog(catalog: Any, limit: Limit = (1e4, 1e-2)) -> Any:
    """A catalog whose account is made."""
    place, unit = catalog.ledger, catalog.unit
    create(place.path, place.data_set, limit, unit.name, unit.type)
    return catalog
