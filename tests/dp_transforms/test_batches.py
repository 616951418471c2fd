"""The element of every collection: its coder, views without copies, rows regrouped by shard.

Batches by reference: each is taken once, by the process and the run that gave it.

Names of columns that travel between stages, beside those that a job's key columns may have.

Steps in their order, runs of them that share a commit, and one sealed object of each.
"""

import json
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.budget.calibration import calibrate
from dpstream.accounting.errors import RunError, UsageError, required
from dpstream.accounting.fields import Field
from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms import batches, release
from dpstream.dp_transforms.batches import (
    HAND_OVER,
    HAND_OVER_ROWS,
    PART,
    SHARD,
    ArrowBatchCoder,
    admitted_schema,
    concat,
    empty,
    ids_of,
    is_ticket,
    part_of,
    record_schema,
    release_schema,
    shard_release_schema,
    split_by_shard,
)
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.telemetry import forget_error
from dpstream.state.arrow import id_array
from dpstream.state.store import RunIdentity
from tests.dp_transforms.runs import PLANS
from tests.state.conformance import ids
from tests.streams import (
    COUNT,
    MEAN,
    SUM,
    generate,
    make_plan,
)

SCHEMA = pa.schema([pa.field("unit", pa.binary(16), nullable=False), ("text", pa.string())])


def rows_of(count: int, size: int) -> pa.RecordBatch:
    ids = id_array(ids_of(pa.array([n.to_bytes(16, "big") for n in range(count)], pa.binary(16))))
    return pa.RecordBatch.from_arrays([ids, pa.array(["x" * size] * count)], schema=SCHEMA)


