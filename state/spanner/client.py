"""Cloud Spanner's client as the store uses it: connections, reads, commits, digests, errors.

A commit is one call with all its mutations.  It may be aborted (nothing happened), or its
outcome may be unknown (the answer was lost).  Both are tried again with growing pauses, because
every commit inserts a row that can be inserted only once: "exists already" then tells that an
earlier attempt, or another worker, was there, and the row's writer tells which.

The client's own repeating is switched off: it would try a commit for an hour, and a read from a
host that is gone for ever.

**Digests** of cells are put on and taken off here, where rows meet the client (``Sealing``), so
that the rest of the store knows nothing about it.  Spanner checks its own disks; digests notice
what goes wrong between a worker's memory and them, and rows that were written by hand.

* A BYTES cell begins with 18 bytes: a mark of two and the digest (`state.seals`), which covers
  the cell's base64 text and the row's key.  18 bytes are 24 digits of base64 without a rest, so
  nothing is encoded anew.
* A number of ``Progress`` has 31 bits of its digest above its own 32.
* A text of ``Meta`` has its digest in front.
"""

import contextlib
import functools
import os
import queue
import re
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from google.api_core import exceptions
from google.api_core.retry import Retry
from google.auth.credentials import AnonymousCredentials
from google.auth.exceptions import GoogleAuthError
from google.cloud import spanner
from google.cloud.spanner_v1.database import Database
from google.cloud.spanner_v1.pool import BurstyPool
from google.cloud.spanner_v1.session import Session

from dpstream.accounting.errors import DpstreamError, RunError, UsageError
from dpstream.accounting.limits import CALL_SECONDS, COMMIT_RETRY_SECONDS, READ_KEYS
from dpstream.state.connecting import may_pass, reach
from dpstream.state.seals import SIZE, digest_at, place_of, refuse_damage

#: Shards of one generation.
GENERATION = 1 << 15
_KEYS = {
    "Progress": ("Part", "WindowIndex"),
    "Steps": ("Part", "WindowIndex", "Step", "Piece"),
    "Keys": ("Part", "WindowIndex", "KeyId"),
    "KeyUnits": ("Part", "WindowIndex", "KeyId", "Chunk"),
    "KeysByDue": ("Part", "WindowIndex", "Due", "Step", "Piece"),
    "Units": ("Part", "UnitId"),
    "Meta": ("Name",),
}
_SEALED = {
    "Progress": ("Reached",),
    "Steps": ("Releases",),
    "Keys": ("Columns", "State", "UnitIds"),
    "KeyUnits": ("UnitIds",),
    "KeysByDue": ("KeyIds",),
    "Units": ("Records",),
    "Meta": ("Value",),
}
#: Tables with BYTES in their key, and where.
_BY_ID = {"Keys": 2, "KeyUnits": 2, "Units": 1}
_MARK, _DIGITS = b"\0\2", 24
#: Bytes that a cell is longer than what it holds.
CELL_SEAL = 18
_LOW = (1 << 32) - 1
_URL = re.compile(r"^spanner://([a-z0-9.:-]+)/([a-z0-9-]+)/([a-z0-9_-]+)$")
_EMULATOR = "SPANNER_EMULATOR_HOST"
#: The emulator serves one session per read-write transaction only.
_MULTIPLEXED = ("", "_PARTITIONED_OPS", "_FOR_RW")
#: Spanner drops a session that nobody uses for an hour.
_REST_SECONDS = 1_800.0
#: Attempts of one call, with pauses in between; other errors are not tried again.
_RETRY = Retry(
    predicate=may_pass(),
    initial=0.02,
    maximum=5.0,
    multiplier=2.0,
    timeout=COMMIT_RETRY_SECONDS,
)
#: Where a client's own retry of an aborted commit ends: the one above knows about outcomes.
_OWN_RETRY_SECONDS = 0


def with_keys(table: str, columns: Sequence[str]) -> Sequence[str]:
    """Return the columns to read so that some can be checked: digests cover the row's key."""
    if not any(column in columns for column in _SEALED.get(table, ())):
        return columns
    return (*columns, *(key for key in _KEYS[table] if key not in columns))


def opened(table: str, columns: Sequence[str], wanted: int, rows: list[Any]) -> list[list[Any]]:
    """Check rows and return the first ``wanted`` columns, without digests.

    Raises:
        PolicyError: a cell is not what was written.
    """
    openers = {"Meta": _open_text, "Progress": _open_number}
    return [row[:wanted] for row in _each(table, columns, rows, openers.get(table, _open_cell))]


