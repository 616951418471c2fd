"""The embedded store: SQLite in WAL mode with durable commits, and a log of steps.

Key states are kept in memory per (window, shard).  A step is written as one row with its releases
(the outbox) and its progress.  The row of the last step of a (window, shard) in a commit also has
the states that all its steps in this commit changed, as Arrow blobs.  Row-wise upserts would be an
order of magnitude slower.  A cold start replays the log.

A backup is a copy of the file, and a restore puts one file in the place of another.  A file under
its final name is always whole: it is made as a hidden draft beside it
(`state.durable`), synced, and linked or renamed.  Behind the last page of a backup stands a digest
of all of it; SQLite does not look there.
"""

import contextlib
import functools
import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
from typing_extensions import override

from dpstream.accounting.arrays import Ids
from dpstream.accounting.errors import RunError, UsageError
from dpstream.state import arrow, durable
from dpstream.state.disk_errors import file_error
from dpstream.state.durable import PRIVATE, SIDES, make_folder, sync
from dpstream.state.idtable import IdTable
from dpstream.state.retention_store import Selection
from dpstream.state.seals import refuse_damage
from dpstream.state.sqlite.database import open_file, sqlite3
from dpstream.state.sqlite.file import (
    StepRow,
    UnitRow,
    add_selection,
    admission_row,
    check_all,
    check_structure,
    coded_errors,
    connect,
    failed,
    read_identity,
    releases_of,
    step_row,
)
from dpstream.state.sqlite.retention import INSERT_ADMISSION, SqliteRetention
from dpstream.state.store import (
    Admitted,
    KeyShard,
    OvertakenError,
    RunIdentity,
    StepResult,
    Store,
    UnitShard,
)

#: What stands behind a backup.
_MARK, _DIGEST = b"dpstream backup ", functools.partial(hashlib.blake2b, digest_size=16)
#: Pages copied between two reports of progress.
_PAGES = 4096


class _Step(NamedTuple):
    """A step that waits for its group's commit.

    Attributes:
        window, shard, trigger: its name.
        releases: Arrow bytes of what it releases.
        selected: what it selected, where that is remembered.
    """

    window: int
    shard: int
    trigger: int
    releases: bytes
    states: KeyShard
    result: StepResult
    selected: Selection | None


class _Group(threading.local):
    """The group that the thread has open."""

    steps: list[_Step] | None = None


