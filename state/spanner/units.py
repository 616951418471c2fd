"""Units of one shard in Spanner: a unit's row is its admitted records."""

from base64 import b64decode

import numpy as np
from google.cloud.spanner_v1.database import Database

from dpstream.accounting.arrays import Ids, Int64
from dpstream.state.arrow import enter_keys, indexed
from dpstream.state.idtable import IdTable
from dpstream.state.spanner.batch import Mutations
from dpstream.state.spanner.client import read_rows
from dpstream.state.spanner.rows import (
    PLAIN,
    Layout,
    UnitRows,
    admitted_of,
    cell,
    id_cells,
    ids_from,
    pack_headers,
    pack_records,
    runs_of,
    unpack_records,
)
from dpstream.state.store import Admitted, Ints, UnitShard

_COLUMNS = ("Part", "UnitId", "Records")
#: Mutations of a unit's row.
ROW_MUTATIONS = len(_COLUMNS)


class SpannerUnitShard(UnitShard):
    """Counters of units that may be a part of what the database has.

    Args:
        complete: no row of this shard is missing in memory.
        layout: what the rows of units hold.

    Attributes:
        pieces: rows that a decision cut short has left in ``Steps``.
        reach: last trigger time of any record in memory: a decision cut short may have gone further
            than the one that was made in its place.
    """

    def __init__(self, part: int, complete: bool, layout: Layout = PLAIN) -> None:
        super().__init__()
        self._layout = layout
        self.part, self.complete, self.pieces, self.reach = part, complete, 0, 0
        #: By slot: records, and admitted pairs (and first pairs) of records that have expired.
        self._records: list[bytes] = []
        self._gone = np.zeros(0, np.int64)
        self._gone_fresh = np.zeros(0, np.int64)

    def load(self, database: Database, ids: Ids) -> None:
        """Read the rows of the units that are not here."""
        if self.complete:
            return
        missing = np.unique(ids[self.table.find(ids) < 0], axis=0)
        if len(missing) == 0:
            return
        keys = [(self.part, unit) for unit in id_cells(missing)]
        rows = list(read_rows(database, "Units", ("UnitId", "Records"), keys))
        if not rows:
            return
        slots = self.intern(ids_from([row[0] for row in rows]))
        self._extend()
        unit_rows = UnitRows.of([b64decode(row[1]) for row in rows], self._layout)
        for slot, blob in zip(slots.tolist(), unit_rows.blobs, strict=True):
            self._records[slot] = blob
        self.reach = max(self.reach, int(unit_rows.records["trigger_time"].max(initial=0)))
        self._gone[slots], self.until[slots] = unit_rows.gone, unit_rows.until
        self.counts[slots], self.indices[slots] = unit_rows.counts, unit_rows.indices
        if unit_rows.fresh is not None:
            self._gone_fresh[slots] = unit_rows.fresh
        enter_keys(self, admitted_of(unit_rows.records, slots[unit_rows.owner]))

    def _extend(self) -> None:
        more = self.table.size - len(self._records)
        if more > 0:
            self._records += [b""] * more
            self._gone = np.concatenate([self._gone, np.zeros(more, np.int64)])
            self._gone_fresh = np.concatenate([self._gone_fresh, np.zeros(more, np.int64)])

    def put(self, ids: Ids, counts: Ints, until: Ints, indices: Ints) -> Int64:
        """Enter units of another store with their counts; returns their slots."""
        slots = self.intern(ids)
        self._extend()
        self.counts[slots], self.until[slots], self._gone[slots] = counts, until, counts
        self.indices[slots] = self._gone_fresh[slots] = indices
        return slots

    def put_records(self, admitted: Admitted) -> Int64:
        """Enter records whose pairs are counted already; returns the slots they belong to."""
        slots = self.take(admitted)
        np.subtract.at(self._gone, admitted.unit, admitted.pairs)
        if admitted.per_key is not None:
            fresh = np.bitwise_count(admitted.per_key.fresh).astype(np.int64)
            np.subtract.at(self._gone_fresh, admitted.unit, fresh)
        return slots

    def take(self, admitted: Admitted) -> Int64:
        """Append newly admitted records to their units' rows; returns the slots that changed."""
        self._extend()
        order = np.argsort(admitted.unit, kind="stable")
        raw = pack_records(admitted, order)
        size = self._layout.record.itemsize
        for slot, a, b in runs_of(admitted.unit[order]):
            self._records[slot] += raw[size * a : size * b]
        return np.unique(admitted.unit).astype(np.int64)

    def write(self, out: Mutations, slots: Int64) -> None:
        """Rows of some units."""
        ids = id_cells(self.table.ids[slots])
        fresh = self._gone_fresh[slots] if self._layout.per_key else None
        heads = pack_headers(self._gone[slots], self.until[slots], fresh)
        rows = [
            [self.part, unit, cell(head + self._records[slot])]
            for slot, unit, head in zip(slots.tolist(), ids, heads, strict=True)
        ]
        out.upsert("Units", _COLUMNS, rows)

    def row_bytes(self, slots: Int64) -> Int64:
        """Bytes of each unit's row."""
        return np.array([len(self._records[slot]) + 40 for slot in slots.tolist()], np.int64)

    def admitted(self) -> tuple[IdTable, Admitted]:
        """All admitted records in memory, with an index by ``position_ids``."""
        self._extend()
        return indexed(admitted_of(*unpack_records(self._records, self._layout)))
