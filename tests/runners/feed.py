"""An unbounded source of given batches, in any order, that waits like a real one."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
from apache_beam.io.restriction_trackers import OffsetRange, OffsetRestrictionTracker
from apache_beam.io.watermark_estimators import ManualWatermarkEstimator
from apache_beam.transforms.core import RestrictionProvider, WatermarkEstimatorProvider
from apache_beam.transforms.window import TimestampedValue
from apache_beam.utils.timestamp import MAX_TIMESTAMP, Duration, Timestamp

from dpstream.dp_transforms.batches import TRIGGER, WINDOW, ArrowBatchCoder
from tests.streams import sealed_bytes


class Feed(beam.PTransform):
    """Emits the batches in order; after each the watermark is the least stamp that is to come.

    Args:
        batches: source batches with a column of instants.
        stamp: the column.
        hold: batches between two checkpoints of the source.
        watermarks: the watermark before each batch, where it is not to be that.
    """

    def __init__(
        self,
        batches: Sequence[pa.RecordBatch],
        stamp: str,
        hold: int = 2,
        watermarks: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        least = [np.min(b.column(stamp).cast(pa.int64()).to_numpy()) for b in batches]
        ahead = np.minimum.accumulate(np.array(least)[::-1])[::-1].tolist()
        ahead = ahead if watermarks is None else list(watermarks)
        coder = ArrowBatchCoder()
        self._emit = _Emit([coder.encode(b) for b in batches], ahead, hold)

    def expand(self, begin: Any) -> beam.PCollection:
        emit = beam.ParDo(self._emit).with_output_types(pa.RecordBatch)
        return begin | beam.Create([0], reshuffle=False) | "Emit" >> emit


class _Emit(beam.DoFn, RestrictionProvider, WatermarkEstimatorProvider):
    def __init__(self, encoded: list[bytes], ahead: list[int], hold: int) -> None:
        self._encoded, self._ahead, self._hold = encoded, ahead, hold

    @beam.DoFn.unbounded_per_element()
    def process(
        self,
        element: int,
        tracker: Any = beam.DoFn.RestrictionParam(),  # noqa: B008
        estimator: Any = beam.DoFn.WatermarkEstimatorParam(),  # noqa: B008
    ) -> Iterator[Any]:
        begin = tracker.current_restriction().start
        for at in range(begin, len(self._encoded)):
            if at == begin + self._hold:
                tracker.defer_remainder(Duration(micros=1000))
                return
            if not tracker.try_claim(at):
                return
            batch = ArrowBatchCoder().decode(self._encoded[at])
            yield TimestampedValue(batch, estimator.current_watermark())
            if at + 1 < len(self._ahead):
                estimator.set_watermark(self._instant(at + 1))

    def _instant(self, at: int) -> Timestamp:
        return Timestamp(micros=self._ahead[at] // 1000 * 1000)

    def initial_restriction(self, element: int) -> OffsetRange:
        return OffsetRange(0, len(self._encoded))

    def create_tracker(self, restriction: OffsetRange) -> OffsetRestrictionTracker:
        return OffsetRestrictionTracker(restriction)

    def restriction_size(self, element: int, restriction: OffsetRange) -> int:
        return restriction.size()

    def split(self, element: int, restriction: OffsetRange) -> Iterator[OffsetRange]:
        yield restriction

    def truncate(self, element: int, restriction: OffsetRange) -> None:
        return None

    def initial_estimator_state(self, element: int, restriction: OffsetRange) -> Timestamp:
        return self._instant(restriction.start) if restriction.size() else MAX_TIMESTAMP

    def create_watermark_estimator(self, state: Timestamp) -> ManualWatermarkEstimator:
        return ManualWatermarkEstimator(state)

    def estimator_state_coder(self) -> beam.coders.Coder:
        return beam.coders.registry.get_coder(Timestamp)


class Collect(beam.PTransform):
    """Sealed releases -> ``window-trigger`` files of a folder; a second value is an error."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = str(folder)

    def expand(self, releases: Any) -> Any:
        return releases | beam.Map(_keep, self._folder)


def _keep(batch: pa.RecordBatch, folder: str) -> None:
    metadata = batch.schema.metadata
    name = f"{int(metadata[WINDOW])}-{int(metadata[TRIGGER])}"
    path = Path(folder) / name
    data = sealed_bytes(batch)
    if path.exists() and path.read_bytes() != data:
        raise AssertionError("a release has two values")
    path.write_bytes(data)


def collected(folder: Path) -> dict[tuple[int, int], bytes]:
    """(window, trigger) -> bytes of what `Collect` was given."""
    out = {}
    for path in folder.iterdir():
        window, trigger = path.name.split("-")
        out[int(window), int(trigger)] = path.read_bytes()
    return out
