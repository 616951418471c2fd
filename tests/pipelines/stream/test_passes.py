"""Files that join a run: the same bytes as if all had been there, and rules that are kept.

Which files are new, and the partitions that they get; once given they stay.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from dpstream.accounting.errors import DpstreamError
from dpstream.pipelines.connectors.files import source as sources
from dpstream.pipelines.connectors.input_files import SourceFile
from dpstream.pipelines.connectors.inputs import ReadRows
from dpstream.pipelines.jobs.job import load_job
from dpstream.pipelines.stream import passes
from dpstream.pipelines.stream.completeness import STRICT
from dpstream.pipelines.stream.passes import arrange
from dpstream.pipelines.stream.run import Result, run_job
from dpstream.state import open as stores
from dpstream.state.passes import JoinedFile, Pass, Passes
from tests.fixed import fixed_date
from tests.golden.refusals import Refused
from tests.growing import COURSE, DAYS, arrive, day, place, released, write
from tests.pipelines.cli.called import call


def digest(part: bytes) -> str:
    return hashlib.blake2b(part, key=b"secret", digest_size=16).hexdigest()


def listed(folder: Path, names: Sequence[str]) -> list[SourceFile]:
    """These files as a manifest lists them."""
    for name in names:
        if not (folder / name).exists():
            (folder / name).write_text(f"content of {name}")
    return [
        SourceFile(at, name, str(folder / name), (folder / name).stat().st_size, (0, 0))
        for at, name in enumerate(sorted(names))
    ]


def test_partitions_stay(tmp_path: Path) -> None:
    first = arrange(listed(tmp_path, ["b", "d"]), None, digest)
    assert [file.name for file in first.new] == ["b", "d"] and first.again == ()
    noted = Passes((Pass(first.joined, 4),), 4, (0, 1))
    # New names stand before and between the old ones.
    then = arrange(listed(tmp_path, ["c", "a", "b", "d"]), noted, digest)
    assert [(f.name, f.partition) for f in then.again] == [("b", 0), ("d", 1)]
    assert [(f.name, f.partition) for f in then.new] == [("a", 2), ("c", 3)]
    assert then.identity[:2] == first.identity
    noted = noted.ended([1]).next(then.joined, 6)
    assert noted.files == (*first.joined, *then.joined) and noted.left == (1, 2, 3)
    last = arrange(listed(tmp_path, ["a", "c", "d", "0"]), noted, digest)
    assert [(f.name, f.partition) for f in last.again] == [("d", 1), ("a", 2), ("c", 3)]
    assert [(f.name, f.partition) for f in last.new] == [("0", 4)]


def test_what_is_read_again_and_gone_or_changed_is_refused(
    tmp_path: Path, refused: Refused
) -> None:
    files = listed(tmp_path, ["a", "b"])
    noted = Passes((Pass(arrange(files, None, digest).joined, 4),), 4, (1,))
    assert [file.name for file in arrange(files[1:], noted, digest).again] == ["b"]
    (tmp_path / "b").write_text("other")
    for present in (files[1:], []):
        refused(arrange, present, noted, digest)


def test_passes() -> None:
    files = [JoinedFile(name, f"content of {name}") for name in "xyzvw"]
    begun = Passes((Pass(tuple(files[:2]), 4),), 0, (0, 1))
    assert begun.pending and begun.joined == ()
    ended = begun.ended([1])
    assert not ended.pending and (ended.done, ended.left) == (4, (1,))
    third = ended.next(files[2:3], 6).ended([]).next(files[3:], 7)
    assert third.joined == ((2, 4), (3, 6)) and third.left == (3, 4) and third.pending


@pytest.fixture(autouse=True)
def closed_stores() -> Iterator[None]:
    yield
    stores.close_all()


def run(folder: Path, through: str | None = None) -> Result:
    return run_job(load_job(folder / "dpstream.toml"), through=through)


@pytest.fixture(scope="module", params=["parquet", "csv"])
def one_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on all days at once."""
    folder = place(tmp_path_factory.mktemp("one_run"), request.param)
    arrive(folder, DAYS)
    run(folder)
    stores.close_all()
    assert len(released(folder)) == 16
    return folder


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files whose rows were read, as they are."""
    names, real = list[str](), sources.read_group

    def spy(group: sources.Group, *rest: object) -> Iterator[ReadRows]:
        names.extend(os.path.basename(piece[2]) for piece in group)
        return real(group, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(sources, "read_group", spy)
    return names


def test_passes_release_what_one_run_would(one_run: Path, tmp_path: Path, read: list[str]) -> None:
    """And a pass reads new files and those with rows beyond the pass before, no others."""
    kind = next((one_run / "in").iterdir()).suffix
    folder = place(tmp_path, kind[1:])
    seen = list[set[str]]()
    for through, files in COURSE:
        arrive(folder, files)
        read.clear()
        before = released(folder)
        result = run(folder, through)
        assert before.items() <= released(folder).items() and result.summary is not None
        seen.append(set(read))
    assert released(folder) == released(one_run)
    names = [f"day-{number}{kind}" for number in range(DAYS)]
    # The first and the third hold some of the next day.
    assert seen == [{names[0]}, set(names[:2]), {names[2]}, set(names[2:])]


def test_passes_of_a_job_that_skips(tmp_path: Path) -> None:
    """What was published in one pass is known in the next, wherever between tests a pass ends."""
    releases = []
    within = [("2024-01-01T06:00:00Z", DAYS), ("2024-01-02T12:00:00Z", DAYS), ("end", DAYS)]
    courses = {"whole": [("end", DAYS)], "passes": COURSE, "within": within}
    for name, course in courses.items():
        (tmp_path / name).mkdir()
        folder = place(tmp_path / name)
        job = folder / "dpstream.toml"
        skip = "mechanism = { skip = true, tests = 2, weights = { offset = 1, power = 2 } }\n"
        job.write_text(job.read_text() + skip)
        for through, files in course:
            arrive(folder, files)
            run(folder, through)
            stores.close_all()
        releases.append(released(folder))
    assert releases[0] == releases[1] == releases[2] and len(releases[0]) == 16


def test_nothing_new_changes_nothing(tmp_path: Path, read: list[str]) -> None:
    folder = place(tmp_path)
    arrive(folder, 1)
    run(folder, "2024-01-02")
    before, lost = released(folder), next(iter(released(folder)))
    (folder / "out" / lost).unlink()
    read.clear()
    for through in (None, "2024-01-02", "2024-01-02T03:00:00Z"):
        assert run(folder, through).resumed
    assert released(folder) == before and read == []


def test_time_passes_without_files(tmp_path: Path, one_run: Path) -> None:
    if not list((one_run / "in").glob("*.parquet")):
        return
    folder = place(tmp_path)
    arrive(folder, DAYS)
    for through in ("2024-01-01T06:00:00Z", "2024-01-03", "2024-01-04", "end"):
        run(folder, through)
    assert released(folder) == released(one_run)


@pytest.mark.parametrize(("late", "counts"), [("0s", False), ("1d", True)])
def test_a_late_row_counts_by_the_plans_lateness(tmp_path: Path, late: str, counts: bool) -> None:
    """A new file with rows of a window that is closed, or still open for the late."""
    folder = place(tmp_path, late=late)
    arrive(folder, 1)
    run(folder, "2024-01-02")
    write(folder, "later.parquet", day(0, rows=3_000))
    result = run(folder, "2024-01-03")
    late_ones = result.operator_only.get("operator_dead_late", 0)
    assert late_ones == (0 if counts else 3_000), "each is a dead letter, or counts"
    assert result.operator_only["operator_records_in"] == 4_500
    first = [pq.read_table(folder / "out" / f"window-000000/trigger-{n:06d}.parquet").to_pandas()
             for n in ((4, 8) if counts else (4,))]  # fmt: skip
    if counts:
        # The published prefix of the first day grows at the next trigger after the file came.
        assert first[1]["visits"].sum() > first[0]["visits"].sum() + 1_000


@pytest.fixture(scope="module")
def read_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files were read; a third is there.  Tests work on copies."""
    folder = place(tmp_path_factory.mktemp("joined"))
    arrive(folder, 2)
    run(folder, "2024-01-03")
    stores.close_all()
    arrive(folder, 3)
    return folder


