"""The element of every collection: its coder, views without copies, rows regrouped by shard.

Batches by reference: each is taken once, by the process and the run that gave it.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.errors import RunError, required
from dpstream.dp_transforms import batches
from dpstream.dp_transforms.batches import (
    HAND_OVER,
    ArrowBatchCoder,
    admitted_schema,
    concat,
    empty,
    ids_of,
    is_ticket,
    record_schema,
    release_schema,
    shard_release_schema,
    split_by_shard,
)
from dpstream.dp_transforms.telemetry import forget_error
from dpstream.state.arrow import id_array
from tests.streams import (
    COUNT,
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

    monkeypatch.setattr(batches, "_one_array", overflow)
    with pytest.raises(RunError, match="2 GiB"):
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
def test_rows_keep_their_order_within_a_shard(shards: int) -> None:
    shard = np.array([2, 0, 2, 0, 0]) % shards
    batch = pa.RecordBatch.from_pydict({"n": list(range(5))})
    by_shard = {n: rows.column("n").to_pylist() for n, rows in split_by_shard(batch, shard, shards)}
    assert by_shard == {n: np.flatnonzero(shard == n).tolist() for n in set(shard.tolist())}
    assert list(split_by_shard(batch.slice(0, 0), shard[:0], shards)) == []


def test_schemas_name_what_the_plan_needs() -> None:
    plan = make_plan(aggregates=(COUNT, SUM), key=("string", "int"), stamped=True)
    assert record_schema(plan).names == [
        "unit", "stamp", "_event_trigger_time", "partition", "offset", "page", "lang", "v1",
    ]  # fmt: skip
    assert "_event_trigger_time" not in record_schema(make_plan()).names
    assert admitted_schema(plan).names == ["window", "trigger", "unit", "page", "lang", "v1"]
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
        with pytest.raises(RunError, match="a second time"):
            coder.decode(ticket)
        assert coder.decode(coder.encode(large.slice(0, 9))).num_rows == 9
        lost = coder.encode(large)
        assert len(HAND_OVER) == 1
    assert len(HAND_OVER) == 0, "what nobody has taken is freed"
    forget_error()
    with pytest.raises(RunError, match="run that has ended"):
        coder.decode(lost)
    forget_error()
    with HAND_OVER.open():
        assert is_ticket(coder.encode(large)), "the number of the ticket before is in use again"
        with pytest.raises(RunError, match="another process, or of a run that has ended"):
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
    with HAND_OVER.open(), pytest.raises(RunError, match="passes batches as references"):
        HAND_OVER.by_bytes().__enter__()
    with HAND_OVER.by_bytes():
        with HAND_OVER.by_bytes():
            pass
        with pytest.raises(RunError, match="passes batches as bytes"):
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