def sealed_rows(table: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Sequence[Any]:
    """Return the rows with digests on the cells that have one."""
    sealers = {"Meta": _seal_text, "Progress": _seal_number}
    return _each(table, columns, rows, sealers.get(table, _seal_cell))


def _each(table: str, columns: Sequence[str], rows: Sequence[Any], change: Any) -> Sequence[Any]:
    """The rows with their cells changed that have digests."""
    at, keys = _places(table, columns)
    return [_changed(table, row, at, keys, change) for row in rows] if at else rows


def _places(table: str, columns: Sequence[str]) -> tuple[list[tuple[int, int]], list[int]]:
    """(place and number of each column with digests, places of the key)."""
    sealed = _SEALED.get(table, ())
    at = [(columns.index(column), n) for n, column in enumerate(sealed) if column in columns]
    return at, [columns.index(key) for key in _KEYS[table]] if at else []


def _changed(
    table: str,
    row: Sequence[Any],
    at: list[tuple[int, int]],
    keys: list[int],
    change: Callable[[bytes, int, Any], Any],
) -> list[Any]:
    """A copy of a row with some cells changed."""
    new, key = list(row), [row[i] for i in keys]
    if table in _BY_ID:  # the client takes BYTES as text and gives them as bytes
        key[_BY_ID[table]] = as_text(key[_BY_ID[table]])
    place = place_of(f"{table}/{key}")
    for i, column in at:
        value = row[i]
        if value is not None:
            new[i] = change(place, column, value)
    return new


def _seal_cell(place: bytes, column: int, value: Any) -> str:
    text: str = as_text(value)
    return b64encode(_MARK + digest_at(place, column, text.encode())).decode() + text


def _open_cell(place: bytes, column: int, value: Any) -> bytes:
    raw: bytes = value if isinstance(value, bytes) else value.encode()
    data = raw[_DIGITS:]
    refuse_damage(raw[:_DIGITS] != b64encode(_MARK + digest_at(place, column, data)))
    return data


def _seal_number(place: bytes, column: int, value: int) -> int:
    check = digest_at(place, column, value.to_bytes(8, "little"))
    return value | int.from_bytes(check[:4], "little") >> 1 << 32


def _open_number(place: bytes, column: int, value: int) -> int:
    number = value & _LOW
    refuse_damage(value != _seal_number(place, column, number))
    return number


def _seal_text(place: bytes, column: int, text: str) -> str:
    return f"{digest_at(place, column, text.encode()).hex()} {text}"


def _open_text(place: bytes, column: int, value: str) -> str:
    text = value[2 * SIZE + 1 :]
    refuse_damage(value != _seal_text(place, column, text))
    return text


def as_text(value: bytes | str) -> str:
    """Return a BYTES cell as the client takes it."""
    return value.decode() if isinstance(value, bytes) else value


class Sealing:
    """Wraps a batch or a transaction of the client, and adds and checks digests.

    It has the methods of the client's own object that the store uses, with the same arguments.
    """

    def __init__(self, real: Any) -> None:
        self._real = real

    def insert(self, table: str, columns: Sequence[str], rows: Sequence[Any]) -> None:
        """Insert rows that must not be there; the commit fails if one is."""
        self._real.insert(table, columns, sealed_rows(table, columns, rows))

    def insert_or_update(self, table: str, columns: Sequence[str], rows: Sequence[Any]) -> None:
        """Write rows whether they are there or not; columns that are not named stay."""
        self._real.insert_or_update(table, columns, sealed_rows(table, columns, rows))

    def update(self, table: str, columns: Sequence[str], rows: Sequence[Any]) -> None:
        """Update rows that must be there; the commit fails if one is not."""
        self._real.update(table, columns, sealed_rows(table, columns, rows))

    def delete(self, table: str, keyset: Any) -> None:
        """Delete rows by key or range, whether they are there or not."""
        self._real.delete(table, keyset)

    def read(
        self, table: str, columns: Sequence[str], keyset: Any, **options: Any
    ) -> list[list[Any]]:
        """Return rows as of the transaction, checked and without their digests.

        Raises:
            PolicyError: a cell is not what was written.
        """
        every = with_keys(table, columns)
        rows = list(self._real.read(table, every, keyset, **options))
        return opened(table, every, len(columns), rows)


def parse(url: str) -> tuple[str, str, str]:
    """Return (project, instance, database) of a store's URL.

    Raises:
        UsageError: it is no URL of the form ``spanner://PROJECT/INSTANCE/DATABASE``.
    """
    match = _URL.match(url)
    if match is None:
        raise UsageError(
            "store",
            "must be 'spanner://PROJECT/INSTANCE/DATABASE'",
            "write the three names in lower case",
        )
    return match[1], match[2], match[3]


def connect(url: str) -> Database:
    """Return the database of a URL, shared within the process; no request is sent yet.

    With SPANNER_EMULATOR_HOST set it is the emulator's, without credentials.

    Raises:
        RunError: nothing answers.
    """
    return _connect(url, os.environ.get(_EMULATOR, ""))


class _Sessions(BurstyPool):
    """Sessions made when they are needed.  The client's own pool asks the database whether one
    is still there before every call; here only after a rest that is long enough to lose it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._put_at: dict[str, float] = {}

    def get(self) -> Session:
        """A session for one call."""
        with contextlib.suppress(queue.Empty):
            session: Session = self._sessions.get(block=False)
            rested = time.monotonic() - self._put_at.pop(session.name, 0.0) > _REST_SECONDS
            if not rested or session.exists():
                return session
        session = self._new_session()  # type: ignore[no-untyped-call]
        session.create()
        return session

    def put(self, session: Session) -> None:
        """Back from a call."""
        self._put_at[session.name] = time.monotonic()
        super().put(session)  # type: ignore[no-untyped-call]


@functools.lru_cache(maxsize=64)
def _connect(url: str, emulator: str) -> Database:
    project, instance, name = parse(url)
    try:
        if emulator:
            for suffix in _MULTIPLEXED:
                os.environ[f"GOOGLE_CLOUD_SPANNER_MULTIPLEXED_SESSIONS{suffix}"] = "false"
            client = spanner.Client(
                project=project, credentials=AnonymousCredentials(), disable_builtin_metrics=True
            )
        else:
            client = spanner.Client(project=project, disable_builtin_metrics=True)
        database: Database = client.instance(instance).database(name, pool=_Sessions())
        _try_once(database.spanner_api, "commit", "create_session", "get_session")
        administration = ("get_database_ddl", "get_database", "create_database")
        _try_once(client.database_admin_api, *administration, "update_database_ddl")
        api = database.spanner_api
        reach(api.transport.grpc_channel, "store", "Cloud Spanner")
        api.streaming_read = functools.partial(_streamed, api.streaming_read)
        return database
    except (GoogleAuthError, exceptions.GoogleAPIError) as error:
        raise refused(error) from None


def _try_once(api: Any, *names: str) -> None:
    """Let calls of the client's lower layer end soon and try them once."""
    for name in names:
        call = functools.partial(getattr(api, name), retry=None, timeout=CALL_SECONDS)
        setattr(api, name, call)


class _GoneError(exceptions.Unknown):
    """The host did not answer a read."""

    def __init__(self) -> None:
        super().__init__("unavailable")  # type: ignore[no-untyped-call]


def _streamed(real: Callable[..., Any], **request: Any) -> Iterator[Any]:
    """A read whose failures the client's upper layer does not repeat either."""
    try:
        yield from real(**request)
    except exceptions.ServiceUnavailable as error:
        raise _GoneError from error


def read_rows(
    database: Database,
    table: str,
    columns: Sequence[str],
    keys: Sequence[Sequence[Any]] = (),
    ranges: Sequence[spanner.KeyRange] = (),
    snapshot: Any = None,
) -> Iterator[list[Any]]:
    """Yield rows by key and by range, all of the table without either; reads are strong.

    Rows are checked and come without their digests.  Many keys are read in calls of
    ``limits.READ_KEYS``, each tried again as commits are.

    Args:
        snapshot: read as of its own time, instead of the latest state.

    Raises:
        PolicyError: a cell is not what was written.
        RunError, UsageError: as of ``refused``.
    """
    everything = not keys and not ranges
    try:
        for at in range(0, max(len(keys), 1), READ_KEYS):
            key_set = spanner.KeySet(
                keys=list(keys[at : at + READ_KEYS]),
                ranges=list(ranges) if at == 0 else [],
                all_=everything,
            )
            yield from _RETRY(_read)(database, table, columns, key_set, snapshot)
    except (exceptions.GoogleAPIError, GoogleAuthError) as error:
        raise refused(error) from None


def _read(
    database: Database,
    table: str,
    columns: Sequence[str],
    keyset: spanner.KeySet,
    snapshot: Any,
) -> list[list[Any]]:
    once: dict[str, Any] = {"retry": None, "timeout": CALL_SECONDS}
    every = with_keys(table, columns)
    if snapshot is not None:
        rows = list(snapshot.read(table, every, keyset, **once))
    else:
        with database.snapshot() as latest:
            rows = list(latest.read(table, every, keyset, **once))
    return opened(table, every, len(columns), rows)


def query(database: Database, statement: str, values: dict[str, int]) -> list[list[Any]]:
    """Return the rows of a SQL query over whole tables, for figures alone: no digest is checked.

    Args:
        values: the statement's parameters, all INT64.
    """
    kinds = dict.fromkeys(values, spanner.param_types.INT64)

    def ask() -> list[list[Any]]:
        with database.snapshot() as snapshot:
            return list(snapshot.execute_sql(statement, params=values, param_types=kinds))

    return administered(ask)  # type: ignore[no-any-return]


def change_everywhere(database: Database, statement: str, values: dict[str, int]) -> None:
    """Run a statement that changes any number of rows, each by itself and at least once.

    It is partitioned DML, which has no limit on rows and is no transaction: done twice, the
    statement must have the same effect.  ``values``: its parameters, all INT64.
    """
    kinds = dict.fromkeys(values, spanner.param_types.INT64)
    administered(lambda: database.execute_partitioned_dml(statement, values, kinds))


def prefix(*values: Any) -> spanner.KeyRange:
    """Return the range of all rows whose key begins with these values."""
    return spanner.KeyRange(start_closed=list(values), end_closed=list(values))


def from_on(*values: Any) -> spanner.KeyRange:
    """Return the range of rows that begin with all but the last value and are not before it."""
    return spanner.KeyRange(start_closed=list(values), end_closed=list(values[:-1]))


def between(first: Sequence[Any], last: Sequence[Any]) -> spanner.KeyRange:
    """Return the range of all rows whose key is at or behind ``first`` and before ``last``."""
    return spanner.KeyRange(start_closed=list(first), end_open=list(last))


class ExistsError(Exception):
    """Signals that a commit inserted a row that existed.

    An earlier attempt, or another worker, was first.
    """


class MissingError(Exception):
    """Signals that a commit updated a row that did not exist: its fencing epoch is not open."""


def commit(database: Database, fill: Callable[[Any], None], requires: bool = False) -> None:
    """Commit the mutations that ``fill`` puts into a batch, in one call; durable on return.

    Args:
        requires: some of them are updates of rows that must be there.

    Raises:
        ExistsError: an insert found its row: an attempt before, or somebody else, was first.
        MissingError: an update found no row.
        RunError: refused, or no answer for ``limits.COMMIT_RETRY_SECONDS``.
    """
    try:
        _RETRY(_commit)(database, fill)
    except exceptions.AlreadyExists:
        raise ExistsError from None
    except exceptions.NotFound as error:
        if requires:
            raise MissingError from None
        raise refused(error) from None
    except (exceptions.GoogleAPIError, GoogleAuthError) as error:
        raise refused(error) from None


def _commit(database: Database, fill: Callable[[Any], None]) -> None:
    with database.batch(timeout_secs=_OWN_RETRY_SECONDS) as batch:
        fill(Sealing(batch))


def transact(database: Database, work: Callable[[Any], Any]) -> Any:
    """Run ``work`` in a read-write transaction and return its result, durable on return.

    It is tried again when it was aborted, and when its outcome is unknown: ``work`` must then
    see by itself what an earlier attempt has written.
    """
    try:
        return _RETRY(database.run_in_transaction)(lambda real: work(Sealing(real)))
    except (exceptions.GoogleAPIError, GoogleAuthError) as error:
        raise refused(error) from None


def administered(call: Callable[[], Any]) -> Any:
    """Return the result of a call on the database itself, tried again like a commit."""
    try:
        return _RETRY(call)()
    except (exceptions.GoogleAPIError, GoogleAuthError, TimeoutError) as error:
        raise refused(error) from None


class NothingThereError(UsageError):
    """Signals that the instance, the database or a table does not exist."""


_UNREACHABLE = ("the database does not answer", "check the network and run again")
_RULES: dict[type[Exception], tuple[type[DpstreamError], str, str]] = {
    exceptions.NotFound: (
        NothingThereError,
        "no such instance, database or table",
        "check the URL and run `dpstream state init`",
    ),
    exceptions.PermissionDenied: (
        UsageError,
        "the account may not use the database",
        "grant it roles/spanner.databaseUser",
    ),
    exceptions.Unauthenticated: (
        UsageError,
        "the credentials are missing or have expired",
        "run `gcloud auth application-default login`",
    ),
    GoogleAuthError: (
        UsageError,
        "the credentials are missing or have expired",
        "run `gcloud auth application-default login`",
    ),
    exceptions.ServiceUnavailable: (RunError, *_UNREACHABLE),
    exceptions.DeadlineExceeded: (RunError, *_UNREACHABLE),
    _GoneError: (RunError, *_UNREACHABLE),
}
#: What gRPC says, under the code of a host that is not there, when no token could be had.
_NO_TOKEN = "metadata from plugin failed"


def refused(error: Exception) -> DpstreamError:
    """Return the coded error that stands for an error of the client.

    It goes by the error's class alone, since the text can hold keys of rows: what to correct is a
    ``UsageError``, what may pass a ``RunError``.
    """
    cause = getattr(error, "cause", None)  # of a retry that ran out of time
    if _NO_TOKEN in str(error):
        cause = GoogleAuthError()
    for candidate in (cause, error):
        for kind, (coded, rule, fix) in _RULES.items():
            if isinstance(candidate, kind):
                return coded("store", rule, fix)
    name = type(cause or error).__name__
    return RunError("store", f"the database refused ({name})", "check it and run again")
