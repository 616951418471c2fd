"""The account that a first file names: one of those that are there, or a new one.

Two accounts of the same people are two budgets, and what is published of both adds up.  So whoever
begins a job sees the accounts that exist, and chooses.
"""

import contextlib
import os
import tomllib
from pathlib import Path
from typing import NamedTuple

from dpstream.accounting.errors import DpstreamError, UsageError
from dpstream.accounting.plan.fields import Field
from dpstream.pipelines.drafting.ask import Person
from dpstream.pipelines.drafting.draft import ACCOUNT
from dpstream.state.ledger.events import Created, Limit
from dpstream.state.ledger.open import (
    AccountPlace,
    create_account,
    file_of,
    ledger_exists,
    open_path,
    place_below,
    read_ledger,
)

#: Data set, unit, its type, and limit.
Wanted = tuple[str, str, str, Limit]
_HEADER = b"SQLite format 3\0"


class Listed(NamedTuple):
    """An account that is there: its path, what it is of, and how many entries it has."""

    path: Path
    created: Created
    entries: int

    @property
    def line(self) -> str:
        """For people."""
        own = self.created
        unit = f"unit {own.unit} ({own.type})"
        return f"{os.path.relpath(self.path)}  data set {own.data_set}, {unit}, id {own.id}"


def accounts_near(folder: Path) -> list[Listed]:
    """Accounts in files of a folder and of its parents up to the repository's root.

    Without a repository only the folder itself is looked at.
    """
    folders = [folder, *folder.parents]
    root = next((n for n, each in enumerate(folders) if (each / ".git").exists()), 0)
    listed = list[Listed]()
    for each in folders[: root + 1]:
        for path in sorted(each.glob("*.db")):
            with contextlib.suppress(DpstreamError, OSError):
                if path.is_file() and _starts(path):
                    entries = read_ledger(path)
                    if isinstance(event := entries[0].event, Created):
                        listed.append(Listed(path, event, len(entries)))
    return listed


def _starts(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(len(_HEADER)) == _HEADER


def chosen_account(
    out: Path, person: Person, account: str | None, new_account: bool, wanted: Wanted
) -> str | None:
    """Path or URL of the account to charge; ``None``: a new one.

    A file that is replaced goes on with its account.

    Args:
        out: the file that names it; person: who is asked where there are accounts.
        account, new_account: what the flags say; wanted: data set, unit, type and limit of the
            account that would be made.

    Raises:
        UsageError: both flags are given; or there are accounts, no flag, and nobody to ask.
    """
    if account is not None and new_account:
        raise UsageError("--account", "and --new-account exclude each other", "give one of them")
    if account is not None or new_account:
        return account
    if (named := _named_by(out)) is not None:
        return named
    listed = accounts_near(out.parent)
    for each in listed:  # made for this very job by a command that was cut off, and not used since
        own = each.created
        if each.entries == 1 and (own.data_set, own.unit, own.type, own.limit) == wanted:
            return str(each.path)
    if not listed:
        return None
    if person.ask is None:
        raise UsageError(
            "--account",
            "is required, because accounts are there already: " + "; ".join(a.line for a in listed),
            "add --account PATH to charge one of them, or --new-account for data of other people",
        )
    numbers = {str(number): str(each.path) for number, each in enumerate(listed, 1)}

    def read(text: str) -> str | None:
        if text != "new" and text not in numbers:
            raise UsageError("--account", "is none of them", "type a number, or new")
        return numbers.get(text)

    lines = [f"  {number}  {each.line}" for number, each in enumerate(listed, 1)]
    person.show("\n".join(["Accounts that are there:", *lines]))
    return person.answer("--account", None, "Account to charge (a number, or new)", None, read)


def _named_by(out: Path) -> str | None:
    """Path of the account that a file names, if there is a file and an account."""
    try:
        path = tomllib.loads(out.read_text(encoding="utf-8"))["ledger"]["path"]
        place = place_below(out.parent, path)
        return place if ledger_exists(place) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def account_of(
    named: str | None, folder: Path, unit: Field, data_set: str, limit: Limit
) -> tuple[AccountPlace, str]:
    """The account that was chosen, made if it is a new one, and words about its limit.

    Raises:
        DpstreamError: it is of another type of unit, cannot be read, or cannot be made.
    """
    if named is not None:
        return _taken(folder, named, unit), "the limit that it has"
    return _made(folder, unit, data_set, limit), f"epsilon {limit[0]:g} at delta {limit[1]:g}"


def _taken(folder: Path, account: str, unit: Field) -> AccountPlace:
    """An account that is there, as a file of this folder names it.

    Raises:
        UsageError: it is of another type of unit; DpstreamError: it is none, or cannot be read.
    """
    path = place_below(Path().absolute(), account)
    with contextlib.closing(open_path(path)) as ledger:
        created = ledger.book().created
    if created.type != unit.type:
        raise UsageError(
            "--account",
            f"is of the unit {created.unit} ({created.type}), and --unit is of type {unit.type}",
            "--new-account, or another column",
        )
    own = None if created.unit == unit.column else created.unit
    named = path if file_of(path) is None else os.path.relpath(path, folder)
    return AccountPlace(named, created.data_set, created.id, own)


def _made(folder: Path, unit: Field, data_set: str, limit: Limit) -> AccountPlace:
    """A new account in a file of the folder whose name is free.

    Raises:
        DpstreamError: it cannot be made.
    """
    stems = (f"{data_set}{number}-" for number in ("", *range(2, 10_000)))
    names = (ACCOUNT, *(f"{stem}{ACCOUNT}" for stem in stems))
    name = next(name for name in names if not (folder / name).exists())
    made = create_account(folder / name, data_set, unit.column, unit.type, limit)
    return AccountPlace(name, data_set, made.id)
