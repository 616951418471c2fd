"""The life of the Spanner store: expiry, sizes, and copies in pieces.

A store is filled as a new generation beside the one in force (``state.spanner.schema``), so
nobody sees it before the switch.  What was released ahead, of steps that are to come, stands in
``Steps`` as the parts of an interrupted commit do.
"""

import contextlib
from abc import abstractmethod
from base64 import b64decode
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from google.cloud import spanner
from typing_extensions import override

from dpstream.accounting.arrays import Ids
from dpstream.accounting.limits import COMMIT_MUTATIONS
from dpstream.state import arrow
from dpstream.state.retention_store import (
    KeyPiece,
    PartSize,
    PositionPiece,
    RetentionStore,
    Selection,
    UnitPiece,
    UnitProgress,
)
from dpstream.state.spanner import schema
from dpstream.state.spanner.client import (
    CELL_SEAL,
    GENERATION,
    as_text,
    between,
    change_everywhere,
    commit,
    connect,
    from_on,
    prefix,
    query,
    read_rows,
    transact,
)
from dpstream.state.spanner.fill import KEY_MUTATIONS, PROGRESS, Filled, states_of
from dpstream.state.spanner.rows import (
    PLAIN,
    Layout,
    UnitRows,
    admitted_of,
    cell,
    ids_from,
    ids_in,
    pack_headers,
    unpack_columns,
    unpack_states,
)
from dpstream.state.spanner.schema import (
    BOUND,
    FORGOTTEN,
    REACH,
    SELECTED,
    Mutations,
    clear,
    note_name,
    parts,
    read_identity,
    read_metadata,
    swap_metadata,
)
from dpstream.state.spanner.shards import SpannerUnitShard, window_of
from dpstream.state.store import RunIdentity

#: Shards whose progress is read by ranges of their own.
_FEW = 4096
#: Units that one transaction of expiry reads and writes.
_PAGE = COMMIT_MUTATIONS // 16


