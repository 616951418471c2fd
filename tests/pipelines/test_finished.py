"""A run that has ended: its input is told by its identity, its sink is completed and compared."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.pipelines.connectors import run_manifest
from dpstream.pipelines.connectors.files import source as sources
from dpstream.pipelines.connectors.files.sink import FileSink
from dpstream.pipelines.stream import run as stream
from dpstream.pipelines.stream.begin import begin
from dpstream.pipelines.stream.run import run_job
from dpstream.state import open as stores
from tests.audit.replays import Place, new_place

Files = dict[str, bytes]


@pytest.fixture(autouse=True)
def closed_stores() -> Iterator[None]:
    yield
    stores.close_all()


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Place:
    place = new_place(tmp_path_factory.mktemp("ended"))
    place.run()
    stores.close_all()
    return place


@pytest.fixture
def place(ended: Place, tmp_path: Path) -> Place:
    """A copy of a run that has ended."""
    shutil.copytree(ended.folder, tmp_path / "place")
    return Place(tmp_path / "place")


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a record, or building a pipeline, fails."""

    def fail(*_: Any) -> None:
        raise AssertionError("the input is read again")

    monkeypatch.setattr(sources, "read_piece", fail)
    monkeypatch.setattr(stream, "_connect", fail)


@pytest.mark.usefixtures("unread")
def test_nothing_is_read_again(place: Place) -> None:
    before, progress = place.files(), list[tuple[int, int]]()
    again = run_job(place.job(), progress=lambda done, steps: progress.append((done, steps)))
    assert again.resumed and again.operator_only == {} and not again.stopped
    assert progress == [(again.steps, again.steps)] and again.steps == 2 * 4 * 3
    assert place.files() == before and len(place.entries()) == 1


@pytest.mark.usefixtures("unread")
def test_another_input_is_refused(place: Place) -> None:
    with open(place.folder / "in.csv", "a") as file:
        file.write("60,p1,2024-01-01T01:00:00Z\n")
    with pytest.raises(PolicyError, match="not the one this store was begun with"):
        run_job(place.job())


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("lost", ["one", "last", "all", "manifest"])
def test_what_the_sink_lacks_is_written_again(place: Place, lost: str) -> None:
    before, out = place.files(), place.folder / "out"
    names = sorted(name for name in before if name.endswith(".parquet"))
    gone = {"one": names[2:3], "last": names[-1:], "all": list(before), "manifest": ["run.json"]}
    for name in gone[lost]:
        (out / name).unlink()
    run_job(place.job())
    assert place.files() == before


def flipped(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(bytes(data))


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("number", [0, 3, -1])
def test_a_damaged_release_is_noticed(place: Place, number: int) -> None:
    """Of every window and trigger, not of the last ones alone."""
    before = place.files()
    paths = sorted((place.folder / "out").rglob("*.parquet"))
    flipped(paths[number], len(paths[number].read_bytes()) // 2)
    run_job(place.job())
    assert place.files() == before


@pytest.mark.usefixtures("unread")
def test_another_release_is_refused(place: Place) -> None:
    paths = sorted((place.folder / "out" / "window-000000").iterdir())
    paths[1].write_bytes(paths[2].read_bytes())
    with pytest.raises(PolicyError, match="another release of window 0"):
        run_job(place.job())


@pytest.mark.usefixtures("unread")
def test_a_sink_that_did_not_change_is_not_compared_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[int]()
    real = run_manifest.publish_committed

    def counted(*args: Any) -> Any:
        calls.append(1)
        return real(*args)

    monkeypatch.setattr(run_manifest, "publish_committed", counted)
    run_job(place.job())
    assert calls == [], "the run itself has noted what it published"
    next((place.folder / "out").rglob("*.parquet")).unlink()
    run_job(place.job())
    run_job(place.job())
    assert calls == [1]


def test_a_sabotaged_one_that_does_not_look_at_the_sink(
    place: Place, monkeypatch: pytest.MonkeyPatch, unread: None
) -> None:
    monkeypatch.setattr(FileSink, "content", lambda _: "always the same")
    run = begin(place.job())[0]
    run.open().set_metadata("published", "always the same")
    run.destroy_keys()
    stores.close_all()
    with pytest.raises(AssertionError):
        test_a_damaged_release_is_noticed(place, 0)


def test_a_run_that_is_not_finished_reads_on(place: Place) -> None:
    """Also where all that is there was found complete before."""
    for name in [name for name in place.files() if "window-000001" in name]:
        (place.folder / "out" / name).unlink()
    place.forget("state", 1)
    result = run_job(place.job())
    assert result.operator_only["steps_committed"] == 4 * 3
    assert result.operator_only["operator_records_in"] == 300


def test_a_note_is_taken_only_of_what_is_complete(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begin(place.job())[0]
    sink = FileSink(place.folder / "out", "parquet")
    next((place.folder / "out").rglob("*.parquet")).unlink()
    run.open().set_metadata("published", None)
    run_manifest.note_complete(run, sink)
    assert run.open().metadata("published") is None
    run_manifest.complete(run, sink)
    assert run.open().metadata("published") == sink.content()
    run.destroy_keys()
