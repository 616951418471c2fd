"""The last stage of a stream: releases that are in the sink, counted on the public clock."""

import time
from typing import Any

import apache_beam as beam

from dpstream.accounting.limits import MICROS_PER_SECOND
from dpstream.accounting.plan.timeline import Timeline
from dpstream.dp_transforms.telemetry import deliveries, guarded


class CountDelivered(beam.PTransform):  # type: ignore[misc]
    """(window, trigger) of releases that are in the sink -> the same, each counted.

    Trigger times after this transform was made are the live ones.

    Args:
        line: the plan's time axis.
    """

    def __init__(self, line: Timeline) -> None:
        super().__init__()
        self._count = _Count(line, _now())

    def expand(self, names: Any) -> Any:
        """One ParDo."""
        return names | beam.ParDo(self._count).with_output_types(tuple[int, int])


class _Count(beam.DoFn):
    """Tells telemetry of a release; the wall clock decides nothing but a latency."""

    def __init__(self, line: Timeline, began: int) -> None:
        self._line, self._began = line, began

    def setup(self) -> None:
        """What is live; a worker may be set up when the first release is there already."""
        deliveries.live_from(self._began)

    @guarded("delivered")
    def process(self, element: tuple[int, int]) -> list[tuple[int, int]]:
        """One release."""
        window, trigger = element
        deliveries.delivered(self._line.instant_of(self._line.base(window) + trigger), _now())
        return [element]


def _now() -> int:
    """The wall clock in micros."""
    return time.time_ns() * MICROS_PER_SECOND // 1_000_000_000