def test_text_beyond_what_a_column_holds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are never dropped instead."""

    def overflow(column: pa.ChunkedArray) -> pa.Array:
        raise pa.ArrowInvalid("offset overflow while concatenating arrays")

    monkeypatch.setattr(batches, "one_array", overflow)
    with pytest.raises(RunError):
        concat([rows_of(2, 3), rows_of(2, 3)], SCHEMA)


def test_concat_takes_batches_from_a_generator_and_keeps_their_order() -> None:
    parts = [rows_of(n, n) for n in (3, 0, 5)]
    batch = concat((part for part in parts), SCHEMA)
    assert batch.to_pylist() == [row for part in parts for row in part.to_pylist()]
    assert concat(iter(()), SCHEMA).num_rows == 0
    assert concat([parts[0]], SCHEMA).column(1).buffers()[2].address == (
        parts[0].column(1).buffers()[2].address
    ), "a batch alone is not copied"


def test_the_coder_is_exact_and_writes_only_its_own_rows() -> None:
    coder = ArrowBatchCoder()
    batch = generate(make_plan(), records=900).batches(300)[0]
    assert coder.is_deterministic()
    assert coder.decode(coder.encode(batch)).equals(batch, check_metadata=True)
    assert len(coder.encode(batch.slice(5, 3))) < len(coder.encode(batch)) / 3
    assert coder.encode(coder.decode(coder.encode(batch))) == coder.encode(batch)


def test_ids_are_seen_where_they_stand() -> None:
    column = id_array(np.arange(10, dtype=np.uint64).reshape(5, 2))
    assert ids_of(column).tolist() == [[2 * n, 2 * n + 1] for n in range(5)]
    part = column.slice(2, 2)
    assert ids_of(part).tolist() == [[4, 5], [6, 7]]
    assert np.shares_memory(ids_of(part), ids_of(column))
    assert ids_of(id_array(np.empty((0, 2), np.uint64))).shape == (0, 2)


@pytest.mark.parametrize("shards", [1, 3, 4])
@pytest.mark.parametrize("times", [1, 2 * HAND_OVER_ROWS])
def test_rows_keep_their_order_within_a_shard(shards: int, times: int) -> None:
    """Also where pieces are small, and share their buffers."""
    shard = np.tile([2, 0, 2, 0, 0], times) % shards
    batch = pa.RecordBatch.from_pydict({"n": np.arange(5 * times)})
    by_shard = {n: rows.column("n").to_pylist() for n, rows in split_by_shard(batch, shard, shards)}
    assert by_shard == {n: np.flatnonzero(shard == n).tolist() for n in set(shard.tolist())}
    assert list(split_by_shard(batch.slice(0, 0), shard[:0], shards)) == []


def test_schemas_name_what_the_plan_needs() -> None:
    plan = make_plan(aggregates=(COUNT, SUM), key=("string", "int"), stamped=True)
    assert record_schema(plan).names == [
        "unit", "stamp", "_event_trigger_time", "partition", "offset", "page", "lang", "v1",
    ]  # fmt: skip
    assert "_event_trigger_time" not in record_schema(make_plan()).names
    assert admitted_schema(plan).names == [
        "window", "trigger", "_id", "unit", "page", "lang", "v1",
    ]  # fmt: skip
    assert "rank" in admitted_schema(make_plan(per_key_bound=1)).names
    released = shard_release_schema(plan).names
    assert released == ["page", "lang", "_id", "n", "n_sd", "total", "total_sd"]
    assert set(released) - {"_id"} < set(release_schema(plan).names)
    assert empty(release_schema(plan)).num_rows == 0


def test_large_batches_are_handed_over_by_reference_and_once() -> None:
    coder, large = ArrowBatchCoder(), pa.RecordBatch.from_pydict({"n": list(range(2000))})
    assert not is_ticket(coder.encode(large))
    with HAND_OVER.open():
        ticket = coder.encode(large)
        assert len(ticket) < 50 and coder.decode(ticket) is large
        with pytest.raises(RunError):
            coder.decode(ticket)
        assert coder.decode(coder.encode(large.slice(0, 9))).num_rows == 9
        lost = coder.encode(large)
        assert len(HAND_OVER) == 1
    assert len(HAND_OVER) == 0, "what nobody has taken is freed"
    forget_error()
    with pytest.raises(RunError):
        coder.decode(lost)
    forget_error()
    with HAND_OVER.open():
        assert is_ticket(coder.encode(large)), "the number of the ticket before is in use again"
        with pytest.raises(RunError):
            coder.decode(lost)
    forget_error()


def test_hand_overs_that_overlap_end_together() -> None:
    large = pa.RecordBatch.from_pydict({"n": list(range(2000))})
    with HAND_OVER.open():
        with HAND_OVER.open():
            ticket = required(HAND_OVER.give(large), "it is large and one is open")
        assert HAND_OVER.take(ticket) is large
    assert HAND_OVER.give(large) is None


def test_runs_by_reference_and_by_bytes_are_not_mixed_in_a_process() -> None:
    """A run whose runner decodes elsewhere would otherwise get the tickets of the other."""
    large = pa.RecordBatch.from_pydict({"n": list(range(2000))})
    with HAND_OVER.open(), pytest.raises(RunError):
        HAND_OVER.by_bytes().__enter__()
    with HAND_OVER.by_bytes():
        with HAND_OVER.by_bytes():
            pass
        with pytest.raises(RunError):
            HAND_OVER.open().__enter__()
        assert HAND_OVER.give(large) is None
    with HAND_OVER.open():
        assert HAND_OVER.give(large) is not None


def test_batches_of_many_threads_keep_apart() -> None:
    """Each gets back what it gave, and nothing is left."""

    def pass_on(number: int) -> bool:
        batch = pa.RecordBatch.from_pydict({"n": np.full(2000, number)})
        tickets = [required(HAND_OVER.give(batch), "one is open") for _ in range(200)]
        return all(HAND_OVER.take(ticket) is batch for ticket in tickets)

    with HAND_OVER.open(), ThreadPoolExecutor(8) as threads:
        assert all(threads.map(pass_on, range(16)))
        assert len(HAND_OVER) == 0


def keyed(plan: Plan, name: str) -> Plan:
    """The plan with one key column of that name."""
    return msgspec.structs.replace(plan, key=(Field(name, "string"),)).check()


@pytest.mark.parametrize("plan", [*PLANS.values(), make_plan(stamped=True)])
def test_no_key_column_may_have_the_name_of_an_inner_one(plan: Plan) -> None:
    schemas = record_schema(plan), admitted_schema(plan), shard_release_schema(plan)
    inner = {name for schema in schemas for name in schema.names} - {f.column for f in plan.key}
    for name in inner:
        with pytest.raises(UsageError):
            keyed(plan, name)


@pytest.mark.parametrize("name", ["step_index", "event_trigger_time", "leaf", "event_cut", "cut"])
def test_a_key_column_may_have_any_other_name(name: str) -> None:
    plan = keyed(make_plan(stamped=True), name)
    for schema in (record_schema(plan), admitted_schema(plan), shard_release_schema(plan)):
        assert len(set(schema.names)) == len(schema.names)


def test_a_group_ends_when_it_has_enough_steps_or_rows() -> None:
    rows = [0, 0, 0, 0, 10, 4, 6, 0, 25, 1]
    batches = [pa.RecordBatch.from_arrays([pa.nulls(n)], names=["x"]) for n in rows]
    steps = [(0, trigger, batch) for trigger, batch in enumerate(batches, 1)]
    groups = list(release.in_groups(steps, lambda step: step[2].num_rows, 3, 10))
    assert [step for group in groups for step in group] == steps
    assert [[step[1] for step in group] for group in groups] == [
        [1, 2, 3], [4, 5], [6, 7], [8, 9], [10],
    ]  # fmt: skip


def pairs(*rows: tuple[int, int]) -> pa.RecordBatch:
    """Admitted pairs of these (window, trigger)s; ``n`` says their place."""
    window, trigger = np.array(rows, np.int32).reshape(-1, 2).T
    return pa.RecordBatch.from_pydict({"window": window, "trigger": trigger, "n": range(len(rows))})


@pytest.mark.parametrize("together", [1, 2, 1000])
def test_steps_come_by_trigger_time_and_then_by_window(
    together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of 4 triggers begin every 2; rows keep their order within a step."""
    monkeypatch.setattr(release, "COMMIT_ROWS", together)
    timeline = make_plan(triggers=4, slide=2, windows=3).timeline
    rows = pairs((1, 1), (0, 3), (1, 1), (0, 1), (1, 2), (2, 1))
    steps = [
        (window, trigger, batch.column("n").to_pylist())
        for window, trigger, batch in release.steps_through(timeline, rows, 5, since=1)
    ]
    assert steps == [
        (0, 2, []), (0, 3, [1]), (1, 1, [0, 2]), (0, 4, []), (1, 2, [4]), (1, 3, []), (2, 1, [5]),
    ]  # fmt: skip
    assert list(release.steps_through(timeline, pairs(), 1, since=1)) == []


