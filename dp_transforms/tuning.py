"""Histograms of the first hours, one per figure to choose, and their named noise.

Sensitivity: see ``accounting.tuning.question``.  What is relied on there is made here: a unit (a
    keyed 128-bit id, compared on all bits; with a privacy period the pair (user, period)) is in
    exactly one cell of the pairs' histogram, and at most m of its records are in a column's
    histogram.  Which m: those with the smallest sampling keys, a keyed MAC of (run, unit,
    position).  A position may shift when another unit's records are put before it; sampling keys
    are independent and fresh for each run, so this permutes equals and changes no distribution (a
    coupling; it would not hold for "the first m by position in the file").

Memory is one row per unit of the first hours, not per record: 24 + m (16 + 4 columns) bytes
and the id table.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from dpstream.accounting.arrays import Ids, Int32, Int64
from dpstream.accounting.errors import InvariantError
from dpstream.accounting.libraries import njit
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.tuning.question import CONTRIBUTIONS, Histogram, encoder_matrix
from dpstream.dp_transforms.batches import ids_of, numpy_view
from dpstream.dp_transforms.decision import event_trigger_times, open_windows
from dpstream.dp_transforms.noise.inputs import InputDigest
from dpstream.dp_transforms.noise.oneshot import OneShot, numbered
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.state.idtable import IdTable

#: No coin is as large: it is an empty place (2^-128 for a real one, which then is not counted).
_EMPTY = np.iinfo(np.uint64).max


@njit(cache=True, nogil=True)
def _keep(
    slots: Int64, sampling_keys: Ids, cells: Int32, kept_sampling_keys: Ids, kept_cells: Int32
) -> None:  # pragma: no cover - compiled
    """Keep the m records with the smallest sampling keys of each slot; (S, m, 2) and (S, m, K)."""
    places = kept_sampling_keys.shape[1]
    for i in range(slots.size):
        slot = slots[i]
        worst = 0
        for k in range(1, places):
            high, low = kept_sampling_keys[slot, k, 1], kept_sampling_keys[slot, k, 0]
            top, bottom = kept_sampling_keys[slot, worst, 1], kept_sampling_keys[slot, worst, 0]
            if high > top or (high == top and low > bottom):
                worst = k
        top, bottom = kept_sampling_keys[slot, worst, 1], kept_sampling_keys[slot, worst, 0]
        if sampling_keys[i, 1] < top or (
            sampling_keys[i, 1] == top and sampling_keys[i, 0] < bottom
        ):
            kept_sampling_keys[slot, worst, 0] = sampling_keys[i, 0]
            kept_sampling_keys[slot, worst, 1] = sampling_keys[i, 1]
            for c in range(cells.shape[1]):
                kept_cells[slot, worst, c] = cells[i, c]


class Tally:
    """Pairs and sampled values per unit; the pure function behind a group-by, batch after batch.

    Args:
        plan: the plan the records were made canonical with; its timeline ends with the first
            hours, so that no later event time passes ingest.
        ring: key ring for the sampling keys.
        run_name: run id and digest of the question, committed before the first draw.
        histograms: what is counted: ``CONTRIBUTIONS`` first, then value streams by name.
        values_per_unit: m.
    """

    def __init__(
        self,
        plan: Plan,
        ring: KeyRing,
        run_name: tuple[bytes, ...],
        histograms: Sequence[Histogram],
        values_per_unit: int,
    ) -> None:
        if not (plan.timeline.end is not None and histograms[0].name == CONTRIBUTIONS):
            raise InvariantError(
                "plan.timeline.end is not None and histograms[0].name == CONTRIBUTIONS"
            )
        self._plan, self._end = plan, plan.timeline.end
        self._sample = ring.sample
        self._prefix = ring.name((b"choice sample", *run_name))
        self._histograms = tuple(histograms)
        measured = [s for s in plan.design.streams if s.column is not None]
        places = {s.name: (f"v{plan.design.streams.index(s)}", s.mid) for s in measured}
        self._columns = [(*places[h.name], np.array(h.candidates)) for h in histograms[1:]]
        self._units = IdTable()
        self._pairs = np.zeros(0, np.int64)
        self._sampling_keys = np.empty((0, values_per_unit, 2), np.uint64)
        self._cells = np.empty((0, values_per_unit, len(self._columns)), np.int32)

    def add(self, records: pa.RecordBatch) -> None:
        """Count canonical records whose stamp, too, lies in the first hours; any order."""
        stamp = numpy_view(records.column("stamp"))
        records = records.filter(pa.array(stamp < self._end))
        timeline = self._plan.timeline
        event_trigger_time = event_trigger_times(self._plan, records)
        stamp_trigger_time = np.maximum(
            1, timeline.trigger_time_of(numpy_view(records.column("stamp")))
        )
        _, windows = open_windows(
            timeline, event_trigger_time, np.maximum(event_trigger_time, stamp_trigger_time)
        )
        units = ids_of(records.column("unit"))
        slots = self._units.intern(units)
        self._grow(self._units.size)
        np.add.at(self._pairs, slots, windows)
        if self._columns:
            counted = windows > 0
            sampling_keys = self._sampling_keys_of(units, records)[counted]
            cells = self._cells_of(records)[counted]
            _keep(slots[counted], sampling_keys, cells, self._sampling_keys, self._cells)

    def counts(self) -> list[Int64]:
        """Return (cells,) exact histogram of each figure: PRIVATE, for ``noisy`` only."""
        size, first = self._units.size, self._histograms[0]
        pairs = self._pairs[:size]
        cell = np.searchsorted(np.array(first.candidates), pairs[pairs > 0], side="left")
        tallies = [np.bincount(cell, minlength=first.cells)]
        for index, histogram in enumerate(self._histograms[1:]):
            cells = self._cells[:size, :, index]
            tallies.append(np.bincount(cells[cells >= 0], minlength=histogram.cells))
        return [counts.astype(np.int64) for counts in tallies]

    def _sampling_keys_of(self, units: Ids, records: pa.RecordBatch) -> Ids:
        """(n, 2) sampling keys of records."""
        message = np.empty((records.num_rows, 4, 2), np.uint64)
        message[:, 0] = (np.uint64(3), np.uint64(0))  # blocks that follow: a fixed length
        message[:, 1] = self._prefix
        message[:, 2] = units
        message[:, 3, 0] = numpy_view(records.column("partition")).astype(np.uint64)
        message[:, 3, 1] = numpy_view(records.column("offset")).astype(np.uint64)
        lengths = np.full(records.num_rows, 4, np.int64)
        return self._sample.mac(message.reshape(-1, 2), lengths)

    def _cells_of(self, records: pa.RecordBatch) -> Int32:
        """(n, K) cell of each value: labelled by the edge away from 0."""
        cells = np.empty((records.num_rows, len(self._columns)), np.int32)
        for index, (name, mid, edges) in enumerate(self._columns):
            value = numpy_view(records.column(name)) + mid
            up = np.searchsorted(edges, value, side="left")
            down = np.searchsorted(edges, value, side="right") - 1
            cells[:, index] = np.where(value >= 0, up, down)
        return cells

    def _grow(self, size: int) -> None:
        have = len(self._pairs)
        if size <= have:
            return
        size = max(size, 2 * have, 1024)
        self._pairs = np.concatenate([self._pairs, np.zeros(size - have, np.int64)])
        sampling_keys = np.full((size, *self._sampling_keys.shape[1:]), _EMPTY, np.uint64)
        sampling_keys[:have] = self._sampling_keys
        cells = np.full((size, *self._cells.shape[1:]), -1, np.int32)
        cells[:have] = self._cells
        self._sampling_keys, self._cells = sampling_keys, cells


def noisy(
    ring: KeyRing,
    run_name: tuple[bytes, ...],
    histograms: Sequence[Histogram],
    counts: Sequence[Int64],
) -> list[Int64]:
    """Return A x + rounded Gaussians of each histogram, (nodes,): the only ones that are released.

    A node's name is (run name, digest of all counts, histogram, number of the node, sd); the same
    name gives the same noise, so a run that is resumed gives the same answer of the same counts
    again.  Rounded, not discrete Gaussians: the histograms of a question are one Gaussian-DP
    mechanism.
    """
    digest = InputDigest(ring)
    for histogram, cells in zip(histograms, counts, strict=True):
        digest.add(histogram.name, numbered(len(cells)), cells)
    out = []
    for histogram, cells in zip(histograms, counts, strict=True):
        exact = encoder_matrix(histogram.cells) @ cells
        noise = OneShot(ring, (b"choice noise", *run_name, histogram.name.encode()), digest.value)
        drawn = noise.rounded_gaussian(numbered(len(exact)), histogram.sigma)
        out.append(np.asarray(exact + drawn, np.int64))
    return out
