"""Opening of the account that a job names: the only module that imports all kinds of accounts.

An account is a SQLite file, or a Cloud Spanner database that a URL names.  ``file_of`` returns the
file, for code that stores something beside it.  The code of a kind is imported only when an account
is opened, because a plan without an account needs neither.

Only ``create_account`` makes an account.  All other functions refuse an account that is absent, or
that has another id or data set than the file that names it.
"""

import contextlib
import os
import shlex
import warnings
from pathlib import Path
from typing import Any

import msgspec

from dpstream.accounting.composition import default_parts, fitted_parts
from dpstream.accounting.errors import AccountWarning, PolicyError, UsageError
from dpstream.accounting.extras import require
from dpstream.accounting.places import below
from dpstream.accounting.plan.unit import UnitIdentity, cost_to
from dpstream.state.ledger.contract import Ledger
from dpstream.state.ledger.events import Charge, Created, Entry, Head, Limit, is_id, new_id
from dpstream.state.ledger.head import HeadFile
from dpstream.state.ledger.history import History
from dpstream.state.private_log import users_folder
from dpstream.state.repository import refuse_tracked

_SPANNER = "spanner:"
_MADE_ANEW = (
    "the account has charges and no head file here, so {name} is written again: the account may be "
    "older than what was published; if it was restored from a backup, type "
    "`dpstream account recover` before any question is asked"
)
#: Warnings by the damaged part of a head file (`head.HeadFile.damaged_part`).
_DAMAGED = {
    "slot": "one of the two slots of {name} is damaged; the rest of the file proves the account's "
    "end, and the next charge writes the slot again: check the disk",
    "log": "the log of {name} is damaged, so that `dpstream account recover` cannot use it: check "
    "the disk, and type `rm {path}` now, while this account is the newest one; the next charge "
    "writes the file again",
}


#: Name of the file that describes data sets (`pipelines.project.project`).
PROJECT_FILE = "dpstream.toml"


class AccountPlace(msgspec.Struct, frozen=True):
    """The account that a file (a project, a job) names.

    Attributes:
        path: the account's file or URL.
        data_set: the data set's name.
        id: the account's id.
        unit: the name of the privacy unit in the account; ``None``: only the account has it.
        file: absolute path of the file that names it; ``None``: a call or an option names it.
        unit_columns: the columns that this file declares to hold the unit.
    """

    path: str
    data_set: str
    id: str
    unit: str | None = None
    file: str | None = None
    unit_columns: tuple[str, ...] = ()

    def unit_in(self, column: str) -> str:
        """Return the name by which the ids of a column are charged.

        Only a declared column has the unit's name: any other column would be charged as the unit
        but protect something else, e.g. each visit of a user instead of the user.  Without a file
        the column's own name is compared with the account's (`accounting.plan.unit.cost_to`).

        Raises:
            PolicyError: the file does not declare that the column holds the unit.
        """
        declared = sorted({self.unit or column, *self.unit_columns})
        if self.unit is None or column in declared:
            return self.unit or column
        raise PolicyError(
            "unit",
            f"is column '{column}', which is not declared to hold the unit '{self.unit}' of data "
            f"set '{self.data_set}'; declared: {', '.join(declared)}",
            f"name one of these; if '{column}' identifies the same units, write unit_column = "
            f"\"{column}\" in a table of data set '{self.data_set}' in {PROJECT_FILE}",
        )


def refuse_limit(tables: dict[str, Any]) -> None:
    """Refuse a file in which a data set's ``account`` has a limit, which is a part of the account.

    Raises:
        UsageError: a data set has a limit.
    """
    data_sets = tables.get("data_set")
    for name, section in data_sets.items() if isinstance(data_sets, dict) else ():
        account = section.get("account") if isinstance(section, dict) else None
        if not isinstance(account, dict) or "limit" not in account:
            continue
        raise UsageError(
            f"data_set.{name}.account.limit",
            "is not a setting of this file: the limit is stored in the account, so that an analyst "
            "cannot raise it",
            "remove it; `dpstream account create` makes the account with its limit, and "
            "`dpstream account limit DATA_SET --epsilon E --delta D` changes it",
        )


def check_names(data_set: str, id_: str | None) -> None:
    """Refuse a text that cannot be a data set's name, or an id.

    Raises:
        UsageError: the name or the id cannot be used.
    """
    if not data_set or len(data_set) > 1_000 or not data_set.isprintable():
        raise UsageError("data_set", "must be 1 to 1,000 printable characters", "write a name")
    if id_ is not None and not is_id(id_):
        raise UsageError(
            "account.id",
            "is not an account's id, which has 16 hexadecimal characters",
            "copy it from `dpstream account show PATH`",
        )