@pytest.fixture
def joined(read_two: Path, tmp_path: Path) -> Path:
    return shutil.copytree(read_two, tmp_path / "copy")


def lost(folder: Path) -> None:
    (folder / "in" / "day-0.parquet").unlink()


def renamed(folder: Path) -> None:
    (folder / "in" / "day-0.parquet").rename(folder / "in" / "day-9.parquet")


def changed(folder: Path) -> None:
    write(folder, "day-0.parquet", day(7))


@pytest.mark.parametrize("change", [lost, renamed, changed])
def test_files_with_rows_to_come_must_stay(
    tmp_path: Path, change: Callable[[Path], None], refused: Refused
) -> None:
    """The first file has rows of the second day."""
    folder = place(tmp_path)
    arrive(folder, 1)
    run(folder, "2024-01-02")
    arrive(folder, 2)
    before = released(folder)
    old = (folder / "in" / "day-0.parquet").read_bytes()
    change(folder)
    error = refused(run, folder, "2024-01-03")
    assert "day-0" not in str(error) and released(folder) == before
    assert run(folder, "2024-01-02").resumed, "nothing is read up to what is released"
    for path in (folder / "in").glob("day-9*"):
        path.unlink()
    (folder / "in" / "day-0.parquet").write_bytes(old)  # the fix: bring it back
    run(folder, "2024-01-03")
    assert len(released(folder)) == 8