def test_rows_ahead_of_their_stamps_wait() -> None:
    timeline = make_plan(triggers=4, slide=2, windows=3).timeline
    rows = pairs((0, 4), (1, 3), (1, 2), (2, 1))
    due, later = release.due_by(timeline, rows, 4)
    assert (due.column("n").to_pylist(), later.column("n").to_pylist()) == ([0, 2], [1, 3])
    due, later = release.due_by(timeline, rows, 9)
    assert due is rows and later.num_rows == 0


PLAN = make_plan(aggregates=(COUNT, MEAN), windows=3)
IDENTITY = RunIdentity(
    "ab" * 16, "22" * 16, 0, 2, "key", "source", "{}", calibration=calibrate(PLAN)
)


def part(*keys: str) -> pa.RecordBatch:
    """A shard's rows, with a mean over nothing."""
    named = id_array(ids([ord(key) for key in keys]))
    size, one = len(keys), np.ones(len(keys))
    columns = [list(keys), named, one, one, np.full(size, np.nan), np.full(size, np.nan)]
    arrays = [pa.array(column) for column in columns]
    return pa.RecordBatch.from_arrays(arrays, schema=shard_release_schema(PLAN))


def sealed(ring: KeyRing, *parts: pa.RecordBatch, window: int = 1, trigger: int = 3):  # type: ignore[no-untyped-def]
    prefix = np.array([1, 2], np.uint64)
    [batch] = release.seal(PLAN, IDENTITY, ring.release, prefix, window, trigger, parts)
    return batch


