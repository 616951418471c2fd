"""Rows of a new generation of the Spanner store, in commits within the limits."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from google.cloud.spanner_v1.database import Database

from dpstream.accounting.arrays import Bool, Int64
from dpstream.accounting.limits import CELL_BYTES, COMMIT_MUTATIONS, INLINE_PAIRS
from dpstream.state import arrow
from dpstream.state.retention_store import KeyPiece, Selection
from dpstream.state.spanner.client import commit
from dpstream.state.spanner.rows import (
    DUE,
    PLAIN,
    STEP,
    Layout,
    cell,
    due_cells,
    id_cells,
    pack_columns,
    pack_states,
    release_cells,
)
from dpstream.state.spanner.schema import SELECTED, Mutations, parts
from dpstream.state.spanner.shards import COPIED, SpannerUnitShard, piece_of
from dpstream.state.store import NEVER, KeyShard

PROGRESS = ("Part", "WindowIndex", "Reached")
#: Most mutations of a touched key: its row, a list of due keys, a row of its unit set.
KEY_MUTATIONS = 6 + 6 + 5
_COPIED = "copied"


def states_of(piece: KeyPiece, rows: Int64, schema: pa.Schema, streams: int) -> KeyShard:
    """Return some keys of a piece as states of a key shard, with slots in the rows' order."""
    states = KeyShard(schema, streams)
    keys = piece.keys.take(pa.array(rows)).combine_chunks()
    slots = states.intern(arrow.id_view(keys.column("_id").combine_chunks()), keys.to_batches()[0])
    states.units[slots], states.values[slots] = piece.units[rows], piece.values[rows]
    states.due[slots], states.selected[slots] = piece.due[rows], piece.selected[rows]
    return states


class Filled:
    """Writes the rows of a new generation of a store, in commits within Spanner's limits.

    Nobody reads a generation before it is switched to, so that its rows need no common transaction.

    Args:
        layout: what the rows of units hold.

    Attributes:
        reached: (part, window or kind of progress) -> step or trigger time, written at the end.
        units: by part, units in memory until the end.
    """

    def __init__(self, database: Database, layout: Layout = PLAIN) -> None:
        self._db, self._out, self._layout = database, Mutations(), layout
        self.reached: dict[tuple[int, int], int] = {}
        self.units: dict[int, SpannerUnitShard] = {}
        self._lists = self._selections = 0

    def upsert(self, table: str, columns: Sequence[str], rows: list[Any]) -> None:
        """Write rows of a table in a later commit, at the latest in that of ``flush``."""
        for row in rows:
            self._out.upsert(table, columns, [row])
            if self._out.count > COMMIT_MUTATIONS * 0.9 or self._out.bytes > 8 * CELL_BYTES:
                self.flush()

    def flush(self) -> None:
        """Commit the rows that wait."""
        commit(self._db, self._out.fill)
        self._out = Mutations()

    def outbox(self, part: int, window: int, step: int, releases: pa.RecordBatch | None) -> None:
        """Write the releases of a step as rows of ``Steps``; ``None``: they were dropped."""
        cells: list[str | None] = [None]
        if releases is not None:
            cells = [*release_cells(releases)]
        rows = [[part, window, step, n, _COPIED, value] for n, value in enumerate(cells)]
        self.upsert("Steps", STEP, rows)

    def selection(self, part: int, selection: Selection) -> None:
        """Write what a step selected, under numbers of rows that no step of the run gives."""
        for value in release_cells(selection.keys):
            piece = piece_of(selection.window, COPIED + self._selections)
            row = [part, SELECTED, selection.trigger_time, piece, _COPIED, value]
            self._selections += 1
            self.upsert("Steps", STEP, [row])

    def keys(
        self,
        part: int,
        window: int,
        reached: int,
        states: KeyShard,
        sets: list[bytes],
        done: Bool,
    ) -> None:
        """Write keys of a (window, shard) as rows of ``Keys``, ``KeyUnits`` and ``KeysByDue``.

        Args:
            reached: the last step that the shard has committed.
            states: the keys; sets: by slot, the 16 bytes of each unit id of the key's round.
            done: by slot, the key has taken step ``reached + 1`` already.
        """
        slots = np.arange(states.size)
        keys = id_cells(states.table.ids)
        large = 16 * INLINE_PAIRS
        chunks = [-(-len(s) // CELL_BYTES) if len(s) > large else 0 for s in sets]
        packed = pack_states(
            states, slots, np.where(done, reached + 1, reached), 0 * slots, np.array(chunks)
        )
        columns = pack_columns(states.key_columns(slots))
        names = ("Part", "WindowIndex", "KeyId", "Columns", "State", "UnitIds")
        rows = [
            [part, window, key, column, state, cell(b"" if chunk else units)]
            for key, column, state, units, chunk in zip(
                keys, columns, packed, sets, chunks, strict=True
            )
        ]
        self.upsert("Keys", names, rows)
        chunked = [
            [part, window, key, n, cell(units[n * CELL_BYTES : (n + 1) * CELL_BYTES])]
            for key, units, chunk in zip(keys, sets, chunks, strict=True)
            for n in range(chunk)
        ]
        self.upsert("KeyUnits", ("Part", "WindowIndex", "KeyId", "Chunk", "UnitIds"), chunked)
        self._due(part, window, reached, states)

    def _due(self, part: int, window: int, reached: int, states: KeyShard) -> None:
        waits = np.flatnonzero(states.due[: states.size] != NEVER)
        due = np.maximum(states.due[waits], reached + 1)
        for value, ids in due_cells(states.table.ids[waits], due):
            self._lists += 1
            self.upsert("KeysByDue", DUE, [[part, window, value, reached, self._lists, ids]])

    def shard(self, part: int) -> SpannerUnitShard:
        """Return the units of a part, all of which stay in memory until ``write_units``."""
        return self.units.setdefault(part, SpannerUnitShard(part, True, self._layout))

    def write_units(self, units: SpannerUnitShard) -> None:
        """Commit the units of a part as rows of ``Units``."""
        slots = np.arange(units.table.size)
        for run in parts(slots, 3, units.row_bytes(slots)):
            out = Mutations()
            units.write(out, run)
            commit(self._db, out.fill)
