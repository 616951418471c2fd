"""Opens the ledger that a job names: the one place that knows which kinds of ledgers there are.

A ledger is a SQLite file, or a Cloud Spanner database by its URL.  What has to lie beside a file
asks ``file_of`` whether there is one.  A kind is loaded only where a ledger is opened: whoever only
plans needs neither.
"""

from pathlib import Path

from dpstream.accounting.errors import UsageError
from dpstream.accounting.extras import require
from dpstream.state.ledger.charges import Book, Entry, Head
from dpstream.state.ledger.contract import Ledger

_SPANNER = "spanner:"


def file_of(path: str | Path) -> Path | None:
    """The ledger's file, ``None`` where it is a database by its URL."""
    text = str(path)
    return None if "://" in text or text.startswith(_SPANNER) else Path(path)


def place_below(folder: Path, path: str) -> str:
    """A ledger's path that starts from a folder; a URL as it is.

    Raises:
        UsageError: the URL is none of a ledger, or its client is not installed.
    """
    if file_of(path) is not None:
        return str(folder / path)
    if not path.startswith(_SPANNER):
        raise UsageError(
            "ledger.path",
            "is not a known kind of ledger",
            "name a file, or 'spanner://PROJECT/INSTANCE/DATABASE'",
        )
    require("spanner", "ledger.path")
    from dpstream.state.ledger.tables import of_ledger
    from dpstream.state.spanner.client import parse

    with of_ledger():
        parse(path)
    return path


def open_ledger(path: str | Path, data_set: str, looking: bool = False) -> Ledger:
    """The ledger of a data set; a file is made if it is not there, a database is not.

    Args:
        looking: plan only: no file is made or written, and one that is not there is empty.

    Raises:
        UsageError: the database holds no ledger, or may not be used.
        PolicyError: it is damaged, another program's, or of a newer version.
        RunError: it cannot be opened, or another process holds it for very long.
    """
    if file_of(path) is not None:
        from dpstream.state.ledger.sqlite import SqliteLedger

        return SqliteLedger(path, data_set, looking)
    url = place_below(Path(), str(path))  # first: it says whether the client is installed
    from dpstream.state.ledger.spanner import SpannerLedger

    return SpannerLedger(url, data_set)


def create_ledger(path: str | Path) -> bool:
    """Make a ledger where none is; whether it was made now.

    Raises:
        UsageError: it may not be made there; PolicyError: another program's data is there.
        RunError: it cannot be reached.
    """
    if file_of(path) is not None:
        from dpstream.state.ledger.sqlite import SqliteLedger

        fresh = not ledger_exists(path)
        SqliteLedger(path, "").close()
        return fresh
    url = place_below(Path(), str(path))
    from dpstream.state.ledger.spanner import create_ledger as create

    return create(url)


def ledger_exists(path: str | Path) -> bool:
    """Whether there is a file, or a database with a ledger's tables.

    Raises:
        UsageError: the database may not be used; RunError: it cannot be reached.
    """
    file = file_of(path)
    if file is not None:
        return file.exists()
    url = place_below(Path(), str(path))
    from dpstream.state.ledger.spanner import is_there

    return is_there(url)


def read_ledger(path: str | Path) -> list[Entry]:
    """Every entry of a ledger in order, after a check of every row; writes nothing.

    Raises:
        UsageError, PolicyError, RunError: it is no ledger, a broken one, or cannot be read.
    """
    if file_of(path) is not None:
        from dpstream.state.ledger.file import read_ledger as read_file

        return read_file(path)
    url = place_below(Path(), str(path))
    from dpstream.state.ledger.spanner import read_entries

    return read_entries(url)


def read_book(path: str | Path, data_set: str, seen: Head | None = None) -> Book:
    """Charges of a data set, for whoever plans: nothing is written, and without a ledger nothing is
    spent.

    Args:
        seen: its end as a store last saw it; a ledger without that entry is refused.

    Raises:
        UsageError, PolicyError, RunError: as for `read_ledger`.
    """
    book, entries = Book(), read_ledger(path) if ledger_exists(path) else []
    if seen is not None:
        seen.check(data_set, next((e.digest for e in entries if e.seq == seen.seq), None))
    for entry in entries:
        if entry.data_set == data_set:
            book.add(entry.charge)
    return book
