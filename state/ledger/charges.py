"""One ledger per data set: what every run spent per unit, chained and refused beyond a limit.

A run is charged when it begins, before its first draw, and once: the charge is named by the
run id that its store committed (or its execution drew) and by the epoch.  Another run on the
same data (a corrected input, the same statement on a grown table) is fresh noise and a new
charge; so is a further epoch of a run, which a restore begins that cannot replay.

Entries form a hash chain over all data sets of the file, so an edited one, or one removed from
the middle, is noticed here; so is damage to any row (`state.ledger.seal`).  Every store
remembers the end of the chain as it last saw it: a ledger that no longer holds that entry (cut
off, restored from a backup, another file) is refused by ``refuse_older``.  ``state.ledger.lineage``
keeps in the same file which copy of a store goes on.
"""

import contextlib
import hashlib
import math
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from dpstream.accounting.composition import within
from dpstream.accounting.errors import PolicyError, RunError
from dpstream.accounting.figures import exact
from dpstream.accounting.plan.unit import composed
from dpstream.state.ledger.seal import check_pages, check_seal, damaged, put_seal
from dpstream.state.sqlite.file import DAMAGE, wary

#: What was run; ``run``: charged before kinds were recorded.
Kind = Literal["run", "stream", "choice", "sql", "session", "table", "workload"]

#: 2: kinds, epochs and tokens; 3: entries may hold the identity of their unit, the file has a seal.
SCHEMA_VERSION = 3
#: Seconds to wait for another process before the ledger counts as busy.
PATIENCE = 60.0
_DDL = """
CREATE TABLE IF NOT EXISTS entries (
  seq INTEGER PRIMARY KEY, data_set TEXT NOT NULL, run_id TEXT NOT NULL,
  entry TEXT NOT NULL, digest TEXT NOT NULL, UNIQUE (data_set, run_id));
CREATE TABLE IF NOT EXISTS tokens (
  run_id TEXT NOT NULL, token TEXT NOT NULL, previous TEXT, PRIMARY KEY (run_id, token));
CREATE TABLE IF NOT EXISTS ledger_meta (name TEXT PRIMARY KEY, value TEXT NOT NULL)
"""