def erased(folder: Path) -> None:
    path = folder / "in" / "day-0.parquet"
    table = pq.read_table(path)
    rows = pc.not_equal(table["user"], table["user"][0])
    pq.write_table(table.filter(rows), path)


def piped(folder: Path) -> None:
    lost(folder)
    os.mkfifo(folder / "in" / "day-0.parquet")


def foldered(folder: Path) -> None:
    lost(folder)
    (folder / "in" / "day-0.parquet").mkdir()


def unchanged(_: Path) -> None:
    """Leave the files as they are."""


def test_nothing_tells_of_files_that_were_read_to_their_end(read_two: Path, tmp_path: Path) -> None:
    """One user's rows are erased from an old file, it is deleted, or something else: each command
    prints and leaves what it does where the file is as it was."""
    seen = list[object]()
    for number, change in enumerate((unchanged, erased, changed, lost, piped, foldered)):
        folder = Path(shutil.copytree(read_two, tmp_path / "copies" / "one"))
        change(folder)
        printed = list[object]()
        for words in (
            ("run", "--quiet"), ("run", "--quiet", "--through", "2024-01-03"), ("plan",),
            ("state", "info"), ("state", "releases", "--out", folder / "rel"),
            ("report", "--json", "--out", folder / "page.html"),
            ("run", "--through", "2024-01-04"), ("run", "--json", "--through", "2024-01-04"),
        ):  # fmt: skip
            with fixed_date():
                done = call(*words, "--project", folder)
            printed.append((words, done.exit_code, done.stdout, done.stderr))
            stores.close_all()
        seen.append((printed, released(folder)))
        folder.rename(tmp_path / "copies" / str(number))
    assert [one == seen[0] for one in seen] == [True] * len(seen), seen
    assert len(released(tmp_path / "copies" / "0")) == 12


@pytest.mark.parametrize(
    "through",
    [
        "2023-12-31",
        "tomorrow",
    ],
)
def test_instants_that_are_refused(joined: Path, through: str | None, refused: Refused) -> None:
    folder = joined
    before = released(folder)
    error = refused(run, folder, through)
    assert error.field == passes.FLAG and released(folder) == before


def test_events_ahead_of_their_stamps_are_not_read_in_passes(
    tmp_path: Path, refused: Refused
) -> None:
    folder = place(tmp_path, "parquet")
    job = folder / "dpstream.toml"
    job.write_text(job.read_text() + 'max_skew = "1h"\n')
    arrive(folder, 1)
    error = refused(run, folder, "2024-01-02")
    assert error.field == passes.FLAG and not (folder / "s.db").exists()