def limit_of(epsilon: float, delta: float) -> Limit:
    """Return a limit.

    Raises:
        UsageError: the figures are not a limit.
    """
    if not 0 < epsilon < float("inf"):
        raise UsageError("--epsilon", "must be positive and finite", "write e.g. --epsilon 8")
    if not 0 < delta < 1:
        raise UsageError("--delta", "must be above 0 and below 1", "write e.g. --delta 1e-6")
    return float(epsilon), float(delta)


def file_of(path: str | Path) -> Path | None:
    """Return the account's file; ``None`` if it is a database."""
    text = str(path)
    return None if "://" in text or text.startswith(_SPANNER) else Path(path)


def place_below(folder: Path, path: str) -> str:
    """Return an account's path below a folder; a URL is returned as it is.

    Raises:
        UsageError: the URL is not that of an account, or its client is not installed.
    """
    if file_of(path) is not None:
        return str(below(folder, path, "account.path"))
    if not path.startswith(_SPANNER):
        raise UsageError(
            "account.path",
            "is not a known kind of account",
            "name a file, or 'spanner://PROJECT/INSTANCE/DATABASE'",
        )
    require("spanner", "account.path")
    from dpstream.state.ledger.spanner import of_ledger
    from dpstream.state.spanner.client import parse

    with of_ledger():
        parse(path)
    return path


def open_ledger(place: AccountPlace, looking: bool = False, recovering: bool = False) -> Ledger:
    """Open an existing account that is as new as its head file.

    Args:
        looking: whether the account is only read for a plan: no file is written, unless an answer
            is shown that the head file lacks.
        recovering: the account may be older than its head file, or have none.

    Raises:
        UsageError: it is absent, or may not be used.
        PolicyError: it is damaged, another program's, of another version, another account, or
            older than its head file.
        RunError: it cannot be opened, or another process holds it for very long.
    """
    _refuse_tracked(place)
    return _ready(_opened(place.path, looking), place, looking, recovering)


def _refuse_tracked(place: AccountPlace) -> None:
    """Refuse an account's file that git tracks."""
    if file_of(place.path) is not None:
        rule = "a checkout of an older commit would undo charges"
        refuse_tracked("account.path", place.path, rule)


def open_path(path: str | Path, recovering: bool = False) -> Ledger:
    """Open the account at a path, whatever its id is; raises as ``open_ledger`` does."""
    return _ready(_opened(path), path, not recovering, recovering)


def _opened(path: str | Path, looking: bool = False) -> Ledger:
    return Ledger(_storage_module(path).AccountStorage(path, looking))


def _ready(
    ledger: Ledger, place: AccountPlace | str | Path, looking: bool, recovering: bool
) -> Ledger:
    """Return an open account with its head file; close and refuse it if it is not the named one.

    Args:
        place: names the account; with a path alone, id and data set are not checked.
    """
    try:
        own = ledger.history().created
        if not isinstance(place, AccountPlace):
            place = AccountPlace(str(place), own.data_set, own.id)
        check_place(place, own)
        _give_head(ledger, place, looking, recovering)
    except BaseException:
        ledger.close()
        raise
    return ledger


def _give_head(ledger: Ledger, place: AccountPlace, looking: bool, recovering: bool) -> None:
    """Give an open account its head file, which is made if it is missing."""
    head_file = head_file_of(place)
    if head_file is None:
        return
    head = head_file.head()
    if recovering:
        ledger.head_file = head_file
    elif head is not None:
        head_file.check(ledger.history(), head)
        _warn_of_damage(head_file)
        ledger.head_file = head_file
    elif not looking:
        account = ledger.history()
        if head_file.create(account) and account.charges:
            warnings.warn(_MADE_ANEW.format(name=head_file.path.name), AccountWarning, stacklevel=2)
        ledger.head_file = head_file


def _warn_of_damage(head_file: HeadFile) -> None:
    """Warn of damage in the head file of an account that has all its entries."""
    part = head_file.damaged_part()
    if part is not None:
        path = head_file.path
        text = _DAMAGED[part].format(name=path.name, path=typed(path))
        warnings.warn(text, AccountWarning, stacklevel=1)  # one place, so that it is told once


def refuse_damaged_head(place: AccountPlace) -> None:
    """Refuse a head file whose log is damaged: a run's tokens are compared with its lines.

    Raises:
        PolicyError: it is damaged.
        RunError: it cannot be read.
    """
    head_file = head_file_of(place)
    if head_file is not None:
        head_file.chain()


def head_file_of(place: AccountPlace) -> HeadFile | None:
    """Return the head file of an account, beside the file that names it.

    If no file names it, or that folder cannot be written, the head file is beside the account's
    file, or for an account in a database in the user's own folder (`private_log.users_folder`).
    ``None``: no such folder can be written.
    """
    name, folders = f"dpstream-{place.id}.head", list[Path]()
    if place.file is not None:
        folders.append(Path(place.file).parent)
    file = file_of(place.path)
    with contextlib.suppress(OSError):
        folders.append(users_folder() if file is None else file.absolute().parent)
    for folder in folders:
        if (folder / name).exists() or os.access(folder, os.W_OK | os.X_OK):
            return HeadFile(folder / name, place.id, _named(place))
    return None