class SqliteStore(SqliteRetention, Store):
    """One run's state in one SQLite file.

    Args:
        path: the database file; it must exist (see ``create_store``).
        key_schema: Arrow schema of the key columns.
        streams: integer sums kept per key (``Design.sums``).
        db: a connection to the file that is open already.
    """

    def __init__(
        self,
        path: str | Path,
        key_schema: pa.Schema,
        streams: int,
        db: sqlite3.Connection | None = None,
    ) -> None:
        super().__init__(path, key_schema, streams, db)
        self._group = _Group()
        self._key_shards: dict[tuple[int, int], KeyShard] = {}
        self._unit_rows: dict[int, UnitRow] = {}

    @override
    def key_shard(self, window: int, shard: int) -> KeyShard:
        with self._lock:
            states = self._key_shards.get((window, shard))
            if states is None:
                states = self._key_shards[window, shard] = self._replayed(window, shard)
            return states

    @override
    def load_keys(self, window: int, shard: int, trigger: int, states: KeyShard, ids: Ids) -> None:
        """Do nothing: all keys of a (window, shard) are in memory."""

    @override
    def commit_step(
        self, window: int, shard: int, trigger: int, states: KeyShard, result: StepResult
    ) -> pa.RecordBatch:
        if trigger != states.committed + 1:  # the row's uniqueness tells the rest
            self.forget(window, shard)
            raise OvertakenError
        ahead = self.released_ahead(window, shard, trigger) if self._has_released_ahead else None
        everything = arrow.merged([result.releases, *([] if ahead is None else [ahead])])
        releases = arrow.to_bytes(everything)
        selected = None
        if result.selected is not None and len(result.selected):
            keys = arrow.selected_keys(states, result.selected)
            selected = Selection(result.trigger_time, window, keys)
        step = _Step(window, shard, trigger, releases, states, result, selected)
        group = self._group.steps
        states.mark_committed(trigger, logged=False)
        if group is not None:
            group.append(step)
        else:
            self._write_steps([step])
        if result.closes:
            self.forget(window, shard)
        return everything

    @override
    @contextlib.contextmanager
    def grouped(self) -> Iterator[None]:
        group: list[_Step] = []
        self._group.steps = group
        try:
            yield
            self._write_steps(group)
        except BaseException:
            for step in group:
                self.forget(step.window, step.shard)
            raise
        finally:
            self._group.steps = None

    def _write_steps(self, steps: list[_Step]) -> None:
        """Commit steps in one transaction, all or none; their states are dropped if it fails."""
        if not steps:
            return
        closed = {(step.window, step.shard) for step in steps if step.result.closes}
        rows = list(_rows(steps, closed))
        try:
            with self._lock, self._db:
                self._db.execute("BEGIN IMMEDIATE")
                if min(step.window for step in steps) < self.retained_windows.dropped:
                    raise OvertakenError  # long ago: the rows that would tell are gone
                for row in rows:
                    self._db.execute("INSERT INTO steps VALUES (?, ?, ?, ?, ?, ?, ?)", row)
                for step in steps:
                    if step.selected is not None:
                        add_selection(self._db, step.shard, step.selected)
                for name in closed:
                    self._db.execute(
                        "UPDATE steps SET keys = NULL, states = NULL, pairs = NULL"
                        " WHERE window = ? AND shard = ? AND states IS NOT NULL",
                        name,
                    )
                    for table in ("snapshots", "carried"):
                        self._db.execute(
                            f"DELETE FROM {table} WHERE window = ? AND shard = ?", name
                        )
        except (sqlite3.Error, RunError, OvertakenError) as error:
            for step in steps:
                self.forget(step.window, step.shard)
            if isinstance(error, sqlite3.IntegrityError):
                raise OvertakenError from None
            raise failed(error, self._db) if isinstance(error, sqlite3.Error) else error from None
        for step in steps:
            step.states.mark_committed(step.states.committed)

    @override
    def committed_releases(self, window: int, shard: int, trigger: int) -> pa.RecordBatch | None:
        with self._lock:
            row = next(
                self._read(
                    "SELECT releases FROM steps WHERE window = ? AND shard = ? AND trigger = ?",
                    (window, shard, trigger),
                ),
                None,
            )
        return releases_of(window, shard, trigger, row[0]) if row else None

    @override
    def forget(self, window: int, shard: int) -> None:
        with self._lock:
            self._key_shards.pop((window, shard), None)

    @override
    def selections(self, shard: int, after: int, upto: int | None = None) -> list[Selection]:
        selection_rows = super().selections(shard, after, upto)
        last = (1 << 62) if upto is None else upto
        return selection_rows + [
            step.selected
            for step in self._group.steps or ()
            if step.shard == shard
            and step.selected is not None
            and after < step.selected.trigger_time <= last
        ]

    @override
    def unit_shard(self, shard: int) -> UnitShard:
        with self._lock:
            units = self._unit_shards.get(shard)
            if units is None:
                units = UnitShard()
                with self.snapshot():
                    rows, row = self._admissions(shard), self._unit_row(shard)
                arrow.replay_units(units, rows)
                arrow.count_keys(units, rows)
                units.forgotten, units.ahead = row.forgotten, row.reach > units.decided
                self._unit_shards[shard], self._unit_rows[shard] = units, row
            return units

    @override
    def load_units(self, shard: int, units: UnitShard, ids: Ids) -> None:
        """Do nothing: all units of a shard are in memory."""

    @override
    def commit_units(
        self, shard: int, trigger_time: int, units: UnitShard, admitted: Admitted
    ) -> None:
        try:
            with self._lock, self._db:
                self._db.execute("BEGIN IMMEDIATE")
                row, seen = self._unit_row(shard), self._unit_rows[shard]
                trigger_time_and_slots = self.unit_progress(shard).decided, row.generation
                if trigger_time_and_slots != (units.decided, seen.generation):
                    raise OvertakenError
                for piece in arrow.unit_blobs(units, admitted):
                    self._db.execute(INSERT_ADMISSION, admission_row(shard, trigger_time, *piece))
        except sqlite3.Error as error:
            self.forget_units(shard)
            raise failed(error, self._db) from None
        except (OvertakenError, RunError):
            self.forget_units(shard)
            raise
        units.decided, units.logged = trigger_time, units.table.size
        units.forgotten, units.ahead = row.forgotten, row.reach > trigger_time

    @override
    def forget_units(self, shard: int) -> None:
        with self._lock:
            self._unit_shards.pop(shard, None)

    @override
    def admitted_before(self, shard: int, units: UnitShard) -> tuple[IdTable, Admitted]:
        with self._lock, self.snapshot():
            row, rows = self._unit_row(shard), self._admissions(shard)
        units.forgotten, everything = row.forgotten, arrow.records_of(rows)
        if row.generation != self._unit_rows[shard].generation:
            # Another worker has given the units other slots since these were read.
            there = UnitShard()
            arrow.replay_units(there, rows)
            everything = arrow.moved(everything, units.table.find(there.table.ids))
        return arrow.indexed(everything)

    @override
    def close(self) -> None:
        with self._lock:
            self._db.close()


def _rows(steps: Sequence[_Step], closed: Set[tuple[int, int]]) -> Iterator[StepRow]:
    """Yield the rows of steps that are committed together, all or none.

    The last step of a (window, shard) has what all of them have changed: one set of blobs for many
    small steps, since no reader sees the states between them.  The others have empty ones
    (``arrow.COME_LATER``), so that a replay notices if the last row is lost.
    """
    changes: dict[tuple[int, int], list[_Step]] = {}
    for step in steps:
        changes.setdefault((step.window, step.shard), []).append(step)
    for step in steps:
        of_shard = changes[step.window, step.shard]
        blobs: Iterable[bytes] = arrow.COME_LATER
        if (step.window, step.shard) in closed:
            blobs = ()
        elif step is of_shard[-1]:
            blobs = arrow.step_blobs(step.states, [other.result for other in of_shard])
        yield step_row(step.window, step.shard, step.trigger, step.releases, blobs)