@pytest.mark.parametrize("through", [None, "2024-01-03", "2024-01-02"])
def test_up_to_what_is_released_nothing_is_read(
    joined: Path, through: str | None, read: list[str]
) -> None:
    """A file that has come waits for a later instant."""
    before = released(joined)
    result = run(joined, through)
    assert (result.input_read, result.through) == (False, "2024-01-03T00:00:00Z")
    assert read == [] and released(joined) == before


def test_nothing_joins_behind_the_end(joined: Path, read: list[str]) -> None:
    run(joined, "2030-01-01")
    before = released(joined)
    arrive(joined, 4)
    read.clear()
    result = run(joined, "end")
    assert (result.input_read, result.through, read) == (False, None, [])
    assert released(joined) == before


def test_a_run_on_the_whole_input_stays_one(tmp_path: Path, refused: Refused) -> None:
    folder = place(tmp_path)
    arrive(folder, 2)
    run(folder)
    refused(run, folder, "2024-01-03")
    arrive(folder, 3)
    assert not run(folder).input_read, "it has ended"


def test_files_join_no_run_that_reads_its_input_as_a_whole(
    tmp_path: Path, refused: Refused
) -> None:
    folder = place(tmp_path)
    arrive(folder, 2)
    with pytest.MonkeyPatch.context() as patched, pytest.raises(DpstreamError):
        patched.setattr(sources, "read_group", lambda *_: 1 / 0)
        run(folder)
    stores.close_all()
    arrive(folder, 3)
    refused(run, folder)


def test_a_new_file_of_another_type_does_not_join(joined: Path, refused: Refused) -> None:
    folder = joined
    table = day(2)
    write(folder, "day-2.parquet", table.set_column(3, "amount", table["amount"].cast("string")))
    refused(run, folder, "2024-01-04")
    arrive_again = folder / "in" / "day-2.parquet"
    arrive_again.unlink()
    arrive(folder, 3)
    run(folder, "2024-01-04")