def test_a_release_is_sorted_by_key_whatever_the_shards(ring: KeyRing) -> None:
    one = sealed(ring, part("c", "a"), part("b"))
    other = sealed(ring, part("b", "a", "c"), part())
    assert one.equals(other, check_metadata=True) and one.schema.names == release_schema(PLAN).names
    assert one.column("page").to_pylist() == ["a", "b", "c"]
    assert one.column("level").null_count == one.column("level_sd").null_count == 3
    metadata = dict(one.schema.metadata)
    facts = json.loads(metadata.pop(b"dpstream"))
    assert (facts["window"]["number"], facts["trigger"]["number"]) == (1, 3)
    assert metadata == {b"dpstream.window": b"1", b"dpstream.trigger": b"3"}
    begin, end = PLAN.timeline.window_bounds(1)
    row = one.slice(0, 1)
    micros = [row.column(n).cast(pa.int64())[0].as_py() for n in ("window_start", "window_end")]
    assert micros == [begin, end] and set(one.column("plan_hash").to_pylist()) == {"ab" * 16}
    assert sealed(ring).num_rows == 0


@pytest.mark.parametrize("size", [0, 8, 9, 16, 17, 61])
def test_a_large_release_has_parts_of_the_same_rows(
    size: int, ring: KeyRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order of keys, whatever the shards; one part says nothing of parts."""
    keys = list(map(chr, np.random.default_rng(size).permutation(np.arange(97, 97 + size))))
    one_part = sealed(ring, part(*keys))
    monkeypatch.setattr(release, "RELEASE_ROWS", 8)
    monkeypatch.setattr(release, "MERGED_ROWS", 2)
    for shards in (1, 3, 20):
        rows = (part(*keys[shard::shards]) for shard in range(shards))
        prefix = np.array([1, 2], np.uint64)
        parts = list(release.seal(PLAN, IDENTITY, ring.release, prefix, 1, 3, rows))
        assert pa.Table.from_batches(parts).equals(pa.Table.from_batches([one_part]))
        expected = [(number, len(parts)) for number in range(max(1, -(-size // 8)))]
        assert [part_of(batch) for batch in parts] == expected
        assert all(batch.num_rows == 8 for batch in parts[:-1])
    assert (PART in parts[0].schema.metadata) == (size > 8)


def test_a_row_has_an_id_of_its_key_window_and_trigger(ring: KeyRing) -> None:
    names = [
        tuple(sealed(ring, part("a", "b"), window=w, trigger=t).column("release_id").to_pylist())
        for w, t in ((0, 1), (0, 2), (1, 1))
    ]
    assert len({name for group in names for name in group}) == 6


def test_an_insecure_run_says_so_in_every_release() -> None:
    assert release.stamped_run_id(PLAN, IDENTITY) == "22" * 16
    insecure = msgspec.structs.replace(IDENTITY, insecure=True)
    assert release.stamped_run_id(PLAN, insecure) == "INSECURE-" + "22" * 16


class State:
    """Beam's state of one key: a bag, and a value."""

    def __init__(self) -> None:
        self.rows: list[pa.RecordBatch] = []
        self.value: bytes | None = None

    def add(self, row: pa.RecordBatch) -> None:
        self.rows.append(row)

    def read(self) -> list[pa.RecordBatch] | bytes | None:
        return self.value

    def write(self, value: bytes) -> None:
        self.value = value

    def clear(self) -> None:
        self.rows, self.value = [], None


class Bag(State):
    def read(self) -> list[pa.RecordBatch]:
        return self.rows


def test_a_release_waits_for_all_shards_and_counts_each_once() -> None:
    gather, bag, seen = release.Gather(3), Bag(), State()

    def give(shard: int) -> list[tuple[tuple[int, int], list[pa.RecordBatch]]]:
        batch = part(str(shard)).replace_schema_metadata({SHARD: str(shard)})
        return list(gather.process(((1, 3), batch), bag, seen))

    assert [give(shard) for shard in (2, 0, 2, 0)] == [[]] * 4
    ((name, parts),) = give(1)
    assert name == (1, 3)
    assert [batch.column("page")[0].as_py() for batch in parts] == ["2", "0", "1"]
    assert not bag.rows and seen.value is None
