"""The files behind a catalog's tables: which they are, and what tells one state from another.

A question is known by where its tables lie, never by their rows.  The content of files is digested
only for the notes of declared keys (`registration`).
"""

import contextlib
import glob
import hashlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from dpstream.accounting.errors import DpstreamError, PolicyError, RunError, UsageError
from dpstream.accounting.places import files_at
from dpstream.pipelines.tables.catalog import Catalog, Table
from dpstream.pipelines.tables.columns import sqlite_file
from dpstream.state.sqlite.database import Subject, open_file, refused, sqlite3

FILES = ("parquet", "csv", "jsonl")
#: Parameters of a server's address that say how to get in, and nothing of the rows.
_SECRET = ("password", "passfile", "ssl")


def files_of(table: Table) -> list[str]:
    """A table's files, sorted; none of a server's.

    Raises:
        UsageError: there is none, or something else of that name.
    """
    if table.kind == "postgresql":
        return []
    if table.kind == "sqlite":
        path = os.path.abspath(sqlite_path(table))
        log = f"{path}-wal"  # what was committed and is not in the file yet
        return [path, *([log] if _filled(log) else [])]
    paths = sorted(path for path in glob.glob(table.place, recursive=True))
    paths = [path for path in paths if not os.path.isdir(path)]
    if not paths or not all(_regular(path) for path in paths):
        raise no_file(table)
    return [os.path.realpath(path) for path in paths]


def no_file(table: Table) -> UsageError:
    """Where its path leads to nothing."""
    return UsageError(
        f"table {table.name}", "matches no file, or something that is none", "correct its path"
    )


def errors_of(table: Table) -> list[DpstreamError]:
    """All that is said of a table's files."""
    return [no_file(table), without(table), is_not(table, "CSV"), is_not(table, "Parquet")]


def is_not(table: Table, kind: str) -> RunError:
    """Where a file is of another kind."""
    return RunError(f"table {table.name}", f"has a file that is not {kind}", "correct it")


def without(table: Table) -> RunError:
    """Where a file is not as the catalog says."""
    return RunError(
        f"table {table.name}", "has a file without one of its columns", "correct its header"
    )


def sqlite_path(table: Table) -> str:
    """The file of a SQLite address.

    A journal that a killed program left is rolled back first: who only reads cannot do it, and
    the bytes of the file are not its rows before.

    Raises:
        DpstreamError: that is not possible.
    """
    path = sqlite_file(table.place)
    if _filled(f"{path}-journal"):
        try:
            with contextlib.closing(open_file(path)) as db:
                db.execute("SELECT 1 FROM sqlite_master").fetchone()
        except (sqlite3.Error, OSError) as error:
            subject = Subject(f"table {table.name}", "database", lambda: _damaged(table))
            raise refused(subject, error, path) from None
    return path


def table_parts(table: Table) -> list[bytes]:
    """What tells a table's content from another; to be keyed before it is kept.

    Raises:
        RunError: a file cannot be read.
    """
    parts = [f"{table.name}\0{table.kind}".encode()]
    if table.kind == "postgresql":
        parts.append(_address(table).encode())
    for path in files_of(table):
        try:
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
                parts.append(f"{file.tell()}\0{digest.hexdigest()}".encode())
        except OSError:
            raise _unreadable(table) from None
    return parts


def place_of(table: Table, folder: Path) -> bytes:
    """Where a table lies, seen from a folder, as a part of a question's identity: no password, and
    nothing of rows."""
    if table.kind == "postgresql":
        place = _address(table)
    else:
        place = os.path.relpath(sqlite_file(table.place), folder)
    return f"{table.name}\0{table.kind}\0{place}".encode()


def identities(table: Table) -> set[object]:
    """What a table reads, however it is named: files, or the table of a database.

    Names of a server's host and of views, and copies of files, are not seen through.
    """
    remote = table.remote or table.name
    if table.kind == "postgresql":
        address = urlsplit(table.place)
        more = dict(parse_qsl(address.query))
        hosts = address.netloc.rpartition("@")[2] or more.get("host", "")
        port = "" if ":" in hosts else f":{more.get('port', 5432)}"
        database = more.get("dbname", address.path.strip("/"))
        name = remote if "." in remote else f"public.{remote}"
        return {(hosts.lower() + port, database, name)}
    if table.kind != "sqlite":
        return set(files_at(table.place))
    name = remote.rpartition(".")[2].lower()
    return {(*file, name) for file in files_at(glob.escape(sqlite_file(table.place)))}


def stamps(catalog: Catalog, names: Iterable[str]) -> list[tuple[str, int, int, int, int]]:
    """(path, bytes, times of change, inode) of every file: cheap, to notice a change in a run."""
    out = []
    for name in sorted(names):
        for path in files_of(catalog.tables[name]):
            try:
                status = os.stat(path)
            except OSError:
                raise _unreadable(catalog.tables[name]) from None
            own = status.st_ctime_ns, status.st_ino  # of a database also who reads it moves them
            of_file = own if catalog.tables[name].kind in FILES else (0, 0)
            out.append((path, status.st_size, status.st_mtime_ns, *of_file))
    return out


def _filled(log: str) -> bool:
    """Whether a log has something; whoever reads a database may leave an empty one behind."""
    try:
        return os.path.getsize(log) > 0
    except OSError:
        return False


def _address(table: Table) -> str:
    """All of a server's address that decides which rows there are: no password."""
    address = urlsplit(table.place)
    try:
        host = f"{address.hostname}\0{address.port}"
    except ValueError:  # several hosts
        host = address.netloc.rpartition("@")[2]
    more = [(k, v) for k, v in parse_qsl(address.query, True) if not k.startswith(_SECRET)]
    role = [] if address.username is None else [("user", unquote(address.username))]
    suffix = "".join(f"\0{key}={value}" for key, value in sorted(role + more))
    return f"{host}\0{address.path}\0{table.remote}{suffix}"


def _regular(path: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False


def _damaged(table: Table) -> PolicyError:
    return PolicyError(f"table {table.name}", "is a damaged database", "restore it from a backup")


def _unreadable(table: Table) -> RunError:
    return RunError(
        f"table {table.name}", "has a file that cannot be read", "check its permissions and disk"
    )
