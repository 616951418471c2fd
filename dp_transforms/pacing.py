"""PACE: the limit of BOUND's decisions, and the records that wait for the next pass.

**The clock** (mechanism.md section 9).  Where pairs on published keys are skipped, BOUND decides
what lies behind a test only when all key shards have committed the test.  So the public clock stops
at each trigger time at which some window tests its keys, and goes on when the store has all steps
of it.  Nothing waits for data: clock ticks reach shards without any, and every shard takes every
step.

**Waiting.**  A bounded run may stop at a trigger time before its last (``Run.upto``).  Records of
later trigger times are read, not decided, and not stored: each unit shard records which partitions
have any, so that the next pass reads only those again.  The note is private, as the store is; it
decides what is read, never what is released: a record that is read again gets its committed
decision (`dp_transforms.bounding`), and one that is not read again was decided."""

from collections.abc import Sequence

import msgspec
import numpy as np
import pyarrow as pa

from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms.batches import numpy_view
from dpstream.dp_transforms.run import Run
from dpstream.state.store import Store


def next_test(plan: Plan, after: int) -> int | None:
    """Return the first trigger time after ``after`` at which a window tests keys, or ``None``.

    A window also counts that begins and remembers published keys of others.
    """
    timeline, design = plan.timeline, plan.design
    times = []
    # The oldest open windows, and the first that opens later: those behind it test later still.
    at = timeline.windows_at(after + 1)
    behind = at.stop if len(at) else -(-after // timeline.base(1))
    last = None if timeline.end is None else timeline.windows - 1
    for window in (*at, *([behind] if last is None or behind <= last else [])):
        step = max(0, after - timeline.base(window)) + 1
        test = design.selection_step_index(step)
        if test <= design.tests:
            times.append(timeline.base(window) + int(design.test_triggers[test - 1]))
    if design.remembers:
        begins = after // timeline.base(1) + 1
        times += [timeline.base(begins)] if last is None or begins <= last else []
    return min(times, default=None)


def stops(plan: Plan, first: int = 1, through: int | None = None) -> list[int]:
    """Return trigger times from ``first`` on after which published keys change, and the last one.

    BOUND decides up to each in turn.

    Args:
        through: the last one; ``None``: of the job, which has an end.
    """
    ends, last = [first - 1], through or plan.timeline.last_trigger_time
    while ends[-1] < last:
        test = next_test(plan, ends[-1])
        ends.append(last if test is None else min(test, last))
    return ends[1:]


def last_tests(plan: Plan, trigger_time: int) -> dict[int, int]:
    """Return the step of the last test before a trigger time, by open window.

    Windows are included that are open at the trigger time or the one before.

    A window that has just closed is asked by no record, but its last test is a stop like any other.
    """
    timeline, tests = plan.timeline, {}
    for window in {*timeline.windows_at(trigger_time - 1), *timeline.windows_at(trigger_time)}:
        number = plan.design.selection_step_index(trigger_time - timeline.base(window)) - 1
        if number:
            tests[window] = int(plan.design.test_triggers[number - 1])
    return tests


def may_decide(plan: Plan, store: Store, trigger_time: int) -> bool:
    """Return whether all key shards have committed the tests that BOUND needs.

    These are the tests that records of the trigger time depend on.
    """
    retained = store.retained_windows
    before = {w: t for w, t in last_tests(plan, trigger_time).items() if w >= retained.first}
    if not before:
        return True
    done = store.completed(store.identity.shards, min(before))
    return all(done.get(window, 0) >= test for window, test in before.items())


class Pace:
    """The limit up to which the clock of a run may emit trigger times; picklable.

    Args:
        run: the run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._plan: Plan | None = None

    def __call__(self, first: int) -> int:
        """Return the last trigger time that may be emitted now.

        Args:
            first: the next trigger time; a result before it means that none may be emitted yet.
        """
        # The tests of the run, not of this program: RELEASE goes by no others.
        plan = self._plan = self._plan or self._run.explicit()
        if not may_decide(plan, self._run.open(), first):
            return first - 1
        stop = next_test(plan, first - 1)
        return plan.timeline.last_trigger_time if stop is None else stop


class _Waiting(msgspec.Struct, frozen=True):
    """A unit shard's note, of the pass through ``upto``; ``None``: any partition may have some."""

    upto: int
    partitions: tuple[int, ...] | None


def note_waiting(plan: Plan, store: Store, shard: int, upto: int, waiting: pa.RecordBatch) -> None:
    """Record the partitions of the records that a unit shard has left for a later pass.

    Args:
        upto: the pass's last trigger time.
        waiting: canonical records; where record ids name them, their positions are not the files'.
    """
    partitions: tuple[int, ...] | None = None
    if plan.record_id is None or waiting.num_rows == 0:
        partitions = tuple(np.unique(numpy_view(waiting.column("partition"))).tolist())
    note = msgspec.json.encode(_Waiting(upto, partitions)).decode()
    store.set_metadata(_name(shard), note)


def waiting_partitions(store: Store, shards: int, upto: int, read: Sequence[int]) -> list[int]:
    """Return the partitions that the pass after the one through ``upto`` must read again, in order.

    Args:
        read: those that this pass has read: all of them, unless every shard has recorded less.
    """
    partitions = set[int]()
    for shard in range(shards):
        text = store.metadata(_name(shard))
        note = None if text is None else msgspec.json.decode(text, type=_Waiting)
        if note is None or note.upto != upto or note.partitions is None:
            return sorted(read)
        partitions.update(note.partitions)
    return sorted(partitions)


def _name(shard: int) -> str:
    return f"waiting-{shard}"
