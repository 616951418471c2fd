"""A run and its sink: whose sink it is, restored stores that catch up, and missing releases."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dpstream.dp_transforms.beam.delivery import delivered_through, release_name_row
from dpstream.dp_transforms.flow import ReleaseCallback
from dpstream.pipelines.connectors import run_manifest
from dpstream.pipelines.connectors.files.sink import FileSink, release_path
from dpstream.pipelines.connectors.run_manifest import (
    CatchUpOutlet,
    committed_names,
    diverged,
    publish_committed,
    published_epoch,
    refuse_foreign,
    refuse_lost_store,
)
from dpstream.pipelines.connectors.sink import FORMAT, RunManifest
from dpstream.state import open as stores
from dpstream.state import transfer
from dpstream.state.ledger import lineage as tokens
from tests.flowing import Flowing, cells, endless
from tests.golden.refusals import Refused
from tests.pipelines.connectors.files.test_sink import release
from tests.streams import begin, generate, make_plan
from tests.written import write_release

MINE = RunManifest(FORMAT, "abc", 1, "hash", "csv")


@pytest.fixture
def sink(tmp_path: Path) -> FileSink:
    made = FileSink(str(tmp_path / "releases"), "csv")
    made.put_manifest(MINE)
    return made


def test_ones_own_manifest_is_fine_and_says_its_epoch(sink: FileSink) -> None:
    refuse_foreign(MINE, sink)
    assert published_epoch(sink, "abc") == 1
    assert published_epoch(sink, "other") == -1


@pytest.mark.parametrize(
    "change",
    [{"run_id": "other"}, {"plan_hash": "other"},
     {"epoch": 0}, {"kind": "parquet"}],
)  # fmt: skip
def test_anothers_manifest_is_refused(
    change: dict[str, object], sink: FileSink, refused: Refused
) -> None:
    refused(lambda: refuse_foreign(msgspec.structs.replace(MINE, **change), sink))


def test_a_new_store_never_adds_to_releases_that_are_there(
    sink: FileSink, tmp_path: Path, make_job: Callable[..., object], refused: Refused
) -> None:
    refuse_lost_store(FileSink(str(tmp_path / "empty"), "csv"))
    refused(refuse_lost_store, sink)
    write_release(tmp_path / "used", "csv", release(0, 1, ["a"]))
    refused(lambda: refuse_lost_store(FileSink(str(tmp_path / "used"), "csv")))


BOUNDED = make_plan(triggers=4, windows=3, slide=2)
ENDLESS = msgspec.structs.replace(
    BOUNDED, timeline=msgspec.structs.replace(BOUNDED.timeline, end=None)
).check()


def test_a_stream_without_end_can_be_published_again(tmp_path: Path) -> None:
    run, timeline = begin(ENDLESS, tmp_path / "a.db", shards=2), ENDLESS.timeline
    assert list(committed_names(run, run.open())) == []
    release = ReleaseCallback(run)()
    for shard, upto in ((0, 7), (1, 6)):
        assert list(release(shard, [], upto, 0).outputs)
    done = [(w, c - timeline.base(w)) for c in range(1, 7) for w in timeline.windows_at(c)]
    assert list(committed_names(run, run.open())) == done and len(done) > 6
    assert publish_committed(run, FileSink(tmp_path / "out", "parquet")) == len(done)
    assert all((tmp_path / "out" / release_path(*name, "parquet")).exists() for name in done)
    stores.close_all()


SHARDS, SAVED, LOST, LAST = 2, 7, 18, 30
Files = dict[str, bytes]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    yield
    stores.close_all()


class Lived:
    """A stream that lost its store at trigger time ``LOST`` and got the backup of ``SAVED``."""

    def __init__(self, folder: Path) -> None:
        plan = make_plan(triggers=4, windows=20, lateness=1, stamped=True, epsilon=9.0)
        source = generate(plan, 4, records=600, users=300, keys=8).batches(60)
        self.by_trigger_time, self.plan, self.folder = cells(plan, source), endless(plan), folder
        self.url = f"sqlite:{folder / 's.db'}"
        calm = self.pipeline("calm.db", "calm")
        self.go(calm, 1, LAST)
        self.calm = self.files("calm")
        stores.close_all()
        one = self.pipeline()
        self.go(one, 1, SAVED)
        transfer.backup(self.url, self.plan, folder / "backup")
        self.go(self.pipeline(), SAVED + 1, LOST)
        transfer.restore(self.url, self.plan, folder / "backup", replace=True)

    def pipeline(self, store: str = "s.db", out: str = "out") -> Flowing:
        """A new one, with nothing but the store; the run begins as `dpstream run` lets it."""
        run = begin(self.plan, self.folder / store, SHARDS)
        sink = FileSink(self.folder / out, "parquet")
        caught_up = run_manifest.check_sink(run, sink, replaying=run.open().restoring)
        if run.open().restoring:
            tokens.restored(run.open(), caught_up)
        run_manifest.write_manifest(run, sink)
        flowing = Flowing(run, sink)
        # The source is read again from where the store says.
        for trigger_time in range(1, flowing.resume.first):
            flowing.feed(self.by_trigger_time.get(trigger_time, []))
        return flowing

    def go(self, flowing: Flowing, first: int, last: int, stride: int = 1) -> None:
        """Trigger times one after the other, or several in a callback."""
        for upto in range(first + stride - 1, last + 1, stride):
            for trigger_time in range(upto - stride + 1, upto + 1):
                flowing.feed(self.by_trigger_time.get(trigger_time, []))
            flowing.step(upto)

    def files(self, out: str = "out") -> Files:
        root = self.folder / out
        paths = root.rglob("window-*/*.parquet")
        return {p.relative_to(root).as_posix(): p.read_bytes() for p in paths}


@pytest.fixture
def lived(tmp_path: Path) -> Lived:
    return Lived(tmp_path)


def published_by(trigger_time: int, files: Files) -> Files:
    """Releases up to a trigger time (windows of three triggers and one of lateness)."""
    out = {}
    for name, data in files.items():
        window, trigger = (int(part.rpartition("-")[2].split(".")[0]) for part in name.split("/"))
        if 3 * window + trigger <= trigger_time:
            out[name] = data
    return out


def test_it_goes_on_as_if_nothing_had_been(lived: Lived) -> None:
    before = lived.files()
    assert before == published_by(LOST, lived.calm)
    flowing = lived.pipeline()
    assert flowing.store.restoring and flowing.resume.first == 1
    lived.go(flowing, 1, LOST - 1)
    assert flowing.store.restoring and flowing.held == [] and lived.files() == before
    assert delivered_through(flowing.store) == 0
    lived.go(flowing, LOST, LOST)
    assert not flowing.store.restoring and delivered_through(flowing.store) == LOST
    lived.go(flowing, LOST + 1, LAST)
    assert flowing.held == [] and lived.files() == lived.calm
    assert delivered_through(flowing.store) == LAST


@pytest.mark.parametrize("stride", [5, 8, LAST])
def test_what_was_held_back_is_published_when_all_is_compared(lived: Lived, stride: int) -> None:
    """A stream behind its clock takes several trigger times at once: some beyond the sink's end."""
    flowing, before = lived.pipeline(), lived.files()
    last = LAST // stride * stride
    for upto in range(stride, last + 1, stride):
        behind = upto < LOST
        lived.go(flowing, upto - stride + 1, upto, stride)
        assert flowing.store.restoring == behind
        assert lived.files() == (before if behind else published_by(upto, lived.calm))
    beyond = published_by(-(-LOST // stride) * stride, lived.calm).keys() - before.keys()
    assert len(flowing.held) == len(beyond) > 0 and flowing.names == []


def test_what_was_held_back_meanwhile_comes_with_the_next_trigger_time(lived: Lived) -> None:
    """Another worker's bundle was written before it could know that all is compared."""
    flowing = lived.pipeline()
    lived.go(flowing, 1, LOST - 1)
    flowing.feed(lived.by_trigger_time.get(LOST, []) + lived.by_trigger_time.get(LOST + 1, []))
    real = flowing.delivered

    def late(shard: int, names: Any, upto: int, since: int) -> Any:
        return real(shard, [], LOST, since)  # the names are on their way

    flowing.delivered = late
    flowing.step(LOST + 1)
    assert not flowing.store.restoring and flowing.held
    assert lived.files() == published_by(LOST, lived.calm)
    flowing.delivered = real
    flowing.names = [release_name_row(name, False)[1] for name in flowing.held]
    lived.go(flowing, LOST + 2, LAST)
    assert lived.files() == lived.calm


def test_a_release_that_the_runner_loses_is_written_from_the_store(
    lived: Lived, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only those: what was written is not written again."""
    flowing = lived.pipeline()
    lived.go(flowing, 1, LOST + 2)
    assert not flowing.store.restoring
    real, lost = flowing._write, []

    def lossy(batches: Any) -> None:
        lost.extend(batches[:1])
        real(batches[1:])

    monkeypatch.setattr(flowing, "_write", lossy)
    lived.go(flowing, LOST + 3, LAST)
    assert lost and lived.files() == lived.calm


def test_a_release_that_is_lost_while_it_catches_up_is_written_too(
    lived: Lived, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of catching up lies in the midst of a callback: the last of it are new."""
    flowing = lived.pipeline()
    real, lost = flowing._write, []

    def lossy(batches: Any) -> None:
        lost.extend(batches[-2:])
        real(batches[:-2])

    monkeypatch.setattr(flowing, "_write", lossy)
    lived.go(flowing, 1, 24, 8)
    assert lost and not flowing.store.restoring
    assert lived.files() == published_by(24, lived.calm)


def test_it_stops_at_the_first_difference(lived: Lived, refused: Refused) -> None:
    folder = lived.folder / "out" / "window-000003"
    one, other = folder / "trigger-000002.parquet", folder / "trigger-000003.parquet"
    one.write_bytes(other.read_bytes())
    flowing, before = lived.pipeline(), lived.files()
    lived.go(flowing, 1, 10)
    caught = refused(lived.go, flowing, 11, 11)
    assert lived.files() == before and flowing.store.restoring
    error = diverged(caught, FileSink(lived.folder / "out", "parquet"), True)
    assert error.field == "store" and "--abandon" in error.fix


def test_a_worker_of_the_old_store_publishes_on(lived: Lived) -> None:
    """What came into the sink while this run was catching up is compared as well."""
    flowing = lived.pipeline()
    lived.go(flowing, 1, 9)
    name = "window-000006/trigger-000003.parquet"  # of trigger time 21
    (lived.folder / "out" / name).parent.mkdir(exist_ok=True)
    (lived.folder / "out" / name).write_bytes(lived.calm[name])
    before = lived.files()
    lived.go(flowing, 10, 20)
    assert flowing.store.restoring and flowing.names and lived.files() == before
    lived.go(flowing, 21, LAST)
    assert not flowing.store.restoring and lived.files() == lived.calm


@pytest.mark.parametrize("dies", [3, LOST - 1, LOST, LOST + 3])
def test_pipelines_that_die_while_it_catches_up(lived: Lived, dies: int) -> None:
    flowing = lived.pipeline()
    lived.go(flowing, 1, dies)
    stores.close_all()
    flowing = lived.pipeline()
    done = dies >= LOST
    assert flowing.store.restoring != done
    assert flowing.resume.first == (dies + 1 if done else 1)
    lived.go(flowing, flowing.resume.first, LAST)
    assert lived.files() == lived.calm and not flowing.store.restoring


def test_a_pipeline_dies_between_publishing_and_the_note(
    lived: Lived, monkeypatch: pytest.MonkeyPatch
) -> None:
    flowing = lived.pipeline()

    def dies(*_: Any) -> None:
        raise InterruptedError

    with monkeypatch.context() as m:
        m.setattr(type(flowing.store), "finish_restoring", dies)
        with pytest.raises(InterruptedError):
            lived.go(flowing, 1, LAST, LAST)
    assert lived.files() == lived.calm
    stores.close_all()
    flowing = lived.pipeline()
    assert flowing.resume.first == 1
    lived.go(flowing, 1, LAST)
    assert lived.files() == lived.calm and delivered_through(flowing.store) == LAST


@pytest.mark.parametrize("waits", [True, False])
def test_nothing_new_comes_before_the_last_that_is_published(
    lived: Lived, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """Also into a gap; one that does not wait publishes beside what it has not compared."""
    if not waits:
        monkeypatch.setattr(CatchUpOutlet, "caught_up", lambda self, upto: True)
    published_names = published_by(12, lived.calm).keys() | {"window-000005/trigger-000003.parquet"}
    for name in lived.files().keys() - published_names:
        (lived.folder / "out" / name).unlink()
    flowing, before = lived.pipeline(), lived.files()
    lived.go(flowing, 1, 14)
    assert (lived.files() == before) == waits


def test_a_reshard_need_not_compare_what_was_delivered(lived: Lived) -> None:
    flowing = lived.pipeline()
    lived.go(flowing, 1, LOST + 2)
    transfer.reshard(lived.url, lived.plan, 3)
    run = begin(lived.plan, lived.folder / "s.db", 3)
    again = Flowing(run, FileSink(lived.folder / "out", "parquet"))
    assert again.resume.first == LOST + 3 and not run.open().restoring
    for trigger_time in range(1, LOST + 3):
        again.feed(lived.by_trigger_time.get(trigger_time, []))
    lived.go(again, LOST + 3, LAST)
    assert lived.files() == lived.calm


@pytest.mark.parametrize("window", [0, 2])
def test_a_bounded_run_ends_no_sooner_than_the_last_that_is_published(
    lived: Lived, window: int, refused: Refused
) -> None:
    """Whichever window that is of, the first that the store keeps too."""
    release = f"window-{window:06}/trigger-000001.parquet"
    for name in lived.files().keys() - {release}:
        (lived.folder / "out" / name).unlink()
    run = begin(lived.plan, lived.folder / "empty.db", SHARDS)
    assert run.open().retained_windows.first == 0
    error = refused(lambda: run_manifest.catch_up(run, FileSink(lived.folder / "out", "parquet")))
    assert error.field == "store" and lived.files().keys() == {release}
