"""A store by its URL, backed up, restored and resharded: in place as a whole, or as it was.

Copies of a whole store: notes that go along, steps in part, what abandoning gives up.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.plan.timeline import Timeline
from dpstream.dp_transforms.run import begin_run
from dpstream.state.open import identity_of, open_store
from dpstream.state.retention_store import ReshardProgress, RetainedWindows
from dpstream.state.sqlite.file import create_store
from dpstream.state.sqlite.store import SqliteStore
from dpstream.state.store import RunIdentity, Store
from dpstream.state.transfer import DELIVERED, NOTES, Abandon, backup, copy_store, reshard, restore
from tests.golden.refusals import Refused
from tests.state.conformance import KEY_SCHEMA, STREAMS
from tests.state.life_conformance import LINE, OLD, everything_of, fill_step, sample
from tests.streams import KEYS, make_plan

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
    timeline = Timeline(0, None, 60, 40, 10)
    assert Abandon(time, 3).windows(timeline) == windows


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


def test_a_part_of_a_step_is_refused_where_shards_are_apart(make: Make, refused: Refused) -> None:
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
    refused(lambda: copy_store(behind, make(shards=3), LINE))


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


PLAN, OTHER = make_plan(), make_plan(triggers=6)


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A store of two shards with notes."""
    path = f"sqlite:{tmp_path / 'store' / 's.db'}"
    run, _ = begin_run(PLAN, KEYS, path, 2)
    run.open().set_metadata(DELIVERED, "here")
    run.open().set_metadata("ledger", "its own")
    return path


def opened(url: str, plan: Plan = PLAN) -> Store:
    return open_store(url, plan, identity_of(url, plan).run_id)


def test_a_backup_is_restored_beside_the_old_store(url: str, tmp_path: Path) -> None:
    out, confirmations = tmp_path / "out" / "backup", list[RunIdentity]()
    identity = backup(url, PLAN, out)
    assert identity == identity_of(url, PLAN)
    restored_identity, aside = restore(url, PLAN, out, replace=True, confirm=confirmations.append)
    assert restored_identity == identity and confirmations == [identity]
    assert aside is not None and aside.name == "s.db.old"
    store = opened(url)
    assert store.restoring and not store.anew
    assert store.metadata("ledger") == "its own" and store.metadata(DELIVERED) is None


def test_a_backup_makes_a_store_where_none_is(url: str, tmp_path: Path) -> None:
    new, out = f"sqlite:{tmp_path / 'new.db'}", tmp_path / "backup"
    backup(url, PLAN, out)

    def next_epoch(identity: RunIdentity) -> RunIdentity:
        return msgspec.structs.replace(identity, epoch=1)

    restored_identity, aside = restore(new, PLAN, out, change=next_epoch)
    assert restored_identity.epoch == 1 == identity_of(new, PLAN).epoch and aside is None


def test_refusals_leave_the_store_as_it_was(url: str, tmp_path: Path) -> None:
    out, damaged = tmp_path / "backup", tmp_path / "damaged"
    backup(url, PLAN, out)
    data = bytearray(out.read_bytes())
    data[5000] ^= 1
    damaged.write_bytes(data)

    def never(identity: RunIdentity) -> None:
        raise PolicyError("budget", "is spent", "wait")

    folder = tmp_path / "store"
    before = sorted(folder.iterdir())
    for kind, field, attempt in (
        (UsageError, "backup", lambda: backup(url, PLAN, out)),
        (PolicyError, "store", lambda: backup(url, OTHER, tmp_path / "x")),
        (UsageError, "store", lambda: backup(f"sqlite:{tmp_path}/no", PLAN, tmp_path / "x")),
        (UsageError, "store", lambda: restore(url, PLAN, out)),
        (UsageError, "backup", lambda: restore(url, PLAN, tmp_path / "none", replace=True)),
        (PolicyError, "backup", lambda: restore(url, PLAN, damaged, replace=True)),
        (PolicyError, "backup", lambda: restore(url, OTHER, out, replace=True)),
        (PolicyError, "budget", lambda: restore(url, PLAN, out, replace=True, confirm=never)),
        (UsageError, "shards", lambda: reshard(url, PLAN, 2)),
        (PolicyError, "store", lambda: reshard(url, OTHER, 3)),
    ):
        with pytest.raises(kind) as caught:
            attempt()
        assert caught.value.field == field
    assert not (tmp_path / "x").exists() and sorted(folder.iterdir()) == before
    assert opened(url).metadata(DELIVERED) == "here" and not opened(url).restoring


def test_a_reshard_keeps_the_run_and_what_its_sink_has(url: str) -> None:
    before = identity_of(url, PLAN)
    aside = reshard(url, PLAN, 5)
    assert aside is not None and aside.exists()
    assert identity_of(url, PLAN) == msgspec.structs.replace(before, shards=5)
    store = opened(url)
    assert store.metadata(DELIVERED) == "here" and not store.restoring
