"""What every store hands out: key states and counters by slot, and one lock for a stage's shard.

What may go and when: trigger times by hand, and stores that are expired and thinned.

What outlives a run: windows that are kept, notes of a restore, pieces of a store.

Stores by URL: one object for each, and refusals of what belongs to another run.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.plan.timeline import Timeline
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.dp_transforms.run import begin_run
from dpstream.state import open as stores
from dpstream.state.open import backend, key_schema
from dpstream.state.retention import (
    drop_delivered,
    drop_releases,
    expire,
    period_trigger_time,
    reached,
    settled_trigger_time,
)
from dpstream.state.retention_store import (
    KeyPiece,
    ReshardProgress,
    RetainedWindows,
    piece_bounds,
    take_keys,
)
from dpstream.state.sqlite.file import create_store
from dpstream.state.sqlite.store import SqliteStore
from dpstream.state.store import CHANGED, NEVER, READING, KeyShard, RunIdentity
from tests.golden.refusals import Refused
from tests.state.conformance import IDENTITY, KEY_SCHEMA, STREAMS, ids, take_step
from tests.state.life_conformance import LINE, OLD, SHARDS, decide_units, fill_step
from tests.streams import KEYS, RUN_ID, make_plan


def rows(keys: list[int]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(
        {"other": keys, "lang": pa.array(keys, pa.int64()), "page": [f"p{k}" for k in keys]}
    )


def test_columns_survive_any_growth() -> None:
    """Chunks are merged as they grow; none is lost and none out of place."""
    states = KeyShard(KEY_SCHEMA, STREAMS)
    for first in range(0, 3000, 37):
        numbers = list(range(first, first + 37))
        slots = states.intern(ids(numbers), rows(numbers))
        states.values[slots, 1] = numbers
        states.due[slots] = np.array(numbers) + 1
    every = list(range(states.size))
    assert states.key_columns(np.array(every)).column("lang").to_pylist() == every
    assert states.values[: states.size, 1].tolist() == every and len(states._chunks) < 12
    assert states.due_at(3).tolist() == [0, 1, 2]


def test_an_identity_has_no_word_that_nobody_reads() -> None:
    text = msgspec.json.encode(IDENTITY)
    assert msgspec.json.decode(text, type=RunIdentity) == IDENTITY
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text[:-1] + b',"later":1}', type=RunIdentity)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    create_store(tmp_path / "s.db", IDENTITY)
    made = SqliteStore(tmp_path / "s.db", KEY_SCHEMA, STREAMS)
    yield made
    made.close()


def test_a_stages_shard_has_one_lock(store: SqliteStore) -> None:
    bound = store.at_work("bound", 1)
    assert store.at_work("bound", 1) is bound
    assert store.at_work("bound", 2) is not bound and store.at_work("release", 1) is not bound
    with bound:
        assert not store.at_work("bound", 1).acquire(blocking=False)  # type: ignore[attr-defined]


def test_a_window_is_as_far_as_its_last_shard(store: SqliteStore) -> None:
    take_step(store, 1, [1], 1, shard=0)
    take_step(store, 2, [1], 1, shard=0)
    assert store.completed(2) == {0: 0}, "shard 1 has not begun"
    take_step(store, 1, [2], 1, shard=1)
    assert store.completed(2) == {0: 1} and store.completed(2, first=1) == {}


def test_the_verdict_on_an_input_is_final(store: SqliteStore) -> None:
    assert not store.reading and not store.input_changed
    assert store.compared_input is None
    store.note_input(READING)
    assert store.reading and store.compared_input is None
    store.note_input("2024-01-05T00:00:00Z")
    assert not store.reading and store.compared_input == "2024-01-05T00:00:00Z"
    store.note_input(READING)
    assert store.reading and store.compared_input is None
    store.note_input(CHANGED)
    store.note_input(READING)
    store.note_input("2024-01-05T00:00:00Z")
    assert store.input_changed and not store.reading and store.compared_input is None


@pytest.mark.parametrize(("skew", "times"), [(0, 0), (1, 1), (10, 1), (11, 2)])
def test_a_skew_is_rounded_up_to_trigger_times(skew: int, times: int) -> None:
    assert Timeline(0, 100, 50, 50, 10, max_skew=skew).skew_trigger_times == times


def test_a_period_is_asked_for_until_its_latest_record() -> None:
    """Events of trigger times 1 to 5 are of the first period, which ends at 50, 30 late at most."""
    timeline = Timeline(0, None, 10, 10, 10, 30, period=50)
    trigger_times = period_trigger_time(timeline, np.array([1, 5, 6, 11]))
    assert trigger_times.tolist() == [8, 8, 13, 18]
    far = period_trigger_time(timeline, np.array([NEVER + 10_000]))
    assert far.tolist() == [NEVER]


def test_records_are_settled_when_their_windows_are_closed() -> None:
    timeline = Timeline(0, 100, 20, 20, 10, max_skew=5)
    assert [settled_trigger_time(timeline, windows) for windows in (0, 1, 2, 4)] == [0, 1, 3, 7]
    assert settled_trigger_time(timeline, 5) == timeline.last_trigger_time
    endless = Timeline(0, None, 20, 20, 10)
    assert settled_trigger_time(endless, 5) == 10


@pytest.fixture
def live(tmp_path: Path) -> Iterator[SqliteStore]:
    create_store(tmp_path / "s.db", OLD)
    made = SqliteStore(tmp_path / "s.db", KEY_SCHEMA, STREAMS)
    yield made
    made.close()


def run(store: SqliteStore, windows: range, decide: bool = False) -> None:
    """Whole windows of both shards, their records decided before."""
    for window in windows:
        for shard in range(SHARDS):
            for trigger in (1, 2):
                if decide:
                    decide_units(store, shard, 2 * window + trigger, [shard])
                fill_step(store, window, shard, trigger, [shard])


def test_how_far_the_shards_are(live: SqliteStore) -> None:
    run(live, range(2))
    fill_step(live, 2, 0, 1, [0])
    reach = reached(live, LINE)
    assert reach == (2, {2: 0})
    fill_step(live, 2, 1, 1, [1])
    reach = reached(live, LINE)
    assert [reach.trigger(LINE, window) for window in (0, 1, 2, 3)] == [2, 2, 1, 0]


def test_complete_windows_are_noted_once_they_are_many(
    live: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpstream.state.retention._NOTED", 3)
    run(live, range(2))
    assert reached(live, LINE, remember=True).complete == 2 and live.metadata("complete") is None
    run(live, range(2, 4))
    assert reached(live, LINE).complete == 4 and live.metadata("complete") is None
    assert reached(live, LINE, remember=True).complete == 4 and live.metadata("complete") == "4"
    assert reached(live, LINE) == (4, {})


def test_expiry_waits_until_it_is_worth_the_work(live: SqliteStore) -> None:
    assert expire(live, LINE) == 0
    run(live, range(2), decide=True)
    assert expire(live, LINE, least_settled=5) == 0
    assert expire(live, LINE) == SHARDS and live.unit_progress(0).forgotten == 4
    assert expire(live, LINE) == 0, "nothing more has become settled"


@pytest.mark.parametrize(("lasting", "left"), [(None, 9), (1, 2), (3, 4), (20, 9)])
def test_selections_go_when_no_window_looks_back_so_far(
    live: SqliteStore, lasting: int | None, left: int
) -> None:
    """Four windows are complete: the fifth, which is open, asks for what came behind 8 - D."""
    for window in range(5):
        for shard in range(SHARDS):
            for trigger in (1, 2) if window < 4 else (1,):
                decide_units(live, shard, 2 * window + trigger, [shard])
                fill_step(live, window, shard, trigger, [shard], True)
    assert expire(live, LINE, remembered_for=lasting) == SHARDS
    times = [s.trigger_time for s in live.selections(0, -1)]
    assert times == list(range(1, 10))[-left:]


def test_a_shard_that_is_behind_keeps_its_positions(live: SqliteStore) -> None:
    run(live, range(2))
    decide_units(live, 0, 4, [0])
    decide_units(live, 1, 3, [1])
    assert expire(live, LINE) == 1
    assert [live.unit_progress(shard).forgotten for shard in range(2)] == [4, 0]


def test_releases_are_dropped_behind_their_mark(live: SqliteStore) -> None:
    run(live, range(3))
    drop_releases(live, LINE, 2)
    assert live.retained_windows == RetainedWindows(2)
    release_flags = [live.committed_releases(window, 0, 2) is not None for window in range(3)]
    assert release_flags == [False, False, True]
    with pytest.raises(AssertionError):
        drop_releases(live, LINE, 4)


def test_what_the_sink_has_goes_when_it_is_old_enough(live: SqliteStore) -> None:
    """Windows end at 2, 4, 6, ...; trigger time t is the instant t."""
    run(live, range(6))
    assert drop_delivered(live, LINE, 1, keep=0) == 0
    assert drop_delivered(live, LINE, 6, keep=3) == 1  # window 0 ended at 2, window 1 at 4
    assert live.retained_windows.dropped == 1
    assert drop_delivered(live, LINE, 6, keep=3) == 0
    assert drop_delivered(live, LINE, 100, keep=0) == 5, "no more than are complete"
    assert live.retained_windows.dropped == 6


def test_a_run_takes_up_the_first_window_that_nobody_gave_up() -> None:
    assert RetainedWindows().first == 0
    assert RetainedWindows(dropped=3, abandoned=5).first == 5
    assert RetainedWindows(dropped=6, abandoned=5).first == 6


def test_a_windows_noise_is_of_the_epoch_that_began_it() -> None:
    retained = RetainedWindows(epochs=((0, 3), (1, 7)))
    assert [retained.epoch_of(window, 2) for window in (0, 2, 3, 6, 7, 99)] == [0, 0, 1, 1, 2, 2]
    assert RetainedWindows().epoch_of(0, 4) == 4


@pytest.mark.parametrize("rows", [0, 1, 4, 5, 9])
def test_pieces_cover_all_rows_once(rows: int) -> None:
    pieces = [list(range(rows))[piece] for piece in piece_bounds(rows, 4)]
    assert [row for piece in pieces for row in piece] == list(range(rows))
    assert all(0 < len(piece) <= 4 for piece in pieces)


def test_some_keys_take_their_pairs_along() -> None:
    number = np.arange(4)
    piece = KeyPiece(
        pa.table({"page": [f"p{n}" for n in number]}),
        number * 10,
        np.stack([number, -number], 1),
        number.astype(np.int32) + 1,
        number.astype(np.int32) + 2,
        number % 2 == 1,
        np.array([0, 3, 3, 2, 1]),
        ids([100, 103, 203, 102, 101]),
    )
    subset = take_keys(piece, np.array([3, 1]))
    assert subset.keys["page"].to_pylist() == ["p3", "p1"] and subset.units.tolist() == [30, 10]
    assert subset.values.tolist() == [[3, -3], [1, -1]] and subset.done.tolist() == [True, True]
    assert (subset.due.tolist(), subset.selected.tolist()) == ([4, 2], [5, 3])
    assert subset.pair_rows.tolist() == [0, 0, 1]
    assert subset.pair_units.tolist() == ids([103, 203, 101]).tolist()


def test_notes_of_windows_and_reshards(store: SqliteStore) -> None:
    assert store.retained_windows == RetainedWindows() and store.reshards == {}
    store.retained_windows = RetainedWindows(1, 2, ((0, 2),))
    store.reshards = {4: [ReshardProgress((3, 1)), ReshardProgress((2,))]}
    assert store.retained_windows == RetainedWindows(1, 2, ((0, 2),))
    assert store.reshards == {4: [ReshardProgress((3, 1)), ReshardProgress((2,))]}
    store.reshards = {}
    assert store.reshards == {} and store.metadata("leads") is None


@pytest.mark.parametrize("anew", [False, True])
def test_a_restored_store_says_so_until_it_has_caught_up(store: SqliteStore, anew: bool) -> None:
    assert not store.restoring and not store.anew
    store.begin_restoring(anew)
    assert store.restoring and store.anew == anew
    store.finish_restoring()
    assert not store.restoring and not store.anew


def test_a_run_is_resumed_and_nothing_else(tmp_path: Path, refused: Refused) -> None:
    plan, url = make_plan(), f"sqlite:{tmp_path / 'store.db'}"
    source = (b"file", b"digest")
    assert begin_run(plan, KEYS, url, 3, source=source, run_id=RUN_ID)[1] is False
    run, resumed = begin_run(plan, KEYS, url, 3, source=source)
    assert resumed and run.open().identity.run_id == RUN_ID
    refused(lambda: begin_run(make_plan(triggers=6), KEYS, url, 3, source=source))
    refused(lambda: begin_run(plan, SecretSource(None, "12" * 32), url, 3, source=source))
    refused(lambda: begin_run(plan, KEYS, url, 3, source=(b"file", b"other")))
    refused(lambda: begin_run(plan, KEYS, url, 3, source=(b"filedigest",)))
    refused(lambda: begin_run(plan, KEYS, url, 4, source=source))
    stores.close_all()
    refused(lambda: stores.open_store(url, make_plan(triggers=6), "22" * 16))
    assert begin_run(plan, KEYS, url, 3, source=source)[1] is True


def test_fingerprints_are_keyed(tmp_path: Path) -> None:
    plan = make_plan()
    identities: list[RunIdentity] = []
    for number, keys in enumerate((KEYS, SecretSource(None, "12" * 32))):
        url = f"sqlite:{tmp_path / f'{number}.db'}"
        identities.append(begin_run(plan, keys, url, source=(b"digest",))[0].open().identity)
    assert identities[0].secret_fingerprint != identities[1].secret_fingerprint
    assert identities[0].source_fingerprint != identities[1].source_fingerprint
    assert identities[0].run_id != identities[1].run_id and len(identities[0].run_id) == 32
    assert "11" * 32 not in msgspec.json.encode(identities[0]).decode()


@pytest.mark.parametrize("url", ["", "store.db", "postgres:x", "sqlite:"])
def test_unknown_urls_are_refused(url: str, refused: Refused) -> None:
    refused(lambda: stores.exists(url))


def test_a_path_below_a_folder(tmp_path: Path) -> None:
    assert backend("sqlite:s.db").below(tmp_path).url == f"sqlite:{tmp_path / 's.db'}"
    assert backend("sqlite:/a/s.db").below(tmp_path).url == "sqlite:/a/s.db"
    there = backend("spanner://project/instance/database")
    assert there.below(tmp_path) is there


def test_key_columns_have_the_types_of_the_plan() -> None:
    schema = key_schema(make_plan(key=("string", "int", "bool", "bytes")))
    assert [str(field.type) for field in schema] == ["string", "int64", "bool", "binary"]
    assert not any(field.nullable for field in schema)


def test_a_store_is_one_object_of_its_process(tmp_path: Path, refused: Refused) -> None:
    plan, url = make_plan(), f"sqlite:{tmp_path / 's.db'}"
    run, _ = begin_run(plan, KEYS, url, 2)
    first = stores.open_store(url, plan, run.run_id)
    assert stores.open_store(url, plan, run.run_id) is first is run.open()
    refused(lambda: stores.open_store(url, plan, "00" * 16))
    assert stores.open_store(url, plan, run.run_id) is not first, "the other one was closed"
    stores.close_all()
    assert stores.identity_of(url, plan).run_id == run.run_id and stores._OPEN == {}
    refused(lambda: stores.identity_of(url, make_plan(triggers=6)))
