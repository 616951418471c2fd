"""Copies of a whole store: notes that go along, steps in part, what abandoning gives up."""

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dpstream.accounting.errors import RunError
from dpstream.accounting.plan.timeline import Timeline
from dpstream.state.copying import DELIVERED, NOTES, Abandon, copy_store
from dpstream.state.retention_store import ReshardProgress, RetainedWindows
from dpstream.state.sqlite.file import create_store
from dpstream.state.sqlite.store import SqliteStore
from dpstream.state.store import RunIdentity
from tests.state.conformance import KEY_SCHEMA, STREAMS
from tests.state.life_conformance import LINE, OLD, everything_of, fill_step, sample

Make = Callable[..., SqliteStore]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[SqliteStore] = []

    def store(**changes: object) -> SqliteStore:
        identity: RunIdentity = msgspec.structs.replace(OLD, **changes)
        path = tmp_path / f"{len(made)}.db"
        create_store(path, identity)
        made.append(SqliteStore(path, KEY_SCHEMA, STREAMS))
        return made[-1]

    yield store
    for one in made:
        one.close()


@pytest.mark.parametrize(("time", "windows"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_windows_that_begin_before_are_given_up(time: int, windows: int) -> None:
    line = Timeline(0, None, 60, 40, 10)
    assert Abandon(time, 3).windows(line) == windows


def test_notes_of_the_run_go_along_and_those_of_a_copy_do_not(make: Make) -> None:
    source, target = make(), make()
    for name in (*NOTES[:2], DELIVERED, "complete"):
        source.set_metadata(name, f"of {name}")
    source.retained_windows = RetainedWindows(3)
    copy_store(source, target, LINE)
    assert [target.metadata(name) for name in NOTES[:2]] == ["of token", "of ledger"]
    assert target.retained_windows == RetainedWindows(3)
    assert target.metadata(DELIVERED) is None and target.metadata("complete") is None


def test_reshards_are_kept_while_any_key_is_ahead(make: Make) -> None:
    """Through copies of copies, and not beyond the step where the others have caught up."""
    first = make()
    sample(first, uneven=True)
    second, third = make(shards=3), make(shards=1)
    copy_store(first, second, LINE)
    assert second.reshards == {1: [ReshardProgress((1, 0))]}
    copy_store(second, third, LINE)
    assert third.reshards == second.reshards and everything_of(third) == everything_of(first)
    even, again = make(), make(shards=3)
    sample(even)
    copy_store(even, again, LINE)
    assert again.reshards == {}


def test_a_part_of_a_step_is_refused_where_shards_are_apart(make: Make) -> None:
    """Its keys would be ahead of their own shard, which no reshard can say."""
    source = make()
    piece = _piece_of(make())
    with source.filling():
        source.put_step(0, 0, 1, None)
        source.put_keys(0, 0, piece._replace(done=np.ones(len(piece.units), np.bool_)))
    fill_step(source, 0, 1, 1, [1])
    even = make(shards=3)
    copy_store(source, even, LINE)  # both at 1: the marks go along
    assert any(p.done.any() for shard in range(3) for p in even.key_pieces(0, shard))
    behind = make()
    with behind.filling():
        behind.put_step(0, 0, 1, None)
        behind.put_keys(0, 0, piece._replace(done=np.ones(len(piece.units), np.bool_)))
        behind.put_keys(0, 1, _piece_of(make(), shard=1))
    with pytest.raises(RunError) as caught:
        copy_store(behind, make(shards=3), LINE)
    assert caught.value.field == "store" and "in part" in caught.value.rule


def _piece_of(store: SqliteStore, shard: int = 0):  # type: ignore[no-untyped-def]
    fill_step(store, 0, shard, 1, [shard, shard + 2])
    (piece,) = store.key_pieces(0, shard)
    return piece


def test_abandoning_keeps_releases_and_spent_units(make: Make) -> None:
    source, target = make(), make(epoch=1)
    sample(source)
    copy_store(source, target, LINE, abandon=Abandon(4, 7))
    assert target.retained_windows == RetainedWindows(0, 2, ((0, 2),))
    assert not list(target.key_pieces(1, 0)) and target.unit_progress(0).decided == 4
    counts = [int(c) for piece in target.unit_pieces(0) for c in piece.counts]
    assert counts and set(counts) == {7}
