"""The part of the Store contract that outlives runs: expiry, sizes, copies of a whole store.

``state.retention`` decides what may go and ``state.transfer`` how a store becomes another one; a
store gives them the small methods below.  Pieces are columnar and bounded in rows, so that a
store of any size is copied in bounded memory; they name keys and units by their ids, never by
a store's own numbers.

Two kinds of windows take no more steps although a run may ask for them: those whose releases
were dropped from the outbox (all committed, and the sink has them) and those that a restore
abandoned.  ``RetainedWindows`` says up to which window that is; the flow skips those.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from dpstream.accounting.arrays import Bool, Ids, Int32, Int64

if TYPE_CHECKING:
    from dpstream.state.store import Admitted

#: Rows of a piece.
PIECE_ROWS = 1_000_000
RETAINED_WINDOWS, _RESHARDS = "windows", "leads"
#: Note of a store that was restored: ``BEGIN`` until it has begun once (whatever token it holds
#: is accepted; ``ANEW``: in an epoch of its own), then ``REPLAY`` until it has caught up with its
#: sink.
RESTORE = "restore"
BEGIN, ANEW, REPLAY = "begin", "anew", "replay"


class RetainedWindows(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The windows that a store still keeps; all of it is public.

    Attributes:
        dropped: releases of windows before it are gone from the outbox; the sink has them.
        abandoned: windows before it were given up by a restore that could not replay.
        epochs: (epoch, window before which its noise is): earlier epochs of the run, in order.
    """

    dropped: int = 0
    abandoned: int = 0
    epochs: tuple[tuple[int, int], ...] = ()

    @property
    def first(self) -> int:
        """The first window whose steps a run still takes or reads back."""
        return max(self.dropped, self.abandoned)

    def epoch_of(self, window: int, present: int) -> int:
        """Return the epoch that draws a window's releases; ``present``: that of the store."""
        return next((epoch for epoch, before in self.epochs if window < before), present)


