"""Rows of a new generation: no commit is too large, none of them is lost, all are read back."""

from base64 import b64decode

import numpy as np
import pytest

from dpstream.accounting.limits import COMMIT_MUTATIONS
from dpstream.state.arrow import key_pieces
from dpstream.state.retention_store import KeyPiece
from dpstream.state.spanner import fill as module
from dpstream.state.spanner.client import connect, read_rows
from dpstream.state.spanner.commits import Mutations
from dpstream.state.spanner.fill import PROGRESS, Filled, states_of
from dpstream.state.spanner.rows import ids_in, unpack_states
from dpstream.state.store import NEVER, KeyShard
from tests.state.conformance import KEY_SCHEMA, STREAMS, change, ids, releases
from tests.state.spanner.bench import SpannerBench


def piece_of(keys: list[int]) -> KeyPiece:
    states = KeyShard(KEY_SCHEMA, STREAMS)
    change(states, keys, 6)
    (piece,) = key_pieces(states)
    return piece


def test_some_keys_of_a_piece_as_states() -> None:
    piece = piece_of([1, 2, 3])
    piece.units[:], piece.round[:] = [7, 8, 9], [1, 2, 3]
    states = states_of(piece, np.array([2, 0]), KEY_SCHEMA, STREAMS)
    assert states.table.ids[:2].tolist() == ids([3, 1]).tolist()
    assert states.units[:2].tolist() == [9, 7] and states.round[:2].tolist() == [3, 1]
    assert states.due[:2].tolist() == [7, 7]
    assert np.array_equal(states.values[:2], piece.values[[2, 0]])
    assert states.key_columns(np.arange(2)).column("lang").to_pylist() == [3, 1]


@pytest.mark.parametrize(("cell", "rows"), [(8, 60_000), (400_000, 200)])
def test_no_commit_is_too_large_and_no_row_is_lost(
    cell: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits: list[Mutations] = []
    monkeypatch.setattr(module, "commit", lambda _, fill: commits.append(fill.__self__))
    filled = Filled(None)  # type: ignore[arg-type]
    filled.upsert("Progress", PROGRESS, [[n, 0, "x" * cell] for n in range(rows)])
    filled.flush()
    assert len(commits) > 2 and max(out.count for out in commits) <= COMMIT_MUTATIONS
    assert max(out.bytes for out in commits) < 40 << 20
    numbers = [
        row[0] for out in commits for _, _, upsert_rows in out._upsert for row in upsert_rows
    ]
    assert numbers == list(range(rows))


def test_filled_keys_are_rows_of_the_database(bench: SpannerBench) -> None:
    database = connect(bench.url)
    filled = Filled(database)
    states = states_of(piece_of([1, 2]), np.arange(2), KEY_SCHEMA, STREAMS)
    states.due[:2] = [2, NEVER]
    filled.keys(5, 3, 4, states, [ids([100, 101]).tobytes(), b""], np.array([False, True]))
    filled.outbox(5, 3, 1, None)
    filled.outbox(5, 3, 2, releases(("p1", 1.0)))
    filled.flush()
    rows = list(read_rows(database, "Keys", ("KeyId", "State", "UnitIds")))
    stored_states = unpack_states([row[1] for row in rows], STREAMS)
    by_key = {int(ids_in(b64decode(row[0]))[0, 0]): n for n, row in enumerate(rows)}
    # The second key has taken the next step already.
    assert stored_states["taken"][[by_key[1], by_key[2]]].tolist() == [4, 5]
    assert ids_in(b64decode(rows[by_key[1]][2])).tolist() == ids([100, 101]).tolist()
    # A list that would have been worked off stands at the next step.
    assert [row[:2] for row in read_rows(database, "KeysByDue", ("Due", "Step"))] == [[5, 4]]
    steps = {row[0]: row[1] for row in read_rows(database, "Steps", ("Step", "Releases"))}
    assert steps[1] is None and steps[2] is not None


def test_filled_units_are_rows_of_the_database(bench: SpannerBench) -> None:
    filled, named = Filled(connect(bench.url)), ids([1, 2, 3])
    units = filled.shard(0)
    units.put(named, np.array([3, 4, 5]), np.full(3, NEVER), np.zeros(3, np.int64))
    assert filled.shard(0) is units
    filled.write_units(units)
    unit_rows = list(read_rows(connect(bench.url), "Units", ("UnitId", "Records")))
    assert sorted(ids_in(b64decode(row[0]))[0, 0] for row in unit_rows) == [1, 2, 3]
