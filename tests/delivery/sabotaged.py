"""Sabotaged variants of the stages that wait: each is one plausible mistake."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np

from dpstream.accounting.errors import RunError
from dpstream.dp_transforms import flow
from dpstream.dp_transforms.beam import buffer, clock
from dpstream.dp_transforms.beam.buffer import BufferUntilTriggerTime
from dpstream.dp_transforms.beam.clock import instant
from dpstream.dp_transforms.pacing import Pace
from dpstream.dp_transforms.published_keys import PublishedKeys
from dpstream.dp_transforms.run import Run
from tests.delivery import world

Patch = Callable[[], contextlib.AbstractContextManager[Any]]


def _replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Patch:
    @contextlib.contextmanager
    def patch() -> Iterator[None]:
        with mock.patch.object(owner, name, make(getattr(owner, name))):
            yield

    return patch


def _data_driven(real: Any) -> Any:
    """The watermark of a source that follows event times."""
    return lambda here, planned: max(here.latest_event, real(here, planned))


def _nothing_waits(real: Any) -> Any:
    def bound(*args: Any) -> Any:
        out = real(*args)
        return out._replace(waiting=out.waiting.slice(0, 0))

    return bound


def _since_ignored(real: Any) -> Any:
    return lambda plan, store, shard, records, upto, since, *more: real(
        plan, store, shard, records, upto, 0, *more
    )


def _early(real: Any) -> Any:
    return lambda line, trigger_time, ticks=0: real(line, trigger_time, ticks - 1)


def _before_the_last(real: Any) -> Any:
    """A stride is taken when its first trigger time is complete."""

    def arm(stage: BufferUntilTriggerTime, timer: Any, done: int, announced: list[int]) -> int:
        trigger_time: int = real(stage, timer, done, announced)
        if trigger_time > done:
            timer.set(instant(stage._timeline, done + 1, stage._ticks))
        return trigger_time

    return arm


def _all_it_knows(real: Any) -> Any:
    """A shard stops at the last trigger time that it has heard of, others elsewhere."""

    def arm(stage: BufferUntilTriggerTime, timer: Any, done: int, announced: list[int]) -> int:
        if announced:
            announced[:] = [done + 1, announced[-1]]
        trigger_time: int = real(stage, timer, done, announced)
        return trigger_time

    return arm


def _first_heard(real: Any) -> Any:
    """A shard begins with the clock tick that comes first."""

    def process(stage: Any, *args: Any, **more: Any) -> Any:
        for out in real(stage, *args, **more):
            out.value = (out.value[1], *out.value[1:])
            yield out

    return process


def _late_tick(real: Any) -> Any:
    """A clock tick holds the watermark before the last of its trigger times only."""

    def process(stage: Any, *args: Any, **more: Any) -> Any:
        for out in real(stage, *args, **more):
            out.timestamp = clock.instant(stage._timeline, out.value[2], -1)
            yield out

    return process


def _not_anew(real: Any) -> Any:
    def held(stage: flow.Bound) -> BufferUntilTriggerTime:
        out: BufferUntilTriggerTime = real(stage)
        out._anew = False
        return out

    return held


def _too_far(real: Any) -> Any:
    """A stream goes on behind a trigger time that was not delivered."""

    def resume_point(run: Run) -> Any:
        at = real(run)
        return at._replace(first=at.first + 1)

    return resume_point


def _does_not_wait(real: Any) -> Any:
    """A clock that does not ask what key shards have committed."""
    return lambda pace, first: pace._run.plan.timeline.last_trigger_time


@contextlib.contextmanager
def _uncommitted_is_unpublished() -> Iterator[None]:
    """What is not committed yet counts as not published, and records do not wait for it."""
    released = PublishedKeys._released

    def late_keys(keys: PublishedKeys, window: int, shard: int, trigger: int) -> Any:
        try:
            return released(keys, window, shard, trigger)
        except RunError:
            return np.empty((0, 2), np.uint64)

    waits = _replaced(Pace, "__call__", _does_not_wait)
    alone = _replaced(
        PublishedKeys, "of_keys", lambda real: lambda keys, ids, first, count, decided, upto: real(
            keys, ids, first, count, decided, decided
        )
    )  # fmt: skip
    with waits(), alone(), mock.patch.object(PublishedKeys, "_released", late_keys):
        yield


#: Name -> (patch, the rule it breaks, kind and plan of the neighbours that show it).
SABOTAGED: dict[str, tuple[Patch, str, str | None, str | None]] = {
    "watermark from event times": (
        _replaced(world, "watermark", _data_driven), "others", "far_future", "buffered",
    ),
    "rows that wait are dropped": (
        _replaced(flow, "decide_records", _nothing_waits), "lost", None, None,
    ),
    "since is ignored": (_replaced(flow, "decide_records", _since_ignored), "counted", None, None),
    "timers a millisecond early": (_replaced(buffer, "instant", _early), "lost", None, None),
    "release with BOUND": (_replaced(flow, "RELEASE_TICKS", lambda _: 0), "counted", None, None),
    "strides before they are complete": (
        _replaced(BufferUntilTriggerTime, "_arm", _before_the_last), "lost", None, None,
    ),
    "shards stop at different trigger times": (
        _replaced(BufferUntilTriggerTime, "_arm", _all_it_knows), "counted", None, None,
    ),
    "shards begin where they hear": (
        _replaced(clock._PublicClock, "process", _first_heard), "another worker", None, None,
    ),
    "clock ticks that hold nothing": (
        _replaced(clock._PublicClock, "process", _late_tick), "counted", None, None,
    ),
    "a restart asks for nothing": (
        _replaced(flow.Bound, "buffer", _not_anew), "counted", None, None,
    ),
    "a restart goes on too far": (
        _replaced(world, "resume_point", _too_far), "another worker", None, None,
    ),
    "a clock that does not wait for tests": (
        _replaced(Pace, "__call__", _does_not_wait), "decided before", None, "skip",
    ),
    "what is not committed is not published": (
        _uncommitted_is_unpublished, "does not know what was published", "ordinary", "skip",
    ),
}  # fmt: skip