def test_a_pass_that_was_cut_off_is_done_before_files_join(tmp_path: Path, one_run: Path) -> None:
    """The new file is there when the pass is repeated, and joins only after it."""
    if not list((one_run / "in").glob("*.parquet")):
        return
    folder = place(tmp_path)
    arrive(folder, 1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(passes, "end", lambda *_: None)  # as if killed just before
        run(folder, "2024-01-02")
    stores.close_all()
    noted = passes.begun_of(load_job(folder / "dpstream.toml")).passes
    assert noted is not None and noted.pending
    arrive(folder, DAYS)
    run(folder, "end")
    noted = passes.begun_of(load_job(folder / "dpstream.toml")).passes
    assert noted is not None and [len(one.files) for one in noted.passes] == [1, 3]
    assert released(folder) == released(one_run)


def test_an_interrupted_pass_opens_no_file_that_has_come(tmp_path: Path) -> None:
    folder = place(tmp_path)
    arrive(folder, 1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(passes, "end", lambda *_: None)  # as if killed just before
        run(folder, "2024-01-02")
    stores.close_all()
    os.mkfifo(folder / "in" / "day-9.parquet")  # it would be refused
    assert run(folder, "2024-01-02").input_read
    assert not run(folder, "2024-01-02").input_read


def test_two_passes_of_one_moment(joined: Path) -> None:
    """Who finds that another pass was begun meanwhile is refused."""
    folder = joined
    job = load_job(folder / "dpstream.toml")
    (mine,) = passes.due(job, "2024-01-04", STRICT, print)
    assert mine.passes is not None and len(mine.passes.passes[-1].files) == 1
    run(folder, "2024-01-04")
    with pytest.raises(DpstreamError, match="another run has begun a pass"):
        from dpstream.pipelines.stream.begin import begin

        begun, _ = begin(job, reads=mine.compares)
        passes.commit(begun, mine)


def test_what_is_read_in_passes_is_never_read_as_a_whole(tmp_path: Path, refused: Refused) -> None:
    """Even where the note could not be read before the run was begun."""
    folder = place(tmp_path)
    arrive(folder, 1)
    run(folder, "2024-01-02")
    before = released(folder)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(passes, "begun_of", lambda _: passes.Begun())
        refused(run, folder)
    assert released(folder) == before


def test_a_store_that_is_being_made_says_nothing(tmp_path: Path, refused: Refused) -> None:
    folder = place(tmp_path)
    arrive(folder, 1)
    (folder / "s.db").write_bytes(b"")
    job = load_job(folder / "dpstream.toml")
    assert passes.begun_of(job) == passes.Begun()
    (folder / "s.db").write_bytes(b"no store")
    refused(run, folder, "2024-01-02")


def test_records_with_ids_read_all_again(tmp_path: Path, read: list[str]) -> None:
    """Their positions are not the files'; a file that may be needed is read."""
    folder = place(tmp_path)
    text = (folder / "dpstream.toml").read_text()
    assert 'time_column = "at"' in text
    text = text.replace('time_column = "at"', 'time_column = "at"\nrecord_id = "id"')
    (folder / "dpstream.toml").write_text(text)
    for number in range(3):
        table = day(number, 0.0, 1.2)
        ids = [f"{number}-{n}" for n in range(table.num_rows)]
        write(folder, f"day-{number}.parquet", table.append_column("id", [ids]))
        read.clear()
        run(folder, f"2024-01-0{number + 2}")
    assert set(read) == {f"day-{number}.parquet" for number in range(3)}


def test_now_is_a_clock_on_the_wall(tmp_path: Path) -> None:
    timeline = load_job(place(tmp_path) / "dpstream.toml").plan.timeline
    assert passes.trigger_time_of(timeline, "now") == timeline.last_trigger_time
    assert passes.trigger_time_of(timeline, "2024-01-01T11:59:59Z") == 1
    assert passes.trigger_time_of(timeline, "end") == 16


def test_the_note_holds_no_name(joined: Path) -> None:
    folder = joined
    noted = passes.begun_of(load_job(folder / "dpstream.toml")).passes
    assert isinstance(noted, Passes)
    assert all(len(one.name) == len(one.content) == 32 for one in noted.files)
    assert noted.done == 8 and not noted.pending


@pytest.mark.parametrize("backed_up", [1, 2])
def test_a_restored_store_goes_through_its_passes_again(
    tmp_path: Path, one_run: Path, backed_up: int
) -> None:
    """The same passes lead to what is published, whether the backup is of the last or before."""
    kind = next((one_run / "in").iterdir()).suffix[1:]
    folder = place(tmp_path, kind)
    for number, (through, files) in enumerate(COURSE[:2], start=1):
        arrive(folder, files)
        run(folder, through)
        stores.close_all()
        if number == backed_up:
            assert (
                call("state", "backup", "--project", folder, "--out", folder / "b").exit_code == 0
            )
    before = released(folder)
    restored = call("state", "restore", "daily", folder / "b", "--replace", "--project", folder)
    assert restored.exit_code == 0, restored.output
    run(folder, COURSE[1][0] if backed_up == 1 else None)
    assert released(folder) == before
    for through, files in COURSE[2:]:
        arrive(folder, files)
        run(folder, through)
    assert released(folder) == released(one_run)


def test_a_restored_store_whose_passes_were_others_is_refused(
    tmp_path: Path, refused: Refused
) -> None:
    """Two files that had joined in two passes join in one: a late row would count elsewhere."""
    folder = place(tmp_path, late="1d")
    arrive(folder, 1)
    run(folder, "2024-01-01T06:00:00Z")
    stores.close_all()
    assert call("state", "backup", "--project", folder, "--out", folder / "b").exit_code == 0
    run(folder, "2024-01-02")
    write(folder, "later.parquet", day(0, rows=3_000))
    run(folder, "2024-01-02T06:00:00Z")
    stores.close_all()
    before = released(folder)
    assert (
        call("state", "restore", "daily", folder / "b", "--replace", "--project", folder).exit_code
        == 0
    )
    refused(run, folder, "2024-01-02T06:00:00Z")
    assert released(folder) == before
