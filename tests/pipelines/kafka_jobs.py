"""Jobs that read a Kafka topic, and bundles of the reader driven by hand."""

import itertools
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from apache_beam.io.restriction_trackers import OffsetRange
from apache_beam.io.watermark_estimators import ManualWatermarkEstimator
from apache_beam.pvalue import TaggedOutput
from apache_beam.runners.sdf_utils import RestrictionTrackerView, ThreadsafeRestrictionTracker
from apache_beam.utils.timestamp import Timestamp

from dp_transforms.batches import OFFSET, PARTITION
from pipelines.job import Job, load_job

_numbers = itertools.count()
_TEXT = """
[source]
kind = "kafka"
servers = "{servers}"
topic = "{topic}"
settle = "{settle}"
{more}
[schema]
unit = {{ column = "user" }}
key = [{{ column = "key" }}]
event_time = {{ column = "time" }}
[[aggregate]]
name = "records"
kind = "count"
[time]
start = "2024-01-01T00:00:00Z"
window = "1d"
trigger_every = "6h"
[privacy]
epsilon = 6.0
delta = 1e-9
contributions = 4
insecure_test_key = "{key}"
[sink]
kind = "parquet"
path = "releases"
[performance]
batch_rows = {batch_rows}
"""


def kafka_job(
    folder: Path,
    servers: str,
    topic: str,
    more: str = "",
    settle: str = "100ms",
    batch_rows: int = 1000,
) -> Job:
    """A job on a topic; ``more`` are further lines of ``[source]``."""
    path = folder / f"kafka{next(_numbers)}.toml"
    path.write_text(
        _TEXT.format(
            servers=servers, topic=topic, more=more, settle=settle, key="0f" * 32,
            batch_rows=batch_rows,
        )
    )  # fmt: skip
    return load_job(path)


def record(i: int) -> dict[str, str]:
    """A message."""
    return {"user": f"u{i}", "key": f"k{i % 3}", "time": "2024-01-01T00:00:00Z"}


class Row(NamedTuple):
    """A delivered record."""

    partition: int
    offset: int
    values: dict[str, Any]


class Found:
    """What the source gave."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.dead: list[tuple[int, int, str]] = []

    def add(self, batch: pa.RecordBatch) -> None:
        """A batch of records or of dead letters."""
        where = batch.schema.metadata or {}
        if PARTITION not in where:
            self.dead += [tuple(row.values()) for row in batch.to_pylist()]
            return
        partition, offset = int(where[PARTITION]), int(where[OFFSET])
        self.rows += [Row(partition, offset + i, row) for i, row in enumerate(batch.to_pylist())]

    @property
    def users(self) -> dict[tuple[int, int], str]:
        """User by position; a position that came twice fails."""
        out = {(row.partition, row.offset): row.values["user"] for row in self.rows}
        assert len(out) == len(self.rows), "a position was delivered twice"
        return out


class Driver:
    """Bundles of one partition, one after the other, as a runner would run them."""

    def __init__(self, dofn: Any, partition: int = 0, start: int = 0) -> None:
        from pipelines.source_kafka import Unsplit

        dofn.setup()
        self._dofn, self._partition, self._tracker = dofn, partition, Unsplit
        self.rest = OffsetRange(start, (1 << 63) - 1)
        self.watermark: Timestamp | None = None
        self.found = Found()
        self.stamps: list[int] = []

    def bundle(self) -> int:
        """One bundle up to its self-checkpoint; the number of batches it gave."""
        tracker = ThreadsafeRestrictionTracker(self._tracker(self.rest))
        estimator = ManualWatermarkEstimator(self.watermark)
        given = list(self._dofn.read(self._partition, RestrictionTrackerView(tracker), estimator))
        tracker.check_done()
        self.rest = tracker.deferred_status()[0]
        self.watermark = estimator.current_watermark()
        for output in given:
            value = output.value
            self.found.add(value)
            if not isinstance(output, TaggedOutput):
                stamps = value.column("_append_time").cast("int64").to_pylist()
                assert output.timestamp.micros <= min(stamps)
                self.stamps += stamps
        return len(given)

    def until(self, rows: int, bundles: int = 200) -> Found:
        """Bundles until so many rows and dead letters are there."""
        for _ in range(bundles):
            self.bundle()
            if len(self.found.rows) + len(self.found.dead) >= rows:
                break
        return self.found
