"""A source without end, driven by hand: its real tracker and watermark, bundle after bundle.

What a runner does with a splittable DoFn, in the open: a bundle runs until the source gives the
rest back; the next one begins there, in the same DoFn or in a fresh copy (another worker).  The
promise of a watermark is checked at every output.
"""

import pickle
from collections.abc import Iterator
from typing import Any, NamedTuple

import apache_beam as beam
import numpy as np
import pyarrow as pa
from apache_beam.io.watermark_estimators import ManualWatermarkEstimator
from apache_beam.pvalue import TaggedOutput
from apache_beam.runners.sdf_utils import RestrictionTrackerView, ThreadsafeRestrictionTracker
from apache_beam.transforms.window import TimestampedValue

from dpstream.dp_transforms.batches import OFFSET, PARTITION
from dpstream.dp_transforms.ingest.columns import instant
from dpstream.pipelines.connectors.inputs import ProgressProvider


class Bundle(NamedTuple):
    """What one bundle gave: batches, dead letters, the watermark after it, the delay asked for."""

    records: list[Any]
    dead: list[pa.RecordBatch]
    watermark: int | None
    delay: float | None


class Drive:
    """Drives a source.

    Args:
        dofn: the source's.
        stamp: the column that the watermark promises, from ``begin`` (micros) on; none where the
            source gives something else than batches.
        fresh: every bundle in a DoFn of its own.
    """

    def __init__(
        self,
        dofn: beam.DoFn,
        stamp: str | None,
        fresh: bool = False,
        element: Any = b"",
        begin: int = -(1 << 62),
    ) -> None:
        self.dofn, self.stamp, self.fresh, self.element = dofn, stamp, fresh, element
        self.begin = begin
        self.progress = ProgressProvider().initial_restriction(element)
        self.estimator = ManualWatermarkEstimator(None)
        self.ended = self._set_up = False

    def bundle(self, **more: Any) -> Bundle:
        """Run the next bundle."""
        dofn = pickle.loads(pickle.dumps(self.dofn)) if self.fresh else self.dofn  # noqa: S301
        if self.fresh or not self._set_up:
            dofn.setup()
            self._set_up = True
        tracker = ThreadsafeRestrictionTracker(ProgressProvider().create_tracker(self.progress))
        view = RestrictionTrackerView(tracker)
        records: list[Any] = []
        dead: list[pa.RecordBatch] = []
        for output in dofn.process(self.element, tracker=view, watermark=self.estimator, **more):
            letter = isinstance(output, TaggedOutput)
            timed = output.value if letter else output
            assert isinstance(timed, TimestampedValue)
            if not letter:
                self._keeps_promise(timed)
            (dead if letter else records).append(timed.value)
        tracker.check_done()
        left = tracker.deferred_status()
        self.ended = left is None
        if left is not None:
            self.progress = pickle.loads(pickle.dumps(left[0]))  # noqa: S301
        mark = self.estimator.current_watermark()
        return Bundle(records, dead, mark and mark.micros, None if left is None else float(left[1]))

    def _keeps_promise(self, timed: Any) -> None:
        mark = self.estimator.current_watermark()
        assert mark is None or timed.timestamp >= mark, "an output behind the watermark"
        if self.stamp is None:
            return
        stamps, mask = instant(timed.value.column(self.stamp))
        mask &= stamps >= self.begin
        if mask.any():
            least = int(np.min(stamps[mask]))
            assert timed.timestamp.micros <= least, "an output later than a stamp of its"
            assert mark is None or mark.micros <= least, "a stamp before the watermark"

    def all(self, most: int = 10_000) -> Iterator[Bundle]:
        """Bundles until the source ends."""
        for _ in range(most):
            yield self.bundle()
            if self.ended:
                return
        raise AssertionError("the source does not end")


def rows_of(batches: list[pa.RecordBatch]) -> dict[tuple[int, int], dict[str, Any]]:
    """Rows by position; a position comes once."""
    rows: dict[tuple[int, int], dict[str, Any]] = {}
    for batch in batches:
        partition, offset = (int(batch.schema.metadata[k]) for k in (PARTITION, OFFSET))
        for i, row in enumerate(batch.to_pylist()):
            assert (partition, offset + i) not in rows
            rows[partition, offset + i] = row
    return rows


def letters_of(batches: list[pa.RecordBatch]) -> set[tuple[int, int, str]]:
    """Dead letters as (partition, offset, reason); each once."""
    letters = [tuple(row.values()) for batch in batches for row in batch.to_pylist()]
    assert len(set(letters)) == len(letters)
    return set(letters)