class ReshardProgress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The progress of the shards of a window when it was resharded.

    Keys of a shard that was ahead have taken their steps up to ``progress[shard]``; what was
    released of them is ``released_ahead`` until the new shards get there.
    """

    progress: tuple[int, ...]


class KeyPiece(NamedTuple):
    """Some keys of a (window, shard) with everything that is known of them.

    Attributes (arrays by row):
        keys: key columns and ``_id`` (16 bytes).
        units, values (n, V), due, selected, done: see ``KeyShard``.
        pair_rows, pair_units: unit pairs of these keys: row of the piece, and (m, 2) ids.
    """

    keys: pa.Table
    units: Int64
    values: Int64
    due: Int32
    selected: Int32
    done: Bool
    pair_rows: Int64
    pair_units: Ids


class UnitPiece(NamedTuple):
    """Some units of a shard.

    (n, 2) ids, admitted pairs, the last trigger time at which a record of theirs can be decided
    (``NEVER``: at any), and first pairs (``UnitShard.indices``).
    """

    ids: Ids
    counts: Int32
    period_end: Int32
    indices: Int32


class PositionPiece(NamedTuple):
    """Some applied positions of a unit shard.

    (n, 2) ids of their units, and the records (``Admitted``), whose own ``unit`` has no meaning
    outside of the shard.
    """

    ids: Ids
    records: "Admitted"

    def at(self, rows: Int64) -> "PositionPiece":
        """Return the positions of some rows."""
        return PositionPiece(self.ids[rows], self.records.at(rows))

    def of_units(self, slots: Int64) -> "Admitted":
        """Return the records with the slots of their units."""
        return msgspec.structs.replace(self.records, unit=slots.astype(np.int32))


class Selection(NamedTuple):
    """The keys of a shard that one step selected, or a part of them.

    Attributes:
        trigger_time: global trigger time of the step.
        window: the window of the step.
        keys: key columns and ``_id`` (16 bytes).
    """

    trigger_time: int
    window: int
    keys: pa.RecordBatch


class UnitProgress(NamedTuple):
    """The progress of a unit shard.

    Attributes:
        decided: last trigger time whose records of all units are decided.
        forgotten: positions that were decided up to this trigger time may be gone.
        reach: last trigger time up to which records of some units are decided (>= ``decided``).
    """

    decided: int = 0
    forgotten: int = 0
    reach: int = 0


class PartSize(NamedTuple):
    """Size of a part of a store.

    Attributes:
        name: ``outbox``, ``keys``, ``selections``, ``units`` or ``positions``.
        window: the window it belongs to, if it belongs to one.
        rows: rows of the database (public); ``bytes`` says how much private data there is and
            is for the operator only.
    """

    name: str
    window: int | None
    rows: int
    bytes: int


class RetentionStore(ABC):
    """The operations of a store for expiry, backup and reshards; inherited by ``Store``."""

    @abstractmethod
    def metadata(self, name: str) -> str | None:
        """Return a small public text that is stored beside the state; ``None``: there is none."""

    @abstractmethod
    def swap_metadata(self, name: str, old: str | None, new: str | None) -> bool:
        """Replace a note durably if it is still ``old`` (``None``: absent); return success."""

    def set_metadata(self, name: str, new: str | None) -> None:
        """Replace a note whatever it was."""
        while not self.swap_metadata(name, self.metadata(name), new):
            pass

    @property
    def retained_windows(self) -> RetainedWindows:
        """The windows that the store still keeps, and the epochs of those before."""
        text = self.metadata(RETAINED_WINDOWS)
        return (
            RetainedWindows() if text is None else msgspec.json.decode(text, type=RetainedWindows)
        )

    @retained_windows.setter
    def retained_windows(self, retained: RetainedWindows) -> None:
        """Replace all retained windows."""
        self.set_metadata(RETAINED_WINDOWS, msgspec.json.encode(retained).decode())

    @property
    def reshards(self) -> dict[int, list[ReshardProgress]]:
        """The progress of a window's shards at each reshard within it, by window."""
        text = self.metadata(_RESHARDS)
        return (
            {} if text is None else msgspec.json.decode(text, type=dict[int, list[ReshardProgress]])
        )

    @reshards.setter
    def reshards(self, reshards: dict[int, list[ReshardProgress]]) -> None:
        """Replace all progress at reshards."""
        self.set_metadata(_RESHARDS, msgspec.json.encode(reshards).decode() if reshards else None)

    @property
    def restoring(self) -> bool:
        """Return whether the store was restored from a backup and is behind the sink.

        Nothing new is published before everything that was published has been compared.
        """
        return self.metadata(RESTORE) is not None

    @property
    def anew(self) -> bool:
        """Return whether the store was restored into a new epoch that has not begun.

        Nothing that the epoch will release was ever published.
        """
        return self.metadata(RESTORE) == ANEW

    def begin_restoring(self, anew: bool = False) -> None:
        """Mark the store as restored on purpose; the next begin accepts it for this run.

        Args:
            anew: what was open is given up; see ``anew`` above.
        """
        self.set_metadata(RESTORE, ANEW if anew else BEGIN)

    def finish_restoring(self) -> None:
        """Record that all published releases are committed again."""
        self.set_metadata(RESTORE, None)

    @abstractmethod
    def progress(self, first: int = 0) -> list[tuple[int, int, int]]:
        """Return (window, shard, last committed trigger) of every (window, shard) that has
        anything.

        The trigger is 0 where a copy put keys or releases from ahead and no step was committed
        since.

        Args:
            first: leave out the windows before it; the call reads no more than is asked for.
        """

    @abstractmethod
    def unit_progress(self, shard: int) -> UnitProgress:
        """Return the progress of a unit shard (all zero when it was never decided)."""

    # --- expiry ---

    @abstractmethod
    def forget_positions(self, shard: int, trigger_time: int) -> None:
        """Drop applied positions that were decided up to ``trigger_time``, and then the counters of
        units whose ``until`` is at or before it and that have no position left.

        The counts of all other units stay as they are: they no longer are the sums of the
        positions' pairs.  ``unit_progress(shard).forgotten`` becomes ``trigger_time`` (it never
        falls) before or together with the first row that goes: whoever finds a position that should
        be gone ignores it, so the deletion may take any number of commits and be cut short.  A
        worker that decides the shard at the same time must either keep its counters or be refused
        at its commit, never write a count of zero for a unit that has one.
        """

    @abstractmethod
    def drop_releases(self, before: int) -> None:
        """Drop the releases of windows before ``before``, and sooner or later their progress.

        ``committed_releases`` of a dropped step is ``None``.  The caller has set
        ``retained_windows`` so that no run asks for them, and made sure that all of them are
        committed.  From then on a worker that was asleep cannot commit a step of such a window: it
        is overtaken.
        """

    @abstractmethod
    def forget_selections(self, trigger_time: int) -> None:
        """Drop selections at or before a trigger time, which no window reads again."""

    @abstractmethod
    def compact(self) -> None:
        """Return unused space to the disk, as far as the database does not by itself."""

    @abstractmethod
    def parts(self) -> list[PartSize]:
        """Return sizes by part; windows of the outbox and of key states are listed separately."""

    # --- reading everything ---

    @abstractmethod
    def snapshot(self) -> AbstractContextManager[None]:
        """Let all reads of the block see one state of the store, whatever others commit."""

    @abstractmethod
    def key_pieces(self, window: int, shard: int) -> Iterator[KeyPiece]:
        """Yield all keys of a (window, shard) as of its last committed step, and pairs with their
        keys.

        Keys that took step ``committed + 1`` in a commit of a part of it are ``done``, and the
        part's releases are ``released_ahead`` at that trigger.
        """

    @abstractmethod
    def selections(self, shard: int, after: int, upto: int | None = None) -> list[Selection]:
        """Return the selections of a shard's tests after trigger time ``after`` and up to ``upto``.

        Without ``upto`` all are returned.  They are in order of trigger time and window, and
        include those of committed steps, of commits of a part of one, and of those that wait in the
        thread's own group.

        Only what was committed as ``StepResult.selected`` is there, and it outlives the releases.
        """

    @abstractmethod
    def unit_pieces(self, shard: int) -> Iterator[UnitPiece]:
        """Yield all units of a shard, each once."""

    @abstractmethod
    def position_pieces(self, shard: int) -> Iterator[PositionPiece]:
        """Yield all applied positions of a shard decided after ``forgotten``, each once."""

    @abstractmethod
    def released_ahead(self, window: int, shard: int, trigger: int) -> pa.RecordBatch | None:
        """Return the releases that other shards committed ahead for keys of this shard, or
        ``None``.

        They were committed before a reshard, or are left from an interrupted commit.

        ``commit_step`` of this step commits and returns them together with the step's own.
        They may stay until the window closes."""

    # --- filling a new store ---

    @abstractmethod
    def filling(self) -> AbstractContextManager[None]:
        """Fill a store that was just created; ``put_*`` may be called inside this block only.

        All of it is durable when the block ends.  A store whose block did not end is not at its
        place yet, or is refused by whoever opens it.
        """

    @abstractmethod
    def put_step(
        self, window: int, shard: int, trigger: int, releases: pa.RecordBatch | None
    ) -> None:
        """Put an outbox row (``None``: dropped) and progress up to it; triggers come in order."""

    @abstractmethod
    def put_released_ahead(
        self, window: int, shard: int, trigger: int, releases: pa.RecordBatch
    ) -> None:
        """Put a row of ``released_ahead``, once for each (window, shard, trigger)."""

    @abstractmethod
    def put_keys(self, window: int, shard: int, piece: KeyPiece) -> None:
        """Put keys that the (window, shard) does not have yet; windows come one after the other."""

    @abstractmethod
    def put_selection(self, shard: int, selection: Selection) -> None:
        """Store the selection of a step for keys of this shard; in order of trigger time."""

    @abstractmethod
    def put_units(self, shard: int, piece: UnitPiece) -> None:
        """Put units that the shard does not have yet."""

    @abstractmethod
    def put_positions(self, shard: int, piece: PositionPiece) -> None:
        """Put applied positions of units that were put before; the counts stay as they were put."""

    @abstractmethod
    def put_unit_progress(self, shard: int, progress: UnitProgress) -> None:
        """Store the progress of a unit shard, after all its units and positions."""


def piece_bounds(rows: int, most: int = PIECE_ROWS) -> Iterator[slice]:
    """Yield slices of at most ``most`` rows that cover ``rows``."""
    for at in range(0, rows, most):
        yield slice(at, min(rows, at + most))


def take_keys(piece: KeyPiece, rows: Int64) -> KeyPiece:
    """Return the piece with some of its rows, pairs included."""
    place = np.full(len(piece.units), -1, np.int64)
    place[rows] = np.arange(len(rows))
    mine = place[piece.pair_rows] >= 0
    return KeyPiece(
        piece.keys.take(pa.array(rows)),
        piece.units[rows],
        piece.values[rows],
        piece.due[rows],
        piece.selected[rows],
        piece.done[rows],
        place[piece.pair_rows[mine]],
        piece.pair_units[mine],
    )
