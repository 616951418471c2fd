"""Steps that keys have taken: on another layout of shards, or in a commit of a part."""

import numpy as np
import pyarrow as pa

from dpstream.state.arrow import id_array
from dpstream.state.retention_store import ReshardProgress
from dpstream.state.store import KeyShard
from dpstream.state.taken import TakenSteps
from tests.state.conformance import KEY_SCHEMA, STREAMS
from tests.state.life_conformance import spread

#: Window 3 was resharded when its two shards had come to 4 and 2, window 5 twice.
TAKEN = TakenSteps(
    {3: [ReshardProgress((4, 2))], 5: [ReshardProgress((1, 1)), ReshardProgress((0, 0, 6))]}
)


def states_with(keys: list[int]) -> KeyShard:
    """Keys whose numbers' remainders are their shards, on any layout."""
    states, ids = KeyShard(KEY_SCHEMA, STREAMS), spread(keys)
    columns = [pa.array([f"p{k}" for k in keys]), pa.array(keys, pa.int64()), id_array(ids)]
    states.intern(ids, pa.RecordBatch.from_arrays(columns, names=["page", "lang", "_id"]))
    return states


def test_keys_of_a_shard_that_was_ahead_have_taken_the_step() -> None:
    keys = spread([0, 1, 2, 3])
    step_flags = {t: TAKEN.before_reshard(3, t, keys).tolist() for t in (2, 3, 4, 5)}
    assert step_flags == {
        2: [True] * 4, 3: [True, False] * 2, 4: [True, False] * 2, 5: [False] * 4,
    }  # fmt: skip
    assert not TAKEN.before_reshard(4, 1, keys).any()
    # Any of several reshards counts.
    assert TAKEN.before_reshard(5, 6, spread([2, 3, 5])).tolist() == [True, False, True]


def test_a_step_is_left_for_the_others() -> None:
    states = states_with([0, 1, 2, 3])
    due, ids = np.array([0, 1, 3]), spread([0, 1, 9, 8])
    slots, rows = TAKEN.remaining(states, 3, 3, due, ids)
    assert slots.tolist() == [1, 3] and states.done[:4].tolist() == [True, False, True, False]
    # Key 9 is new on its shard; key 8 came from the shard that was ahead and has no state.
    assert rows is not None and rows.tolist() == [False, True, True, False]


def test_a_part_that_was_committed_is_left_out() -> None:
    states = states_with([0, 1, 2])
    states.done[1] = True
    slots, rows = TAKEN.remaining(states, 7, 1, np.array([0, 1, 2]), spread([1, 2, 4]))
    assert slots.tolist() == [0, 2] and rows is not None and rows.tolist() == [False, True, True]


def test_a_new_key_is_left_whatever_the_last_one_did() -> None:
    """Its slot is -1 here, in arrays that may be full."""
    states = states_with(list(range(1024)))
    assert len(states.done) == states.size
    states.done[-1] = True
    slots, rows = TAKEN.remaining(states, 7, 1, np.array([0, 1023]), spread([5000, 1023]))
    assert slots.tolist() == [0] and rows is not None and rows.tolist() == [True, False]


def test_nothing_is_copied_where_nobody_was_ahead() -> None:
    states, due = states_with([0, 1]), np.array([1])
    assert TAKEN.remaining(states, 7, 1, due, spread([0, 5])) == (due, None)
