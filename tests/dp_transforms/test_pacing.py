"""Where BOUND waits for RELEASE: by looking at every trigger time, and in the store."""

from collections.abc import Iterator

import pytest

from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms.batches import admitted_schema, concat, record_schema
from dpstream.dp_transforms.flow import BoundCallback, ReleaseCallback
from dpstream.dp_transforms.pacing import Pace, last_tests, may_decide, next_test
from dpstream.state import open as stores
from tests.dp_transforms.runs import SKIPPING
from tests.streams import begin

PLANS = pytest.mark.parametrize("plan", SKIPPING.values(), ids=list(SKIPPING))


def stops_by_hand(plan: Plan) -> dict[int, list[tuple[int, int]]]:
    """Trigger time -> (window, step) of the tests that fall on it."""
    line, found = plan.timeline, dict[int, list[tuple[int, int]]]()
    for window in range(line.windows):
        for step in plan.design.test_triggers.tolist():
            found.setdefault(line.base(window) + step, []).append((window, step))
        if window and plan.design.remembers:  # its start, at which it reads what was published
            found.setdefault(line.base(window), [])
    return found


@PLANS
def test_the_next_test_of_any_window(plan: Plan) -> None:
    at, last = stops_by_hand(plan), plan.timeline.last_trigger_time
    for after in range(last + 1):
        assert next_test(plan, after) == min((t for t in at if t > after), default=None)


@PLANS
def test_what_must_be_committed_before(plan: Plan) -> None:
    at, line = stops_by_hand(plan), plan.timeline
    for time in range(1, line.last_trigger_time + 1):
        found = last_tests(plan, time)
        before = [t for t in at if t < time and at[t]]
        for window in line.windows_at(time):
            mine = [step for t in before for w, step in at[t] if w == window]
            assert found.get(window) == (max(mine) if mine else None)
        # The stop before, also of a window that closed with it, if nothing was announced since.
        if before and max(before) == time - 1:
            assert all(found[window] == step for window, step in at[time - 1])


@PLANS
def test_the_clock_waits_for_every_key_shard(plan: Plan, store_paths: Iterator[str]) -> None:
    run = begin(plan, next(store_paths), shards=2)
    store, pace = run.open(), Pace(run)
    decide, release = BoundCallback(run)(), ReleaseCallback(run)()
    records, pairs = (concat([], schema(plan)) for schema in (record_schema, admitted_schema))
    since = 0
    for _ in range(3):
        upto = pace(since + 1)
        assert upto == next_test(plan, since)
        for shard in range(2):
            decide(shard, [records], upto, since)
        for shard in range(2):
            if stops_by_hand(plan)[upto]:
                assert pace(upto + 1) == upto  # not before the last one
                assert not may_decide(plan, store, upto + 1)
            list(release(shard, [pairs], upto, since).outputs)
        assert may_decide(plan, store, upto + 1) and pace(upto + 1) > upto
        since = upto
    stores.close_all()