class SpannerRetention(RetentionStore):
    """The base of ``SpannerStore``: the database, and the part of it that outlives runs.

    Args:
        url: ``spanner://PROJECT/INSTANCE/DATABASE``; it must be initialised.
        key_schema: Arrow schema of the key columns.
        streams: integer sums kept per key (``Design.sums``).
        successor: identity and number of a generation that is to be filled.
    """

    _filled: Filled

    def __init__(
        self,
        url: str,
        key_schema: pa.Schema,
        streams: int,
        successor: tuple[RunIdentity, int] | None = None,
        layout: Layout = PLAIN,
    ) -> None:
        self._schema, self._streams, self._layout = key_schema, streams, layout
        self._db = connect(url)
        self.identity, self.generation = successor or read_identity(self._db)
        self._first_part = self.generation * GENERATION
        self._snapshot: Any = None
        self._unit_shards: dict[int, SpannerUnitShard] = {}
        self._fencing_epoch: dict[int, int] = {}

    def _rows(
        self,
        table: str,
        columns: Sequence[str],
        keys: Sequence[Sequence[Any]] = (),
        ranges: Sequence[spanner.KeyRange] = (),
    ) -> Iterator[list[Any]]:
        """Rows, as of the open snapshot if there is one."""
        return read_rows(self._db, table, columns, keys, ranges, self._snapshot)

    # --- notes --------------------------------------------------------------------------

    @override
    def metadata(self, name: str) -> str | None:
        return read_metadata(self._db, note_name(self.generation, name))

    @override
    def swap_metadata(self, name: str, old: str | None, new: str | None) -> bool:
        return swap_metadata(self._db, note_name(self.generation, name), old, new)

    # --- progress -----------------------------------------------------------------------

    @override
    def progress(self, first: int = 0) -> list[tuple[int, int, int]]:
        parts = range(self._first_part, self._first_part + self.identity.shards)
        few = first and len(parts) <= _FEW
        mine = between([self._first_part], [self._first_part + GENERATION])
        ranges = [from_on(part, first) for part in parts] if few else [mine]
        rows = self._rows("Progress", PROGRESS, ranges=ranges)
        return [(w, part - self._first_part, step) for part, w, step in rows if w >= first]

    def _reached(self, part: int, window: int) -> int | None:
        rows = self._rows("Progress", ("Reached",), [(part, window)])
        return next((int(reached) for (reached,) in rows), None)

    @override
    def unit_progress(self, shard: int) -> UnitProgress:
        progress, under_way = self._unit_rows(self._first_part + shard)
        decided = progress.get(BOUND, 0)
        reach = max([decided, progress.get(REACH, 0), *under_way])
        return UnitProgress(decided, progress.get(FORGOTTEN, 0), reach)

    @abstractmethod
    def _unit_rows(self, part: int) -> tuple[dict[int, int], list[int]]:
        """(progress of a unit shard by kind, trigger times a decision under way goes up to)."""

    # --- expiry -------------------------------------------------------------------------

    @override
    def forget_positions(self, shard: int, trigger_time: int) -> None:
        part = self._first_part + shard
        if trigger_time <= self.unit_progress(shard).forgotten:
            return
        # First of all: from now on nobody uses a position that is about to go.
        self._raise_forgotten(part, trigger_time)
        decided = self._unit_rows(part)[0].get(BOUND, 0)
        epoch = schema.of_decision(decided)
        if decided and self._fencing_epoch.get(part) != epoch:  # once a fencing epoch
            schema.close_decisions(self._db, part, decided)
            self._fencing_epoch[part] = epoch
        expire = partial(_expire_page, part, trigger_time, self._layout)
        after = transact(self._db, partial(expire, None))
        while after is not None:
            after = transact(self._db, partial(expire, after))
        # Whoever decides with counters it has in memory writes counts that are still right.
        self.forget_units(shard)

    @abstractmethod
    def forget_units(self, shard: int) -> None:
        """See ``Store``."""

    def _raise_forgotten(self, part: int, trigger_time: int) -> None:
        key = spanner.KeySet(keys=[[part, FORGOTTEN]])

        def work(transaction: Any) -> None:
            rows = list(transaction.read("Progress", ("Reached",), key))
            if not rows or rows[0][0] < trigger_time:
                transaction.insert_or_update(
                    "Progress", PROGRESS, [[part, FORGOTTEN, trigger_time]]
                )

        transact(self._db, work)

    @override
    def drop_releases(self, before: int) -> None:
        # Rows of a fencing epoch that is not over stay: they are the fence that keeps a worker that
        # was asleep from the step.
        change_everywhere(
            self._db,
            "UPDATE Steps SET Releases = NULL WHERE Part BETWEEN @first AND @last"
            " AND WindowIndex BETWEEN 0 AND @most AND Releases IS NOT NULL",
            {**self._bounds(), "most": before - 1},
        )
        over = before // schema.EPOCH_LENGTH * schema.EPOCH_LENGTH
        if not over:
            return
        for shard in range(self.identity.shards):
            schema.close_windows(self._db, self._first_part + shard, before)
        for table in ("Steps", "Progress"):
            change_everywhere(
                self._db,
                f"DELETE FROM {table} WHERE Part BETWEEN @first AND @last"
                " AND WindowIndex BETWEEN 0 AND @most",
                {**self._bounds(), "most": over - 1},
            )

    def _bounds(self) -> dict[str, int]:
        return {"first": self._first_part, "last": self._first_part + GENERATION - 1}

    @override
    def forget_selections(self, trigger_time: int) -> None:
        out = Mutations()
        for part in range(self._first_part, self._first_part + self.identity.shards):
            out.delete_between("Steps", (part, SELECTED, 0), (part, SELECTED, trigger_time + 1))
        commit(self._db, out.fill)

    @override
    def compact(self) -> None:
        """Delete lists of keys whose trigger has passed, and replaced generations; Spanner gives
        space back by itself."""
        out = Mutations()
        for window, shard, trigger in self.progress():
            first = (self._first_part + shard, window)
            out.delete_between("KeysByDue", (*first, 0), (*first, trigger + 1))
            if out.count >= COMMIT_MUTATIONS // 2:
                commit(self._db, out.fill)
                out = Mutations()
        commit(self._db, out.fill)
        for generation in range(self.generation):  # those that were replaced
            begin = generation * GENERATION
            key_range = between([begin], [begin + GENERATION])
            if list(read_rows(self._db, "Progress", PROGRESS, ranges=[key_range])):
                clear(self._db, generation)

    @override
    def parts(self) -> list[PartSize]:
        mine = "WHERE Part BETWEEN @first AND @last"
        tables = [
            ("outbox", "Steps", "BYTE_LENGTH(Releases)"),
            ("keys", "Keys", "BYTE_LENGTH(State) + BYTE_LENGTH(Columns) + 16"),
            ("keys", "KeyUnits", "BYTE_LENGTH(UnitIds)"),
            ("keys", "KeysByDue", "BYTE_LENGTH(KeyIds)"),
        ]
        sizes: dict[tuple[str, int | None], tuple[int, int]] = {}
        for name, table, size in tables:
            statement = (
                f"SELECT WindowIndex, COUNT(*), SUM({size}) FROM {table} {mine}"
                " AND WindowIndex >= 0 GROUP BY WindowIndex"
            )
            for window, rows, amount in query(self._db, statement, self._bounds()):
                before = sizes.get((name, window), (0, 0))
                sizes[name, window] = before[0] + rows, before[1] + (amount or 0)
        head = self._layout.header.itemsize + CELL_SEAL
        statement = f"SELECT COUNT(*), SUM(BYTE_LENGTH(Records)) FROM Units {mine}"
        [[rows, amount]] = query(self._db, statement, self._bounds())
        sizes["units", None] = rows, rows * (16 + head)
        sizes["positions", None] = rows, (amount or 0) - rows * head
        statement = (
            f"SELECT COUNT(*), SUM(BYTE_LENGTH(Releases)) FROM Steps {mine} AND WindowIndex = "
            f"{SELECTED}"
        )
        [[rows, amount]] = query(self._db, statement, self._bounds())
        if rows:
            sizes["selections", None] = rows, amount or 0
        return [PartSize(*name, *size) for name, size in sizes.items()]

    # --- reading everything -------------------------------------------------------------

    @override
    @contextlib.contextmanager
    def snapshot(self) -> Iterator[None]:
        with self._db.snapshot(multi_use=True) as snapshot:
            self._snapshot = snapshot
            try:
                list(self._rows("Meta", ("Name",), [("generation",)]))  # its time is now
                yield
            finally:
                self._snapshot = None

    @override
    def key_pieces(self, window: int, shard: int) -> Iterator[KeyPiece]:
        part = self._first_part + shard
        key_ranges = [prefix(part, window)]
        columns = ("KeyId", "Columns", "State", "UnitIds")
        rows = list(self._rows("Keys", columns, ranges=key_ranges))
        if not rows:
            return
        state = unpack_states([row[2] for row in rows], self._streams)
        keys = pa.Table.from_batches([unpack_columns([row[1] for row in rows], self._schema)])
        ids = ids_from([row[0] for row in rows])
        raw = [b64decode(row[3]) if row[3] else b"" for row in rows]
        at = {row[0]: number for number, row in enumerate(rows)}
        chunks = self._rows("KeyUnits", ("KeyId", "Chunk", "UnitIds"), ranges=key_ranges)
        for key, chunk, units in chunks:
            number = at[key]
            if state["chunk"][number] <= chunk < state["chunks"][number]:
                raw[number] += b64decode(units)
        yield KeyPiece(
            keys.append_column("_id", arrow.id_array(ids)),
            state["units"],
            state["values"],
            state["due"],
            state["round"],
            state["taken"] > (self._reached(part, window) or 0),
            np.repeat(np.arange(len(rows)), [len(r) // 16 for r in raw]),
            ids_in(b"".join(raw)),
        )

    @override
    def selections(self, shard: int, after: int, upto: int | None = None) -> list[Selection]:
        part, last = self._first_part + shard, (1 << 62) if upto is None else upto
        behind = between((part, SELECTED, after + 1), (part, SELECTED, last + 1))
        rows = self._rows("Steps", ("Step", "Piece", "Releases"), ranges=[behind])
        return [
            Selection(int(step), window_of(piece), arrow.from_bytes(b64decode(value)))
            for step, piece, value in sorted(rows, key=lambda row: (row[0], row[1]))
        ]

    def _all_units(self, shard: int) -> tuple[Ids, UnitRows]:
        columns = ("UnitId", "Records")
        rows = list(self._rows("Units", columns, ranges=[prefix(self._first_part + shard)]))
        units = UnitRows.of([b64decode(row[1]) for row in rows], self._layout)
        return ids_from([row[0] for row in rows]), units

    @override
    def unit_pieces(self, shard: int) -> Iterator[UnitPiece]:
        ids, units = self._all_units(shard)
        if len(ids):
            columns = (units.counts, units.period_end, units.indices)
            yield UnitPiece(ids, *(column.astype(np.int32) for column in columns))

    @override
    def position_pieces(self, shard: int) -> Iterator[PositionPiece]:
        ids, units = self._all_units(shard)
        new = np.flatnonzero(units.records["trigger_time"] > self.unit_progress(shard).forgotten)
        if len(new):
            owner = units.owner[new]
            yield PositionPiece(ids[owner], admitted_of(units.records[new], owner))

    @override
    def released_ahead(self, window: int, shard: int, trigger: int) -> pa.RecordBatch | None:
        part = self._first_part + shard
        if trigger <= (self._reached(part, window) or 0):
            return None
        return self._releases(part, window, trigger)

    @abstractmethod
    def _releases(self, part: int, window: int, trigger: int) -> pa.RecordBatch | None:
        """All rows of a step in the outbox, committed or not."""

    # --- filling a new generation -------------------------------------------------------

    @override
    @contextlib.contextmanager
    def filling(self) -> Iterator[None]:
        self._filled = Filled(self._db, self._layout)
        yield
        for (part, window), step in self._filled.reached.items():
            self._filled.upsert("Progress", PROGRESS, [[part, window, step]])
        for units in self._filled.units.values():
            self._filled.write_units(units)
        self._filled.flush()

    @override
    def put_step(
        self, window: int, shard: int, trigger: int, releases: pa.RecordBatch | None
    ) -> None:
        part = self._first_part + shard
        self._filled.reached[part, window] = trigger
        self._filled.outbox(part, window, trigger, releases)

    @override
    def put_released_ahead(
        self, window: int, shard: int, trigger: int, releases: pa.RecordBatch
    ) -> None:
        part = self._first_part + shard
        self._filled.reached.setdefault((part, window), 0)
        self._filled.outbox(part, window, trigger, releases)

    @override
    def put_keys(self, window: int, shard: int, piece: KeyPiece) -> None:
        part = self._first_part + shard
        reached = self._filled.reached.setdefault((part, window), 0)
        order = np.argsort(piece.pair_rows, kind="stable")
        raw = np.ascontiguousarray(piece.pair_units[order]).tobytes()
        end = np.cumsum(np.bincount(piece.pair_rows, minlength=len(piece.units)))
        sizes = np.diff(end, prepend=0)
        for rows in parts(np.arange(len(piece.units)), KEY_MUTATIONS, 16 * sizes + 9_000):
            states = states_of(piece, rows, self._schema, self._streams)
            sets = [raw[16 * int(end[r] - sizes[r]) : 16 * int(end[r])] for r in rows.tolist()]
            self._filled.keys(part, window, reached, states, sets, piece.done[rows])

    @override
    def put_selection(self, shard: int, selection: Selection) -> None:
        self._filled.selection(self._first_part + shard, selection)

    @override
    def put_units(self, shard: int, piece: UnitPiece) -> None:
        units = self._filled.shard(self._first_part + shard)
        units.put(piece.ids, piece.counts, piece.period_end, piece.indices)

    @override
    def put_positions(self, shard: int, piece: PositionPiece) -> None:
        units = self._filled.shard(self._first_part + shard)
        units.put_records(piece.of_units(units.table.find(piece.ids)))

    @override
    def put_unit_progress(self, shard: int, progress: UnitProgress) -> None:
        part = self._first_part + shard
        for kind, trigger_time in zip((BOUND, FORGOTTEN, REACH), progress, strict=True):
            if trigger_time:
                self._filled.reached[part, kind] = trigger_time


def _expire_page(
    part: int, trigger_time: int, layout: Layout, after: str | None, transaction: Any
) -> str | None:
    """Do one transaction of expiry: a page of units behind a key; return the page's last key.

    It reads what it writes, so a worker that decides at the same time makes it start again.
    """
    start: dict[str, Any] = {"start_closed": [part]}
    if after is not None:
        start = {"start_open": [part, after]}
    page = spanner.KeySet(ranges=[spanner.KeyRange(**start, end_closed=[part])])
    rows = list(transaction.read("Units", ("UnitId", "Records"), page, limit=_PAGE))
    if not rows:
        return None
    units = UnitRows.of([b64decode(row[1]) for row in rows], layout)
    goes = units.records["trigger_time"] <= trigger_time
    records_per_unit = np.bincount(units.owner[~goes], minlength=len(rows))
    ended = (units.period_end <= trigger_time) & (records_per_unit == 0)
    changed = np.zeros(len(rows), np.bool_)
    changed[units.owner[goes]] = True
    gone = units.expired_pairs.copy()
    np.add.at(gone, units.owner[goes], units.records["pairs"][goes].astype(np.int64))
    remaining, end = units.records[~goes], np.cumsum(records_per_unit)
    fresh = units.expired_first_pairs
    if fresh is not None:
        fresh = fresh.copy()
        more = np.bitwise_count(units.records["fresh"][goes])
        np.add.at(fresh, units.owner[goes], more.astype(np.int64))
    heads = pack_headers(gone, units.period_end, fresh)
    written = [
        [
            part,
            as_text(rows[n][0]),
            cell(heads[n] + remaining[end[n] - records_per_unit[n] : end[n]].tobytes()),
        ]
        for n in np.flatnonzero(changed & ~ended).tolist()
    ]
    if written:
        transaction.insert_or_update("Units", ("Part", "UnitId", "Records"), written)
    if ended.any():
        keys = [[part, as_text(rows[n][0])] for n in np.flatnonzero(ended).tolist()]
        transaction.delete("Units", spanner.KeySet(keys=keys))
    return as_text(rows[-1][0])
