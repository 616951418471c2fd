"""What sources share: trackers, watermarks, bundles, readers, and waiting for releases."""

import pickle
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.arrays import Int64
from dpstream.dp_transforms.batches import (
    DEAD_LETTER_SCHEMA,
    OFFSET,
    PARTITION,
    SHARD,
    admitted_schema,
    concat,
    record_schema,
)
from dpstream.dp_transforms.beam.delivery import (
    DeliveredCallback,
    delivered_through,
    forget_delivered,
    released_through,
    resume_point,
)
from dpstream.dp_transforms.flow import (
    BoundCallback,
    ReleaseCallback,
    run_in_memory,
    stride,
)
from dpstream.dp_transforms.ingest.records import Canonicaliser
from dpstream.dp_transforms.noise.ids import key_ids
from dpstream.dp_transforms.run import Run
from dpstream.pipelines.connectors import inputs
from dpstream.pipelines.connectors.files.sink import FileSink
from dpstream.pipelines.connectors.inputs import (
    ASK_SECONDS,
    STRIDES_AHEAD,
    Backpressure,
    ReaderPool,
    positioned,
    refusal,
)
from dpstream.pipelines.connectors.run_manifest import CatchUpOutlet
from dpstream.pipelines.formats.rows import Reason, Refused, Rows
from dpstream.state import open as stores
from dpstream.state.idtable import shard_of
from tests.streams import KEYS, STEP, begin, generate, make_plan


class Counted:
    """A reader that knows whether it is closed."""

    made: list["Counted"]

    def __init__(self) -> None:
        self.used, self.closed = 0.0, False
        self.made.append(self)

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def none_made() -> None:
    Counted.made = []


def test_a_reader_has_one_caller_and_goes_on() -> None:
    readers = ReaderPool[Counted]()
    with readers.lend("a", Counted) as first, readers.lend("a", Counted) as second:
        assert first is not second
    with readers.lend("b", Counted) as other, readers.lend("a", Counted) as again:
        assert again in (first, second) and other not in (first, second)
    assert len(Counted.made) == 3 and not any(reader.closed for reader in Counted.made)


def test_one_that_fails_is_not_used_again() -> None:
    readers = ReaderPool[Counted]()
    with pytest.raises(ValueError), readers.lend("a", Counted) as first:
        raise ValueError
    with readers.lend("a", Counted) as second:
        assert first.closed and second is not first


def test_no_more_are_kept_than_may_wait() -> None:
    """What waits in a second reader of the same would come late."""
    readers = ReaderPool[Counted](keep=1)
    with readers.lend("a", Counted), readers.lend("a", Counted):
        pass
    assert [reader.closed for reader in Counted.made].count(False) == 1
    with readers.lend("a", Counted) as lent_reader:
        assert not lent_reader.closed and len(Counted.made) == 2


def test_unused_ones_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    readers = ReaderPool[Counted]()
    with readers.lend("a", Counted) as first:
        pass
    with readers.lend("b", Counted):
        assert not first.closed
    monkeypatch.setattr(inputs, "UNUSED_SECONDS", -1.0)
    with readers.lend("c", Counted):
        assert first.closed
    with readers.lend("a", Counted) as second:
        assert second is not first
    readers.close()
    assert all(reader.closed for reader in Counted.made)