class Charge(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one run spends per unit of a data set; see ``accounting.composition``.

    Attributes:
        run_id, plan_hash: the run and its public plan (statement, question).
        unit: the privacy unit in the words of entries from before there were identities.
        identity: canonical text of the unit (`accounting.plan.unit`), empty in such entries.
        periods: units that one person can have in the run, ``None`` where it has no end.
        together: the most of them whose effects add up, ``None``: all.
        alone: nothing is promised to several of them together.
        epsilon, delta: the run's own guarantee.
        mu: Gaussian-DP parameter of its noise, if it is accounted for so.
        rho: zCDP parameter of its noise, if it is accounted for so; with neither the charge is a
            plain (epsilon, delta).
        threshold_delta: part of delta its thresholds use (C b).
        kind: what was run.
        epoch: 0, or how often the run was restored without a replay.

    Raises:
        ValueError: a figure is negative, infinite or not a number.
    """

    run_id: str
    plan_hash: str
    unit: str
    epsilon: float
    delta: float
    mu: float | None
    threshold_delta: float
    kind: Kind = "run"
    epoch: int = 0
    identity: str = ""
    periods: int | None = 1
    together: int | None = 1
    alone: bool = False
    rho: float | None = None

    def __post_init__(self) -> None:
        noise = (self.mu or 0.0, self.rho or 0.0)
        figures = (self.epsilon, *noise, self.delta, self.threshold_delta)
        if not all(0 <= x < math.inf for x in figures) or self.epoch < 0:
            raise ValueError("a charge is made of finite figures that are not negative")
        if self.mu is not None and self.rho is not None:
            raise ValueError("a charge has a mu or a rho, not both")
        if self.mu is None and self.rho is None and self.threshold_delta:
            raise ValueError("a plain charge has all its delta in delta")
        if min(1 if n is None else n for n in (self.periods, self.together)) < 1:
            raise ValueError("a person has at least one unit")

    @property
    def name(self) -> str:
        """Names the charge within its data set: run id and epoch."""
        return self.run_id if self.epoch == 0 else f"{self.run_id}/{self.epoch}"


class Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The end of the chain as someone saw it: number and digest of the last entry."""

    data_set: str
    seq: int
    digest: str


class Entry(NamedTuple):
    """One line of a ledger, for people."""

    seq: int
    data_set: str
    charge: Charge


class Ledger:
    """The ledger of one data set.

    Args:
        path: SQLite file, shared by all jobs on the data set.
        data_set: name of the data set.

    Raises:
        PolicyError: the file is another program's, or of a newer version.
        RunError: it cannot be opened, or another process holds it for very long.
    """

    def __init__(self, path: str | Path, data_set: str) -> None:
        self.data_set = data_set
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, isolation_level=None, timeout=PATIENCE)
            try:
                wary(self._db)
                self._db.execute("PRAGMA synchronous = FULL")
                check_pages(self._db)
                if _version(self._db) != SCHEMA_VERSION:
                    self._upgrade()
            except BaseException:
                self._db.close()
                raise
        except (sqlite3.Error, OSError, UnicodeError) as error:
            raise _failed(error) from None

    def _upgrade(self) -> None:
        """Create what is missing; entries and their digests stay as they are."""
        with self._transaction() as db:
            if _version(db) != SCHEMA_VERSION:
                for statement in _DDL.split(";"):
                    db.execute(statement)
                row = ("schema_version", str(SCHEMA_VERSION))
                db.execute("INSERT OR REPLACE INTO ledger_meta VALUES (?, ?)", row)
                put_seal(db)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """One atomic and durable change, alone in the ledger.

        Raises:
            PolicyError: the ledger is damaged.
        """
        with self._transaction() as db:
            check_seal(db, _chained)
            yield db
            put_seal(db)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
        except (sqlite3.Error, UnicodeError) as error:
            raise _failed(error) from None

    def charge(self, charge: Charge, epsilon: float, delta: float) -> bool:
        """Charge a run unless the data set's limit forbids it; atomic and durable.

        Args:
            charge: what the run spends.
            epsilon, delta: the steward's limit per unit, over all runs.

        Returns:
            False if this run was charged before (a restart), True if it is charged now.

        Raises:
            PolicyError: the composition of all runs would exceed the limit, or the runs protect
                units whose costs do not add up (`accounting.plan.unit`).
        """
        with self.transaction():
            return self.charge_within(charge, epsilon, delta)

    def charge_within(self, charge: Charge, epsilon: float, delta: float) -> bool:
        """``charge`` as a part of an open ``transaction``."""
        entries = self.entries()
        if any(e.name == charge.name for e in entries):
            return False
        self._refuse(entries, charge, epsilon, delta)
        text = msgspec.json.encode(charge, order="sorted").decode()
        head = self.head()
        self._db.execute(
            "INSERT INTO entries (data_set, run_id, entry, digest) VALUES (?, ?, ?, ?)",
            (self.data_set, charge.name, text, _digest(head.digest, self.data_set, text)),
        )
        return True

    def check(self, charge: Charge, epsilon: float, delta: float) -> None:
        """Refuse a charge that ``charge`` would refuse now; writes nothing."""
        self._refuse(self.entries(), charge, epsilon, delta)

    def _refuse(self, entries: list[Charge], charge: Charge, epsilon: float, delta: float) -> None:
        # A run per user is no mu-GDP run per (user, period): refused, or counted as several.
        if not within(composed([*entries, charge]).spends, epsilon, delta):
            raise PolicyError(
                "ledger.limit",
                f"the runs on this data set would together spend more than epsilon {exact(epsilon)}"
                f" at delta {exact(delta)} per unit ({len(entries)} runs are charged already)",
                "continue a run on its own store, or ask the data steward for a larger limit",
            )

    def entries(self) -> list[Charge]:
        """Charges of this data set in order, after a check of the chain.

        Raises:
            PolicyError: the chain does not hold.
        """
        return [e.charge for e in self._lines() if e.data_set == self.data_set]

    def _lines(self) -> Sequence[Entry]:
        try:
            return _chained(self._db)
        except (sqlite3.Error, UnicodeError) as error:
            raise _failed(error) from None

    def head(self) -> Head:
        """The end of the chain (entry 0 with an empty digest in an empty ledger)."""
        row = self._db.execute("SELECT seq, digest FROM entries ORDER BY seq DESC LIMIT 1")
        return Head(self.data_set, *(row.fetchone() or (0, "")))

    def refuse_older(self, seen: Head) -> None:
        """Refuse if this is not the ledger, as old or newer, whose end was ``seen``.

        Raises:
            PolicyError: it lacks that entry, or the run was charged to another data set.
        """
        if seen.data_set != self.data_set:
            raise PolicyError(
                "ledger.data_set",
                "this run was charged to another data set",
                "name that data set again; other data needs a run of its own",
            )
        row = self._db.execute("SELECT digest FROM entries WHERE seq = ?", (seen.seq,)).fetchone()
        if seen.seq and (row is None or row[0] != seen.digest):
            raise PolicyError(
                "ledger.path",
                "is an older or replaced ledger: entries that this run's store has seen are gone",
                "bring back the newest ledger of the data set",
            )

    def close(self) -> None:
        """Close the file."""
        self._db.close()