def backup_file(
    path: str | Path, out: Path, progress: Callable[[int, int], None] | None = None
) -> RunIdentity:
    """Copy a store's file to ``out`` while a run may be writing: one state of it, checked, synced,
    for its owner only; returns its identity.

    Raises:
        UsageError: ``out`` exists (nothing is overwritten).
        RunError: it cannot be written, or the copy is damaged; ``out`` is not there then.
    """
    refuse_existing(out)
    with drafted(out) as draft:
        with contextlib.closing(connect(path)) as source, coded_errors(out):
            read_identity(source)
            with contextlib.closing(open_file(draft)) as target:
                # The open transaction pins one state; other writers go on beside it.
                source.execute("BEGIN")
                source.execute("SELECT count(*) FROM meta").fetchone()

                def report_pages(_: int, left: int, total: int) -> None:
                    if progress is not None:
                        progress(total - left, total)

                source.backup(target, pages=_PAGES, progress=report_pages)
                target.execute("PRAGMA journal_mode = DELETE")
        identity = check_file(draft)
        seal_backup(draft)
        publish(draft, out)
        return identity


def seal_backup(draft: Path) -> None:
    """Append the digest of a backup that was checked to its file."""
    with open(draft, "r+b") as file:
        digest = hashlib.file_digest(file, _DIGEST).digest()
        file.write(_MARK + digest)


def copy_backup(file: Path, copy: Path) -> None:
    """Copy a backup without its digest.

    Raises:
        PolicyError: it has none, or one that does not fit.
    """
    shutil.copyfile(file, copy)
    with open(copy, "r+b") as copy_file:
        size = copy_file.seek(0, os.SEEK_END) - len(_MARK) - _DIGEST().digest_size
        copy_file.seek(max(0, size))
        seal = copy_file.read()
        copy_file.truncate(max(0, size))
        copy_file.seek(0)
        refuse_damage(_MARK + hashlib.file_digest(copy_file, _DIGEST).digest() != seal)


def refuse_existing(out: Path) -> None:
    """Refuse a backup whose file exists: nothing is overwritten.

    Raises:
        UsageError: it exists.
    """
    if out.exists():
        raise UsageError("backup", "the file exists", "choose another name, or move it away")


@contextlib.contextmanager
def drafted(out: Path) -> Iterator[Path]:
    """Yield an empty draft beside ``out``, for its owner only; it is gone when the block ends.

    Drafts that killed attempts have left there go first: they may hold much of the disk.
    """
    try:
        make_folder(out.parent, PRIVATE)
        durable.sweep(out.parent)
        with durable.drafted(out) as draft:
            yield draft
    except OSError as error:
        raise _no_file(error) from None


def _no_file(error: OSError) -> RunError:
    return file_error("store", "a file beside it cannot be written", error)


def check_file(path: Path) -> RunIdentity:
    """Check all content of a file that is not in use, and return its identity.

    Raises:
        PolicyError: damaged, or no store of this program.
    """
    with contextlib.closing(connect(path)) as db, coded_errors(path):
        identity = read_identity(db)
        check_structure(db)
        check_all(db)
        db.execute("PRAGMA journal_mode = DELETE")
        return identity


def publish(draft: Path, out: Path) -> None:
    """Give a draft its name durably, unless a file has it.

    Raises:
        UsageError: the file exists.
    """
    sync(draft)
    if not out.exists():
        _move_sides(out, out.with_name(f"{out.name}.lost"))
    try:
        os.link(draft, out)
    except FileExistsError:
        refuse_existing(out)
    except OSError:  # a file system without hard links
        os.rename(draft, out)
    sync(out.parent)


def replace_file(path: Path, draft: Path) -> Path:
    """Put a draft in a store's place, which is held ``alone``; return where the old one is kept.

    At every instant the name belongs to the old or to the new file.
    """
    aside = next(
        name
        for name in (path.with_name(f"{path.name}.old{n or ''}") for n in range(10_000))
        if not name.exists()
    )
    try:
        sync(draft)
        _move_sides(path, aside)
        try:
            os.link(path, aside)
        except OSError:  # a file system without hard links: a moment without the name
            os.rename(path, aside)
        os.replace(draft, path)
        sync(path.parent)
    except OSError as error:
        raise _no_file(error) from None
    return aside


def _move_sides(path: Path, aside: Path) -> None:
    """A write-ahead log that is left (of a damaged or lost file) must not meet another file."""
    for side in SIDES:
        left = Path(f"{path}{side}")
        if left.exists() and left.stat().st_size:
            os.rename(left, f"{aside}{side}")
        else:
            left.unlink(missing_ok=True)
