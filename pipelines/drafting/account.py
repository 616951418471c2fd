"""The data set of a first job, and the account of a new data set: one that is there, or a new one.

Two accounts of the same people are two budgets, and what is published of both adds up.  So whoever
begins a job sees the data sets and the accounts that exist, and chooses.
"""

import contextlib
import os
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from dpstream.accounting.errors import DpstreamError, UsageError
from dpstream.accounting.fields import Field, FieldType
from dpstream.pipelines.drafting.ask import Person
from dpstream.pipelines.project.data_sets import account_of
from dpstream.pipelines.project.project import Project, free_name, is_name
from dpstream.state.ledger.events import Created, Limit
from dpstream.state.ledger.open import (
    create_account,
    file_of,
    history_of,
    open_path,
    place_below,
    read_ledger,
)

#: Data set, unit, its type, and limit (``None``: each record has a budget of its own).
Wanted = tuple[str, str, FieldType, Limit | None]
_HEADER = b"SQLite format 3\0"


def chosen_data_set(
    project: Project | None, given: str | None, person: Person, unit: Field, proposal: str
) -> tuple[str, bool]:
    """Name of the data set of a first job, and whether the project file has it.

    Args:
        given: of ``--data-set``; person: who is asked where the file has data sets and no name is
            given; proposal: a name for a new one.

    Raises:
        UsageError: the name is not usable, the unit is of another type, or nobody can be asked.
    """
    sections = {} if project is None else project.sections.data_set
    there = {name: section.unit for name, section in sections.items() if section.unit is not None}
    new = free_name(proposal, sections)
    if given is None and there:
        listed = "; ".join(f"{name}, unit {u.name} ({u.type})" for name, u in there.items())
        if person.ask is None:
            raise UsageError(
                "--data-set",
                f"is required, because the project file has data sets: {listed}",
                "name one of them for the same people, or a new name for others",
            )
        person.show(f"Data sets that are there: {listed}")
        given = person.answer("--data-set", None, "Data set (its name, or a new one)", new, str)
    name = new if given is None else given
    if not is_name(name):
        raise UsageError("--data-set", "is not a usable name", "use letters, digits, _ and -")
    if name not in sections:
        return name, False
    if name not in there:
        raise UsageError(
            "--data-set", "has records with budgets of their own, and no unit", f"name it {new}"
        )
    if there[name].type != unit.type:
        raise UsageError(
            "--data-set",
            f"is of the unit {there[name].name} ({there[name].type}), and --unit is of type "
            f"{unit.type}",
            "name another data set, or another column",
        )
    return name, True


def own_accounts(project: Project | None) -> set[str]:
    """Places of the accounts that the project file names."""
    if project is None:
        return set()
    named = (n for n, section in project.sections.data_set.items() if section.account is not None)
    return {account_of(project, name, to_make=True).path for name in named}


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
    account = history_of(read_ledger(path))
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
    without: Collection[str] = (),
) -> str | None:
    """Path or URL of the account to charge; ``None``: a new one.

    Args:
        folder: of the file that names it; person: who is asked where there are accounts.
        account, new_account: what the flags say; wanted: data set, unit, type and limit of the
            account that would be made; without: accounts that the file names already.

    Raises:
        UsageError: both flags are given; or there are accounts, no flag, and nobody to ask.
    """
    if account is not None and new_account:
        raise UsageError("--account", "and --new-account exclude each other", "give one of them")
    if account is not None or new_account:
        return account
    listed = [each for each in accounts_near(folder) if str(each.path) not in without]
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


def taken_account(folder: Path, account: str, unit: Field) -> tuple[str, Created]:
    """An account that is there, as a file of this folder names it, and what it is of.

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
    return seen_from(folder, path), created


def new_account(folder: Path, data_set: str, unit: Field, limit: Limit) -> tuple[str, Created]:
    """A new account in a file of the folder whose name is free.

    Raises:
        DpstreamError: it cannot be made.
    """
    name = free_account(folder, data_set)
    return name, create_account(folder / name, data_set, unit.column, unit.type, limit)


def free_account(folder: Path, data_set: str) -> str:
    """A name for the file of a new account."""
    stems = (f"{data_set}{number}" for number in ("", *range(2, 10_000)))
    names = (f"{stem}.account.db" for stem in stems)
    return next(name for name in names if not (folder / name).exists())


def at(account: str) -> tuple[str, Created]:
    """Path of an account that a flag names, and what it is of.

    Raises:
        DpstreamError: it is none, or cannot be read.
    """
    path = place_below(Path().absolute(), account)
    with contextlib.closing(open_path(path)) as ledger:
        return path, ledger.history().created


def seen_from(folder: Path, path: str) -> str:
    """An account's path as a file of a folder names it; a URL as it is."""
    return path if file_of(path) is None else os.path.relpath(path, folder)