def _named(place: AccountPlace) -> str:
    """Return an account as it is typed in a command."""
    if place.file is None:
        return place.path if file_of(place.path) is None else typed(Path(place.path))
    if Path(place.file).name != PROJECT_FILE:
        return typed(Path(place.file))
    return place.data_set + project_option(place.file)


def project_option(file: str | Path) -> str:
    """Return the option that names a project file in a command; empty in the file's own folder."""
    path = typed(Path(file))
    return "" if path == PROJECT_FILE else f" --project {path}"


def typed(path: Path) -> str:
    """Return a path as it is typed in the current folder."""
    here, path = Path.cwd(), path.absolute()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))


def _storage_module(path: str | Path) -> Any:
    """Return the module of an account's kind.

    Both have ``AccountStorage``, ``create`` and ``is_there``.
    """
    if file_of(path) is not None:
        from dpstream.state.ledger import sqlite

        return sqlite
    place_below(Path(), str(path))  # first: it says whether the client is installed
    from dpstream.state.ledger import spanner

    return spanner


def check_place(place: AccountPlace, created: Created) -> None:
    """Refuse an account that is not the one that a file names.

    Raises:
        PolicyError: it has another id or data set.
    """
    if created.id != place.id:
        raise PolicyError(
            "account.id",
            f"differs from the id of the account at account.path, which is {created.id}",
            "name the path of the account that these data were charged in",
        )
    if created.data_set != place.data_set:
        raise PolicyError(
            "data_set",
            f"differs from the data set of the account, which is {created.data_set!r}",
            "name that data set; other data need their own account: `dpstream account create`",
        )


def create_account(
    path: str | Path,
    data_set: str,
    unit: UnitIdentity,
    limit: Limit | None,
    first: Charge | None = None,
) -> Created:
    """Make a new account, or return one that an equal call made and that has no later entry.

    So a command that was stopped after the creation can be typed again.

    Args:
        unit: the privacy unit; it never changes.
        limit: (epsilon, delta) per unit; ``None``: each record has its own budget.
        first: charge of the job that the account is made for; delta is divided so that the job fits
            (`accounting.composition.fitted_parts`).  ``None``: delta is divided by default.

    Raises:
        UsageError: there is another account already, or none may be made there.
        PolicyError: the place has another program's data.
        RunError: it cannot be reached.
    """
    created = created_of(new_id(), data_set, unit, limit, first)
    check_names(data_set, created.id)
    if ledger_exists(path):
        made, *later = [entry.event for entry in read_ledger(path)]
        if isinstance(made, Created) and not later:
            created = msgspec.structs.replace(created, id=made.id)
        if made == created:
            return created
    make(path, created)
    return created


def created_of(
    id_: str,
    data_set: str,
    unit: UnitIdentity,
    limit: Limit | None,
    first: Charge | None = None,
) -> Created:
    """Return the first entry of an account; see ``create_account``."""
    parts = None
    if limit is not None:
        cost = None if first is None else cost_to(unit, first).spend
        parts = default_parts(*limit) if cost is None else fitted_parts(*limit, cost)
    return Created(id_, data_set, unit, limit, parts)


def make(path: str | Path, created: Created) -> None:
    """Make an account with a given first event; see ``create_account``."""
    _storage_module(path).create(path, created)


def ledger_exists(path: str | Path) -> bool:
    """Return whether there is a file with content, or a database with an account's tables.

    A creation that was interrupted leaves an empty file, which does not count.

    Raises:
        UsageError: the database may not be used.
        RunError: it cannot be reached.
    """
    return bool(_storage_module(path).is_there(path))


def read_ledger(path: str | Path) -> list[Entry]:
    """Return every entry of an account in order, after a check of every row; writes nothing.

    Raises:
        UsageError, PolicyError, RunError: it is absent, a broken one, or cannot be read.
    """
    with contextlib.closing(_opened(path)) as ledger:
        return ledger.history().entries


def read_history(place: AccountPlace, seen: Head | None = None) -> History:
    """Return an account's events for a plan; nothing is written.

    Args:
        seen: its end as a store last saw it; an account without that entry is refused.

    Raises:
        UsageError, PolicyError, RunError: as for `open_ledger`.
    """
    _refuse_tracked(place)
    head_file = head_file_of(place)
    head = None if head_file is None else head_file.head()
    account = history_of(read_ledger(place.path))
    check_place(place, account.created)
    if head_file is not None:
        head_file.check(account, head)
        _warn_of_damage(head_file)
    if seen is not None:
        seen.check(account.created.id, account.digest_at(seen.seq))
    return account


def history_of(entries: list[Entry]) -> History:
    """Return the account that entries form."""
    account = History()
    for entry in entries:
        account.add(entry.event, entry.digest)
    return account