PLAN = make_plan(triggers=12, windows=6, slide=6, lateness=2, skew=STEP // 2, stamped=True)
LINE = PLAN.timeline
TRIGGER_TIMES_AHEAD = STRIDES_AHEAD * stride(LINE)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    yield begin(PLAN, tmp_path / "state.db", shards=2)
    stores.close_all()


def step_through(run: Run, upto: int, shards: range = range(2)) -> None:
    """RELEASE of some shards, one trigger time at a time, without data."""
    release = ReleaseCallback(run)()
    for shard in shards:
        for trigger_time in range(1, upto + 1):
            outputs = list(release(shard, [], trigger_time, trigger_time - 1).outputs)
            assert all(b.schema.metadata[SHARD] == str(shard).encode() for _, b in outputs)


def test_released_is_what_all_shards_have_stepped_through(run: Run) -> None:
    assert released_through(run) == 0
    step_through(run, 9, range(1))
    assert released_through(run) <= 0
    step_through(run, 7, range(1, 2))
    assert released_through(run) in (6, 7)
    step_through(run, LINE.last_trigger_time)
    assert released_through(run) == LINE.last_trigger_time


def test_windows_that_take_no_steps_hold_nobody(run: Run) -> None:
    """A restore gave them up: no step of theirs will ever be released."""
    store = run.open()
    store.retained_windows = msgspec.structs.replace(store.retained_windows, abandoned=3)
    past = LINE.base(3)
    assert past > TRIGGER_TIMES_AHEAD + 1 and released_through(run) == past
    assert not Backpressure(run).holds(LINE.instant_of(past), 1 << 40)
    assert Backpressure(run).holds(LINE.instant_of(past + TRIGGER_TIMES_AHEAD + 1), 1 << 40)
    step_through(run, LINE.last_trigger_time)
    assert released_through(run) == LINE.last_trigger_time


@pytest.mark.parametrize("triggers", [12, 640])
def test_a_source_within_a_stride_is_never_held(triggers: int, tmp_path: Path) -> None:
    """Or a stride that is waited for could never come."""
    plan = make_plan(triggers=triggers, windows=6, slide=triggers // 2, stamped=True)
    run = begin(plan, tmp_path / "long.db", shards=2)
    for ahead in range(stride(plan.timeline) + 2):
        assert not Backpressure(run).holds(plan.timeline.instant_of(ahead), 1 << 40)


def test_a_source_far_ahead_waits_until_releases_follow(run: Run) -> None:
    backpressure = pickle.loads(pickle.dumps(Backpressure(run)))  # noqa: S301
    far = LINE.instant_of(TRIGGER_TIMES_AHEAD + 3)
    assert not backpressure.holds(LINE.start, 1)
    assert backpressure.holds(far, 1 << 40)
    step_through(run, 6)
    backpressure._checked_at -= 2 * ASK_SECONDS
    assert not backpressure.holds(far, 1 << 40)


def test_few_rows_may_be_further_ahead(run: Run) -> None:
    backpressure = Backpressure(run)
    assert not backpressure.holds(LINE.start, 10)
    assert not backpressure.holds(LINE.instant_of(TRIGGER_TIMES_AHEAD + 10), 10)
    # Who does not know must wait.
    assert Backpressure(run).holds(LINE.instant_of(TRIGGER_TIMES_AHEAD + 10))


def test_the_end_of_the_plan_is_as_far_as_a_source_can_be(run: Run) -> None:
    step_through(run, LINE.last_trigger_time)
    assert not Backpressure(run).holds(1 << 62, 1 << 40)


def test_a_store_says_from_where_on_records_matter(run: Run) -> None:
    """Going on from the resume point gives what was not lost."""
    stream = generate(PLAN, 5, records=3000)
    batches = stream.batches(200)
    want = {
        (b.schema.metadata[b"dpstream.window"], b.schema.metadata[b"dpstream.trigger"]): b
        for b in run_in_memory(run_elsewhere(run), batches)[0]
    }
    first, begin_at = resume_point(run)
    assert (first, begin_at) == (1, LINE.start - LINE.max_skew)
    got = drive(run, batches, 1, 20)
    at = resume_point(run)
    assert at.first == 1 and delivered_through(run.open()) == 0  # nothing was delivered
    assert at.begin > LINE.start  # windows are complete
    late = np.flatnonzero(stream.stamp >= at.begin)
    got |= drive(run, stream.take(late).batches(200), at.first, LINE.last_trigger_time)
    assert {name: rows(parts) for name, parts in got.items()} == {
        (int(w), int(t)): b.num_rows for (w, t), b in want.items()
    }


def test_what_was_delivered_is_noted_and_forgotten(run: Run, tmp_path: Path) -> None:
    outlet = CatchUpOutlet(run, FileSink(tmp_path / "out", "parquet"))
    note, store = DeliveredCallback(run, outlet)(), run.open()
    forget_delivered(store)
    for trigger_time in (3, 2):
        note(0, [], trigger_time, trigger_time)
        assert delivered_through(store) == 3
    assert resume_point(run).first == 4
    forget_delivered(store)
    assert delivered_through(store) == 0 and resume_point(run).first == 1
    note(0, [], 2, 2)
    assert delivered_through(store) == 2


def run_elsewhere(run: Run) -> Run:
    return begin(run.plan, run.store.removeprefix("sqlite:") + ".calm", shards=2)


def rows(parts: dict[int, pa.RecordBatch]) -> int:
    return sum(part.num_rows for part in parts.values())


def drive(
    run: Run, batches: list[pa.RecordBatch], first: int, last: int
) -> dict[tuple[int, int], dict[int, pa.RecordBatch]]:
    """Both stages, one trigger time at a time, all records at hand: a pipeline without state."""
    ingest, plan = Canonicaliser(run.plan, KEYS.ring()), run.plan
    good = concat([ingest(batch)[0] for batch in batches], record_schema(plan))
    unit = shard_of(np.frombuffer(good["unit"].buffers()[1], np.uint64).reshape(-1, 2), 2)
    bags = [good.filter(pa.array(unit == shard)) for shard in range(2)]
    decide, release = BoundCallback(run)(), ReleaseCallback(run)()
    held: list[list[pa.RecordBatch]] = [[], []]
    out: dict[tuple[int, int], dict[int, pa.RecordBatch]] = {}
    for trigger_time in range(first, last + 1):
        for shard in range(2):
            bound = decide(
                shard, [bags[shard]], trigger_time, 0 if trigger_time == first else trigger_time - 1
            )
            for target, batch in bound.outputs:
                held[target].append(batch)
            assert bound.waiting is not None
            bags[shard] = bound.waiting
        for shard in range(2):
            made = release(shard, held[shard], trigger_time, trigger_time - 1)
            for name, part in made.outputs:
                out.setdefault(name, {})[shard] = part
            held[shard] = [made.waiting] if made.waiting is not None else []
    ring = KEYS.ring()
    for shard, parts in enumerate(held):
        admitted = concat(parts, admitted_schema(plan))
        assert (shard_of(key_ids(plan, ring.key, admitted), 2) == shard).all()
    return out


@pytest.mark.parametrize("size", [1, 3, 7, 100])
def test_batches_say_where_their_first_row_stands(size: int) -> None:
    rows = Rows(40, pa.RecordBatch.from_pydict({"x": list(range(7))}))
    batches = list(positioned(rows, 5, size))
    assert pa.Table.from_batches([b.replace_schema_metadata(None) for b in batches])[
        "x"
    ].to_pylist() == list(range(7))
    for batch in batches:
        first = str(40 + batch["x"][0].as_py())
        assert batch.schema.metadata == {PARTITION: b"5", OFFSET: first.encode()}
        assert 0 < batch.num_rows <= size


@pytest.mark.parametrize("partition", [3, np.array([3, 3], np.int64)])
def test_a_refusal_has_position_and_reason_and_nothing_else(partition: int | Int64) -> None:
    refused = Refused(np.array([4, 9], np.int64), [Reason.EMPTY.value, Reason.MALFORMED.value])
    batch = refusal(refused, partition)
    assert batch.schema.equals(DEAD_LETTER_SCHEMA)
    assert [tuple(row.values()) for row in batch.to_pylist()] == [
        (3, 4, "empty"), (3, 9, "malformed"),
    ]  # fmt: skip
