"""Opens the account that a job names: the one place that knows which kinds of accounts there are.

An account is a SQLite file, or a Cloud Spanner database by its URL.  What has to lie beside a file
asks ``file_of`` whether there is one.  A kind is loaded only where an account is opened: whoever
only plans needs neither.

Only ``create_account`` makes one.  Everything else refuses an account that is absent, or that has
another id or data set than the file that names it.
"""

import contextlib
import os
import shlex
import warnings
from pathlib import Path
from typing import Any

import msgspec

from dpstream.accounting.errors import AccountWarning, PolicyError, UsageError
from dpstream.accounting.extras import require
from dpstream.accounting.fields import FieldType
from dpstream.state.ledger.contract import Ledger
from dpstream.state.ledger.events import Created, Entry, Head, Limit, is_id
from dpstream.state.ledger.head import HeadFile
from dpstream.state.ledger.history import History
from dpstream.state.private_log import users_folder
from dpstream.state.run_ids import new_id

_SPANNER = "spanner:"
_MADE_ANEW = (
    "the account has charges and no head file here, so {name} is written anew: nobody can tell "
    "whether the account is older than what was published; if it was restored, type `dpstream "
    "account recover` before anything is asked"
)


#: Name of the file that describes data sets (`pipelines.project.project`).
PROJECT_FILE = "dpstream.toml"


class AccountPlace(msgspec.Struct, frozen=True):
    """The account that a file (a project, a job) names.

    Attributes:
        path: of its file, or its URL.
        data_set: the data set's name.
        id: the account's id.
        unit: what the account calls the privacy unit, where the data's column has another name.
        file: the file that names it, whole path; ``None``: a call or a flag does.
    """

    path: str
    data_set: str
    id: str
    unit: str | None = None
    file: str | None = None


def refuse_limit(tables: dict[str, Any]) -> None:
    """Refuse a file in which a data set's ``account`` has a limit, which is a part of the account.

    Raises:
        UsageError: one has it.
    """
    data_sets = tables.get("data_set")
    for name, section in data_sets.items() if isinstance(data_sets, dict) else ():
        account = section.get("account") if isinstance(section, dict) else None
        if not isinstance(account, dict) or "limit" not in account:
            continue
        raise UsageError(
            f"data_set.{name}.account.limit",
            "is not a setting of this file: the account has the limit, so that nobody who asks can "
            "raise it",
            "remove it; `dpstream account create` makes the account with its limit, and "
            "`dpstream account limit DATA_SET --epsilon E --delta D` changes it",
        )


def check_names(data_set: str, id_: str | None) -> None:
    """Refuse what can be no data set's name, or no id.

    Raises:
        UsageError: see above.
    """
    if not data_set or len(data_set) > 1_000 or not data_set.isprintable():
        raise UsageError("data_set", "must be 1 to 1,000 printable characters", "write a name")
    if id_ is not None and not is_id(id_):
        raise UsageError(
            "account.id",
            "is no account's id: 16 hexadecimal characters",
            "copy it from `dpstream account show PATH`",
        )


def limit_of(epsilon: float, delta: float, field: str = "--epsilon") -> Limit:
    """A limit.

    Raises:
        UsageError: it is none.
    """
    if not (0 < epsilon < float("inf") and 0 < delta < 1):
        raise UsageError(field, "a limit is epsilon > 0 and 0 < delta < 1", "correct it")
    return float(epsilon), float(delta)


def file_of(path: str | Path) -> Path | None:
    """The account's file, ``None`` where it is a database by its URL."""
    text = str(path)
    return None if "://" in text or text.startswith(_SPANNER) else Path(path)


def place_below(folder: Path, path: str) -> str:
    """An account's path that starts from a folder; a URL as it is.

    Raises:
        UsageError: the URL is none of an account, or its client is not installed.
    """
    if file_of(path) is not None:
        return str(folder / path)
    if not path.startswith(_SPANNER):
        raise UsageError(
            "account.path",
            "is not a known kind of account",
            "name a file, or 'spanner://PROJECT/INSTANCE/DATABASE'",
        )
    require("spanner", "account.path")
    from dpstream.state.ledger.tables import of_ledger
    from dpstream.state.spanner.client import parse

    with of_ledger():
        parse(path)
    return path


def open_ledger(place: AccountPlace, looking: bool = False, recovering: bool = False) -> Ledger:
    """The account of a place, which must be there, and as new as its head file.

    Args:
        looking: plan only: no file is written, unless an answer is shown that the head file lacks.
        recovering: it may be older than its head file, or have none.

    Raises:
        UsageError: it is absent, or may not be used.
        PolicyError: it is damaged, another program's, of another version, another account, or
            older than its head file.
        RunError: it cannot be opened, or another process holds it for very long.
    """
    ledger = _opened(place.path, looking)
    try:
        check_place(place, ledger.history().created)
        _give_head(ledger, place, looking, recovering)
    except BaseException:
        ledger.close()
        raise
    return ledger


def open_path(path: str | Path, recovering: bool = False) -> Ledger:
    """The account at a path, whatever its id is; raises as ``open_ledger`` does."""
    ledger = _opened(path)
    try:
        own = ledger.history().created
        place = AccountPlace(str(path), own.data_set, own.id)
        _give_head(ledger, place, not recovering, recovering)
    except BaseException:
        ledger.close()
        raise
    return ledger