def read_ledger(path: str | Path) -> list[Entry]:
    """Every entry of a ledger's file in order, chain checked; writes nothing.

    Raises:
        UsageError, PolicyError, RunError: it is no ledger, a broken one, or cannot be read.
    """
    try:
        db = sqlite3.connect(
            f"{Path(path).absolute().as_uri()}?mode=ro",
            uri=True,
            timeout=PATIENCE,
            isolation_level=None,
        )
        try:
            wary(db)
            db.execute("BEGIN")  # one state of it
            check_pages(db)
            version = _version(db)
            if version == 0:
                raise PolicyError("ledger.path", "is not a ledger", "name the ledger's file")
            if version == SCHEMA_VERSION:
                check_seal(db, _chained)
            return _chained(db)
        finally:
            db.close()
    except (sqlite3.Error, UnicodeError) as error:
        raise _failed(error) from None


def _version(db: sqlite3.Connection) -> int:
    """Schema version of the file, 1 before it was recorded, 0 if it is empty."""
    tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
    if tables and "entries" not in tables:
        raise PolicyError(
            "ledger.path", "the file is another program's database", "choose another path"
        )
    if "ledger_meta" not in tables:
        return 1 if tables else 0
    row = db.execute("SELECT value FROM ledger_meta WHERE name = 'schema_version'").fetchone()
    version = int(row[0]) if row and row[0].isdecimal() else SCHEMA_VERSION + 1
    if version > SCHEMA_VERSION:
        raise PolicyError(
            "ledger.path",
            f"its schema version is beyond {SCHEMA_VERSION}, the one of this program",
            "use the newer program that wrote it",
        )
    return version


def _chained(db: sqlite3.Connection) -> list[Entry]:
    previous, lines = "", []
    for seq, data_set, text, digest in db.execute(
        "SELECT seq, data_set, entry, digest FROM entries ORDER BY seq"
    ):
        if digest != _digest(previous, data_set, text):
            raise PolicyError(
                "ledger.path", "its hash chain is broken", "restore the ledger from a backup"
            )
        previous = digest
        try:
            lines.append(Entry(seq, data_set, msgspec.json.decode(text, type=Charge)))
        except msgspec.MsgspecError:
            raise PolicyError(
                "ledger.path", "holds an entry of another form", "use the program that wrote it"
            ) from None
    return lines


def _digest(previous: str, data_set: str, text: str) -> str:
    chained = "\0".join((previous, data_set, text)).encode(errors="surrogateescape")
    return hashlib.blake2b(chained, digest_size=16).hexdigest()


def _failed(error: Exception) -> RunError | PolicyError:
    code = getattr(error, "sqlite_errorname", None) or type(error).__name__
    if code.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return RunError(
            "ledger.path",
            f"the ledger is busy: another process has held it for {PATIENCE:g} s",
            "let that process end, then run again; nothing was charged",
        )
    if isinstance(error, UnicodeError) or code.startswith(DAMAGE):
        return damaged()
    if code == "SQLITE_NOTADB":
        fix = damaged().fix
        return PolicyError("ledger.path", "is damaged, or no ledger", f"{fix}, or check the path")
    return RunError("ledger.path", f"the ledger cannot be used ({code})", "check path and rights")
