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
from dpstream.accounting.plan.fields import Field, FieldType
from dpstream.pipelines.drafting.ask import Person
from dpstream.pipelines.drafting.draft import ACCOUNT
from dpstream.state.ledger.events import Created, Limit
from dpstream.state.ledger.open import (
    AccountPlace,
    book_of,
    create_account,
    file_of,
    ledger_exists,
    open_path,
    place_below,
    read_ledger,
)

#: Data set, unit, its type, and limit (``None``: each record has a budget of its own).
Wanted = tuple[str, str, FieldType, Limit | None]
_HEADER = b"SQLite format 3\0"


class Listed(NamedTuple):
    """An account that is there: its path, what it is of, and how many entries it has."""

    path: str | Path
    created: Created
    entries: int

    def made_for(self, wanted: Wanted) -> bool:
        """Whether it was made for what is wanted by a command that was cut off, and not used."""
        own = self.created
        return self.entries == 1 and (own.data_set, own.unit, own.type, own.limit) == wanted

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
                    listed.append(listed_at(path))
    return listed


def listed_at(path: str | Path) -> Listed:
    """The account at a path or URL.

    Raises:
        DpstreamError: it is none, or cannot be read.
    """
    account = book_of(read_ledger(path))
    return Listed(path, account.created, len(account.digests))


def _starts(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(len(_HEADER)) == _HEADER


def chosen_account(
    folder: Path,
    person: Person,
    account: str | None,
    new_account: bool,
    wanted: Wanted,
    named: str | None = None,
) -> str | None:
    """Path or URL of the account to charge; ``None``: a new one.

    Args:
        folder: of the file that names it; person: who is asked where there are accounts.
        account, new_account: what the flags say; wanted: data set, unit, type and limit of the
            account that would be made; named: what is charged without a flag.

    Raises:
        UsageError: both flags are given; or there are accounts, no flag, and nobody to ask.
    """
    if account is not None and new_account:
        raise UsageError("--account", "and --new-account exclude each other", "give one of them")
    if account is not None or new_account:
        return account
    if named is not None:
        return named
    listed = accounts_near(folder)
    for each in listed:
        if each.made_for(wanted):
            return str(each.path)
    if not listed:
        return None
    if person.ask is None:
        raise UsageError(
            "--account",
            "is required, because accounts are there already: " + "; ".join(a.line for a in listed),
            "add --account PATH to charge one of them, or --new-account for other data",
        )
    numbers = {str(number): str(each.path) for number, each in enumerate(listed, 1)}

    def read(text: str) -> str | None:
        if text != "new" and text not in numbers:
            raise UsageError("--account", "is none of them", "type a number, or new")
        return numbers.get(text)

    lines = [f"  {number}  {each.line}" for number, each in enumerate(listed, 1)]
    person.show("\n".join(["Accounts that are there:", *lines]))
    return person.answer("--account", None, "Account to charge (a number, or new)", None, read)


def named_by(out: Path) -> str | None:
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
    path, created = at(account)
    if created.limit is None:
        raise UsageError(
            "--account",
            "is of a table whose records have budgets of their own: they are another privacy unit",
            "--new-account, or an account of this unit",
        )
    if created.type != unit.type:
        raise UsageError(
            "--account",
            f"is of the unit {created.unit} ({created.type}), and --unit is of type {unit.type}",
            "--new-account, or another column",
        )
    own = None if created.unit == unit.column else created.unit
    return AccountPlace(seen_from(folder, path), created.data_set, created.id, own)


def at(account: str) -> tuple[str, Created]:
    """Path of an account that a flag names, and what it is of.

    Raises:
        DpstreamError: it is none, or cannot be read.
    """
    path = place_below(Path().absolute(), account)
    with contextlib.closing(open_path(path)) as ledger:
        return path, ledger.book().created


def seen_from(folder: Path, path: str) -> str:
    """An account's path as a file of a folder names it; a URL as it is."""
    return path if file_of(path) is None else os.path.relpath(path, folder)


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