def _give_head(ledger: Ledger, place: AccountPlace, looking: bool, recovering: bool) -> None:
    """Let an open account keep its head file, which is made if it is missing."""
    head_file = head_file_of(place)
    if head_file is None:
        return
    if recovering:
        ledger.head_file = head_file
    elif (head := head_file.head()) is not None:
        head_file.check(ledger.history(), head)
        ledger.head_file = head_file
    elif not looking:
        account = ledger.history()
        if head_file.create(account) and account.charges:
            warnings.warn(_MADE_ANEW.format(name=head_file.path.name), AccountWarning, stacklevel=2)
        ledger.head_file = head_file


def head_file_of(place: AccountPlace) -> HeadFile | None:
    """The head file of an account: beside the file that names it.

    Where no file does, or its folder cannot be written, it is beside the account's file; of a
    database's account it is in the user's own folder (`private_log.users_folder`).  ``None``: none
    of them can be written.
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
    """What a command takes for an account."""
    if place.file is None:
        return place.path if file_of(place.path) is None else typed(Path(place.path))
    file = typed(Path(place.file))
    if Path(place.file).name != PROJECT_FILE:
        return file
    return place.data_set if file == PROJECT_FILE else f"{place.data_set} --project {file}"


def typed(path: Path) -> str:
    """A path as one types it here."""
    here, path = Path.cwd(), path.absolute()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))


def _opened(path: str | Path, looking: bool = False) -> Ledger:
    if file_of(path) is not None:
        from dpstream.state.ledger.file import absent
        from dpstream.state.ledger.sqlite import SqliteLedger

        if not Path(path).exists():
            raise absent()
        return SqliteLedger(path, looking)
    url = place_below(Path(), str(path))  # first: it says whether the client is installed
    from dpstream.state.ledger.spanner import SpannerLedger

    return SpannerLedger(url)


def check_place(place: AccountPlace, created: Created) -> None:
    """Refuse an account that is not the one that a file names.

    Raises:
        PolicyError: its id or its data set is another one.
    """
    if created.id != place.id:
        raise PolicyError(
            "account.id",
            f"names another account than the one at account.path, whose id is {created.id}",
            "name the path of the account that these data were charged in",
        )
    if created.data_set != place.data_set:
        raise PolicyError(
            "data_set",
            f"names another data set than the account's, which is {created.data_set!r}",
            "name it; other data need an account of their own: `dpstream account create`",
        )


def create_account(
    path: str | Path, data_set: str, unit: str, type_: FieldType, limit: Limit | None
) -> Created:
    """Make an account where none is.

    Args:
        unit, type_: name and type of the privacy unit.
        limit: (epsilon, delta) per unit; ``None``: each record has a budget of its own.

    Raises:
        UsageError: there is one already, or it may not be made there.
        PolicyError: another program's data is there; RunError: it cannot be reached.
    """
    created = Created(new_id(), data_set, unit, type_, limit)
    check_names(data_set, created.id)
    make(path, created)
    return created


def make(path: str | Path, created: Created) -> None:
    """``create_account`` of a given first event."""
    if file_of(path) is not None:
        from dpstream.state.ledger.file import create

        create(path, created)
        return
    url = place_below(Path(), str(path))
    from dpstream.state.ledger.spanner import create_account as create_there

    create_there(url, created)


def ledger_exists(path: str | Path) -> bool:
    """Whether there is a file that holds anything (a creation that was cut off leaves an empty
    one), or a database with an account's tables.

    Raises:
        UsageError: the database may not be used; RunError: it cannot be reached.
    """
    file = file_of(path)
    if file is not None:
        from dpstream.state.ledger.file import is_filled

        return is_filled(file)
    url = place_below(Path(), str(path))
    from dpstream.state.ledger.spanner import is_there

    return is_there(url)


def read_ledger(path: str | Path) -> list[Entry]:
    """Every entry of an account in order, after a check of every row; writes nothing.

    Raises:
        UsageError, PolicyError, RunError: it is absent, a broken one, or cannot be read.
    """
    if file_of(path) is not None:
        from dpstream.state.ledger.file import absent, read_entries

        if not Path(path).exists():
            raise absent()
        return read_entries(path)
    url = place_below(Path(), str(path))
    from dpstream.state.ledger.spanner import read_entries as read_there

    return read_there(url)


def read_history(place: AccountPlace, seen: Head | None = None) -> History:
    """The account of a place, for whoever plans: nothing is written.

    Args:
        seen: its end as a store last saw it; an account without that entry is refused.

    Raises:
        UsageError, PolicyError, RunError: as for `open_ledger`.
    """
    head_file = head_file_of(place)
    head = None if head_file is None else head_file.head()
    account = history_of(read_ledger(place.path))
    check_place(place, account.created)
    if head_file is not None:
        head_file.check(account, head)
    if seen is not None:
        held = 0 < seen.seq <= len(account.digests)
        seen.check(account.created.id, account.digests[seen.seq - 1] if held else None)
    return account


def history_of(entries: list[Entry]) -> History:
    """The account that entries make."""
    account = History()
    for entry in entries:
        account.add(entry.event, entry.digest)
    return account
