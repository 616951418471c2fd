"""A run that has ended: its input is not looked at, its sink is completed and compared."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dpstream.pipelines.connectors import run_manifest
from dpstream.pipelines.connectors.files import source as sources
from dpstream.pipelines.connectors.files.sink import FileSink
from dpstream.pipelines.stream import run as stream
from dpstream.pipelines.stream.begin import begin
from dpstream.pipelines.stream.run import run_job
from dpstream.state import open as stores
from dpstream.state.store import READING
from tests.audit.replays import Place, new_place
from tests.faults.filecalls.commands import COMMANDS
from tests.fixed import fixed_date
from tests.golden.refusals import Refused
from tests.pipelines.cli.called import call

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


def as_it_was(_: Path) -> None:
    """Leave the file as it is."""


def appended(path: Path) -> None:
    with open(path, "a") as file:
        file.write("60,p1,2024-01-01T01:00:00Z\n")


def one_letter(path: Path) -> None:
    path.write_text(path.read_text().replace("p1", "P1", 1))


def erased(path: Path) -> None:
    rows = path.read_text().splitlines(keepends=True)
    path.write_text("".join(row for row in rows if not row.startswith("7,")))


def another_header(path: Path) -> None:
    path.write_text("nothing,of,it\n")


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)  # whoever opens it waits for ever


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def a_circle(path: Path) -> None:
    """A link that nothing can be told of, not even by root."""
    path.unlink()
    path.symlink_to(path)


CHANGES: tuple[Callable[[Path], object], ...] = (
    as_it_was, appended, one_letter, erased, another_header, Path.unlink, a_pipe, a_folder, a_circle
)  # fmt: skip
#: Every command that looks at a job, its store or its releases; the store is copied and restored.
#: `plan --fresh` is of another run, and looks at columns, which are public, as that run would.
LOOKS = (
    ("run",), ("run", "--json"), ("run", "--quiet", "--operator"), ("plan",),
    ("report", "--out", "page.html"), ("state", "info"), ("state", "info", "--operator"),
    ("state", "init"), ("state", "expire"), ("state", "backup", "--out", "b"),
    ("state", "releases"), ("state", "releases", "--out", "rel"), ("account", "show"),
    ("secret", "check"), ("state", "restore", "pages", "b", "--replace"),
    ("run",), ("run", "--runner=PrismRunner"), ("run", "--through", "2024-01-02"),
    ("run", "--through", "end"),
)  # fmt: skip


def test_no_command_tells_of_the_input(place: Place, tmp_path: Path) -> None:
    """Not by its exit code, by what it prints or by what it leaves."""
    seen = list[tuple[list[Any], Files]]()
    for change in CHANGES:
        folder = Path(shutil.copytree(place.folder, tmp_path / "same" / "place"))
        change(folder / "in.csv")
        printed = list[Any]()
        with contextlib.chdir(folder), fixed_date():
            for words in LOOKS:
                done = call(*words)
                printed.append((words, done.exit_code, done.stdout, done.stderr))
                stores.close_all()
        seen.append((printed, Place(folder).files()))
        shutil.rmtree(folder.parent)
    for change, one in zip(CHANGES, seen, strict=True):
        assert one == seen[0], change
    refused = {(words, code) for words, code, *_ in seen[0][0] if code}
    through = {(words, 3) for words in LOOKS if "--through" in words}  # it is read as a whole
    assert refused == through


@pytest.mark.parametrize(
    ("name", "records", "out", "file"),
    [("workload answer", "in.csv", "answers", "answers.parquet"),
     ("census execute", "data/person-records.txt", "out", "manifest.json")],
)  # fmt: skip
def test_answered_tables_tell_nothing_of_the_input(
    name: str, records: str, out: str, file: str, tmp_path: Path
) -> None:
    command, seen = COMMANDS[name], list[object]()
    command.world(tmp_path)
    with contextlib.chdir(tmp_path):
        for words in (*command.before, command.words):
            assert not callable(words)
            assert call(*words).exit_code == 0
            stores.close_all()
        for change in (as_it_was, erased, a_pipe):
            change(tmp_path / records)
            shutil.rmtree(out)
            done = call(*command.words)
            stores.close_all()
            files = {p.name: p.read_bytes() for p in Path(out).rglob("*") if p.is_file()}
            seen.append((done.exit_code, done.stdout, done.stderr, files))
    assert seen == [seen[0]] * 3 and file in str(seen[0])


def test_the_command_says_that_nothing_was_read(place: Place) -> None:
    with contextlib.chdir(place.folder):
        text, document = call("run"), call("run", "--json")
    assert "the input was not read" in text.stdout and "--fresh" in text.stdout
    fields = json.loads(document.stdout)
    assert fields["input_read"] is False and fields["read_at"] in text.stdout


@pytest.mark.usefixtures("unread")
def test_a_run_that_was_cut_off_at_its_end_compares_its_input(
    place: Place, refused: Refused
) -> None:
    """All steps are committed, and nothing says that no file changed before the last was read."""
    run = begin(place.job())[0]
    run.open().note_input(READING)
    run.destroy_keys()
    stores.close_all()
    appended(place.folder / "in.csv")
    refused(lambda: run_job(place.job()))
    stores.close_all()


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
    paths = sorted((place.folder / "out").rglob("window-*/*.parquet"))
    flipped(paths[number], len(paths[number].read_bytes()) // 2)
    run_job(place.job())
    assert place.files() == before


@pytest.mark.usefixtures("unread")
def test_another_release_is_refused(place: Place, refused: Refused) -> None:
    paths = sorted((place.folder / "out" / "window-000000").iterdir())
    paths[1].write_bytes(paths[2].read_bytes())
    refused(lambda: run_job(place.job()))


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
    next((place.folder / "out").rglob("window-*/*.parquet")).unlink()
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
    next((place.folder / "out").rglob("window-*/*.parquet")).unlink()
    run.open().set_metadata("published", None)
    run_manifest.note_complete(run, sink)
    assert run.open().metadata("published") is None
    run_manifest.complete(run, sink)
    assert run.open().metadata("published") == sink.content()
    run.destroy_keys()
