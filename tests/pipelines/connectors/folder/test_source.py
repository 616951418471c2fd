"""A growing folder as a source: markers, steps, positions, and what damages or renames files."""

import errno
import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from dpstream.pipelines.cli.main import cli
from dpstream.pipelines.connectors.folder import store
from dpstream.pipelines.connectors.folder import store as folder_store
from dpstream.pipelines.connectors.folder.source import Files, FolderInput
from dpstream.pipelines.connectors.folder.store import (
    LOOK_BACK,
    MARGIN,
    MAX_NAME_BYTES,
    Folder,
    Markers,
    SeenFiles,
    Settled,
    close_files,
    find,
    is_hidden,
    is_name,
    new_files,
    normal_url,
    nothing_seen,
    of_the_name,
    patiently,
    place,
    rfc3339,
    rows_of_text,
)
from dpstream.pipelines.connectors.registry import input_of
from dpstream.pipelines.formats.rows import Refused, Rows
from dpstream.pipelines.jobs.job import load_job
from tests.folders import (
    CANARY,
    SECOND,
    START,
    FolderReader,
    MakeFolderJob,
    data,
    line,
    make_folder_job,
    mark,
    positions,
    write,
)
from tests.golden import refusals
from tests.pipelines.formats.test_parquet import plain_bomb

__all__ = ["make_folder_job"]

CLOSED = 1_700_000_000_000_000


def parts(folder: Path, kind: str, file: tuple[str, int, int, int]) -> list[Rows | Refused]:
    files = Files(Folder(str(folder)), kind, ("a", "_closed"))
    pieces: list[Rows | Refused] = []
    for piece in files.pieces(file):
        if isinstance(piece, Refused):
            pieces.append(piece)
            continue
        pieces += files.parts(piece)
    return pieces


def test_rows_stand_behind_their_names_place(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("b,a\n1,u\n2,v\n")
    [rows] = parts(tmp_path, "csv", ("x.csv", CLOSED, 2, -1))
    assert isinstance(rows, Rows) and rows.offset == place("x.csv").base
    assert rows.batch["a"].to_pylist() == ["u", "v"]
    assert rows.batch["_closed"].cast(pa.int64()).to_pylist() == [CLOSED] * 2


def test_counts_and_sizes_are_held_against_it(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n')
    base = place("x.jsonl").base
    for rows, size, reason in ((7, -1, "row_count"), (-1, 3, "file_changed")):
        pieces = parts(tmp_path, "jsonl", ("x.jsonl", CLOSED, rows, size))
        assert isinstance(pieces[1], Refused)
        assert (pieces[1].offsets.tolist(), pieces[1].reasons) == ([base + 1], [reason])


def test_each_row_group_is_a_piece(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": ["x"] * 5}), tmp_path / "x.parquet", row_group_size=2)
    base = place("x.parquet").base
    pieces = parts(tmp_path, "parquet", ("x.parquet", CLOSED, 5, -1))
    assert [part.offset - base for part in pieces if isinstance(part, Rows)] == [0, 2, 4]


def test_files_that_are_none(tmp_path: Path) -> None:
    pq.write_table(pa.table({"b": [1]}), tmp_path / "other.parquet")
    (tmp_path / "no.parquet").write_bytes(b"no")
    for name, reason in (("other", "missing_column"), ("no", "unreadable_file"),
                         ("none", "unreadable_file")):  # fmt: skip
        [refused] = parts(tmp_path, "parquet", (f"{name}.parquet", CLOSED, -1, -1))
        assert isinstance(refused, Refused) and refused.reasons == [reason]


def test_a_file_that_unpacks_to_much_more_is_a_dead_letter(tmp_path: Path) -> None:
    """A stream that runs has its charge already: other files are read on."""
    plain_bomb(tmp_path / "x.parquet")
    [refused] = parts(tmp_path, "parquet", ("x.parquet", CLOSED, -1, -1))
    assert isinstance(refused, Refused) and refused.reasons == ["unpacks_too_large"]


@pytest.fixture(autouse=True)
def _now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "dpstream.pipelines.connectors.folder.source.wall_micros", lambda: START + 86_400 * SECOND
    )


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
def test_rows_have_the_stamp_and_the_position_of_their_file(
    tmp_path: Path, make_folder_job: MakeFolderJob, kind: str
) -> None:
    job = make_folder_job(kind)
    names = [f"b/1.{kind}", f"a.{kind}", f"b/2.{kind}"]
    for i, name in enumerate(names):
        write(tmp_path / "in" / name, data(90, 100 * i))
    run = FolderReader(job)
    assert run.look() is None, "no marker, no watermark"
    mark(tmp_path / "in", START + 10, line(names[0], START + 3), line(names[1], START + 5))
    assert run.look() == (START + 10) // 1000 * 1000
    mark(tmp_path / "in", START + SECOND, line(names[2], START + 700, rows=90), day=True)
    assert run.look() == START + SECOND
    rows = run.rows_read()
    assert set(rows) == set().union(*(positions(name, 90) for name in names))
    assert not run.dead
    for name, stamp in zip(names, (3, 5, 700), strict=True):
        mine = [rows[at] for at in sorted(positions(name, 90))]
        assert {row["_manifest"].timestamp() * 1e6 for row in mine} == {START + stamp}
        first = 100 * names.index(name)
        assert [float(row["value"]) for row in mine] == [i % 7 for i in range(first, first + 90)]
    assert list(run.records[0].schema.names) == list(job.columns)


@pytest.mark.parametrize("batch_rows", [7, 1000])
@pytest.mark.parametrize("fresh", [False, True])
def test_order_and_batches_do_not_matter(
    tmp_path: Path, make_folder_job: MakeFolderJob, batch_rows: int, fresh: bool
) -> None:
    job = make_folder_job("parquet", batch_rows=batch_rows)
    names = [f"{i}.parquet" for i in range(5)]
    for i, name in enumerate(names):
        write(tmp_path / "in" / name, data(50, i))
    mark(tmp_path / "in", START + 1, *(line(name, START) for name in names[:3]))
    mark(tmp_path / "in", START + 2, *(line(name, START) for name in names[3:]))
    run = FolderReader(job, fresh=fresh)
    while len(run.rows_read()) < 250:
        run.look()
    again = FolderReader(make_folder_job("parquet", batch_rows=13))
    while len(again.rows_read()) < 250:
        again.look()
    assert again.rows_read() == run.rows_read()


def test_positions_for_ever() -> None:
    """A change here would count every record of a running stream twice."""
    assert place("a.parquet") == (1458705923, 3383979779271127967)
    assert place("ü/1.csv") == (2005188888, 636266560958109334)
    assert 0 <= place("x").partition < 1 << 31 and place("x").base < 1 << 62


def test_names() -> None:
    for name in ("a", "a/b.csv", "ü.csv", "a b", "..a", "_x/y"):
        assert is_name(name)
    for name in ("", "/a", "a/", "a//b", "./a", "a/../b", "..", "_closed/x", "a\nb", "a\0", "a\\b",
                 "x" * 1025):  # fmt: skip
        assert not is_name(name)
    spot = place("b/2.csv")
    names = ["a.csv", "b/2.csv"]
    assert find(names, spot.partition, spot.base + 12) == [("b/2.csv", 12)]
    assert find(names, spot.partition, spot.base - 1) == []


def test_lines_that_name_no_file(tmp_path: Path, make_folder_job: MakeFolderJob) -> None:
    run = FolderReader(make_folder_job("jsonl"))
    write(tmp_path / "in" / "a.jsonl", data(3))
    write(tmp_path / "secret.jsonl", data(3))
    at = START + SECOND
    lines = [
        f"{CANARY} no JSON", line("a.jsonl", START), line("../secret.jsonl", START),
        line("a.jsonl", START), line("gone.jsonl", START), {"file": "a.jsonl"},
        {"file": "a.jsonl", "closed": "soon"}, line("a.jsonl", START, rows="many"),
        {"closed": rfc3339(START)}, line("_closed/x.jsonl", START),
        line(str(tmp_path / "secret.jsonl"), START),
    ]  # fmt: skip
    mark(tmp_path / "in", at, *lines)
    assert run.look() == at, "the stream lives on"
    assert set(run.rows_read()) == positions("a.jsonl", 3)
    marker = f"_closed/{rfc3339(at)}.jsonl"
    bad = {0: "malformed", 2: "bad_name", 3: "listed_twice", 5: "malformed", 6: "malformed",
           7: "malformed", 8: "malformed", 9: "bad_name", 10: "bad_name"}  # fmt: skip
    assert run.letters(marker) == sorted(bad.items())
    assert run.letters("gone.jsonl") == [(0, "unreadable_file")]


def test_markers_of_the_future_wait(
    tmp_path: Path, make_folder_job: MakeFolderJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = FolderReader(make_folder_job("jsonl"))
    write(tmp_path / "in" / "a.jsonl", data(3))
    mark(tmp_path / "in", START + 9, line("a.jsonl", START))
    mark(tmp_path / "in", START + 10**9, line("b.jsonl", START))
    mark(tmp_path / "in", 0, name="not an instant.jsonl")
    mark(tmp_path / "in", 0, name=f".{rfc3339(START)}.jsonl.tmp")
    monkeypatch.setattr(
        "dpstream.pipelines.connectors.folder.source.wall_micros", lambda: START + 10
    )
    assert run.look() == START and len(run.rows_read()) == 3
    monkeypatch.setattr(
        "dpstream.pipelines.connectors.folder.source.wall_micros", lambda: START + 10**9
    )
    assert run.look() == START + 10**9


def test_a_marker_that_comes_late_is_read(tmp_path: Path, make_folder_job: MakeFolderJob) -> None:
    run = FolderReader(make_folder_job("jsonl"))
    for name in ("a", "b", "c"):
        write(tmp_path / "in" / f"{name}.jsonl", data(4))
    mark(tmp_path / "in", START + 2 * SECOND, line("a.jsonl", START))
    run.look()
    mark(tmp_path / "in", START + SECOND, line("b.jsonl", START))
    assert run.look() == START + 2 * SECOND, "a watermark does not go back"
    assert set(run.rows_read()) == positions("a.jsonl", 4) | positions("b.jsonl", 4)


def test_begin_skips_what_is_not_needed(tmp_path: Path, make_folder_job: MakeFolderJob) -> None:
    job = make_folder_job("jsonl")
    for name in ("a", "b", "c"):
        write(tmp_path / "in" / f"{name}.jsonl", data(4))
    mark(tmp_path / "in", START + 10, line("a.jsonl", START + 5))
    mark(tmp_path / "in", START + 20, line("b.jsonl", START + 11), line("c.jsonl", START + 15))
    for begin, names in ((START + 10, "bc"), (START + 12, "c"), (START + 20, "")):
        run = FolderReader(job, begin)
        run.look()
        assert set(run.rows_read()) == set().union(*(positions(f"{n}.jsonl", 4) for n in names))


def settled(folder: Path, name: str, at: int, rows: int = 3) -> None:
    write(folder / name, data(rows))
    os.utime(folder / name, ns=(at * 1000, at * 1000))


def test_files_that_lie_unchanged(
    tmp_path: Path, make_folder_job: MakeFolderJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, folder = FolderReader(make_folder_job("jsonl", "closed")), tmp_path / "in"
    settle, now = 2 * SECOND, START + 100 * SECOND
    monkeypatch.setattr("dpstream.pipelines.connectors.folder.source.wall_micros", lambda: now)
    settled(folder, "b.jsonl", now - settle - 5)
    settled(folder, "a.jsonl", now - settle)
    settled(folder, "fresh.jsonl", now - settle + 1)
    settled(folder, "a.jsonl.tmp", now - settle - 9)
    settled(folder, "_draft/a.jsonl", now - settle - 9)
    assert run.look() == (now - settle - MARGIN) // 1000 * 1000
    assert set(run.rows_read()) == positions("a.jsonl", 3) | positions("b.jsonl", 3)
    stamps = {row["_closed"].timestamp() for row in run.rows_read().values()}
    assert {round(s * 1e6) for s in stamps} == {now - settle, now - settle - 5}
    now += SECOND
    settled(folder, "b.jsonl", now - settle, rows=9)
    run.look()
    assert set(run.rows_read()) >= positions("fresh.jsonl", 3)
    assert len(run.rows_read()) == 9, "a file that changed is not read again"
    assert run.letters("b.jsonl") == [(0, "file_changed")]
    assert run.watch.bundle().records == []


def test_a_column_of_the_data_as_stamp(tmp_path: Path, make_folder_job: MakeFolderJob) -> None:
    job = make_folder_job("jsonl", "received")
    rows = [{**row, "received": rfc3339(START + i)} for i, row in enumerate(data(5))]
    write(tmp_path / "in" / "a.jsonl", rows)
    mark(tmp_path / "in", START + SECOND, line("a.jsonl", START + 5))
    run = FolderReader(job)
    assert run.look() == START - SECOND, "rows may be stamped `settle` before the closing"
    assert [row["received"] for row in run.rows_read().values()] == [r["received"] for r in rows]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 3)), max_size=60))
@settings(deadline=None)
def test_what_was_seen_is_not_forgotten(entries: list[tuple[int, int]]) -> None:
    """A small state never takes an entry for new that was seen."""
    original, folder_store.LOOK_BACK = folder_store.LOOK_BACK, 5
    try:
        seen = nothing_seen(0, False)
        for i, entry in enumerate(entries):
            seen = seen.with_entries([entry])
            assert all(seen.has(old) for old in entries[: i + 1])
            assert len(seen.recent) <= 5
            assert not seen.has((99, 0))
    finally:
        folder_store.LOOK_BACK = original
    assert LOOK_BACK >= 100


def test_a_folder_of_many_files_needs_a_small_state(
    tmp_path: Path, make_folder_job: MakeFolderJob
) -> None:
    class Many(Folder):
        def list(self, below: str = "", recursive: bool = True) -> Iterator[Any]:
            for i in range(50_000):
                yield folder_store.ListedFile(f"{i}.jsonl", 1, START + i // 3)

    make_folder_job("jsonl")
    watch, count = Settled(Many(str(tmp_path / "in")), ".jsonl", 0), 0
    seen = nothing_seen(0, False)
    for step in watch.steps(seen, START + SECOND):
        count += len(step.files)
        seen = step.seen
        assert len(pickle.dumps(seen)) < 16_000
    assert count == 50_000
    assert sum(len(step.files) for step in watch.steps(seen, START + SECOND)) == 0


def test_close_files(
    tmp_path: Path, make_folder_job: MakeFolderJob, refused: refusals.Refused
) -> None:
    job, folder = make_folder_job("jsonl"), tmp_path / "in"
    for name in ("a.jsonl", "b/c.jsonl", "_draft.jsonl"):
        write(folder / name, data(3))
    assert new_files(folder) == ["a.jsonl", "b/c.jsonl"]
    close_files(folder, ["a.jsonl"], START + 5)
    assert new_files(folder) == ["b/c.jsonl"]
    for names in (["b"], ["gone.jsonl"], ["../in/a.jsonl"]):
        refused(close_files, folder, names)
    refused(close_files, folder, [], START + 5)
    run = FolderReader(job)
    assert run.look() == START
    assert {row["_manifest"].timestamp() for row in run.rows_read().values()} == {(START + 4) / 1e6}
    outcome = CliRunner().invoke(cli, ["folder", "close", str(folder), "--new", "--json"])
    assert json.loads(outcome.output)["files"] == 1
    spot = place("b/c.jsonl")
    args = ["folder", "find", str(folder), str(spot.partition), str(spot.base + 2)]
    assert CliRunner().invoke(cli, args).output == "row 2 of b/c.jsonl\n"
    args[-1] = "0"
    assert "no file" in CliRunner().invoke(cli, args).output


def test_identity(
    tmp_path: Path, make_folder_job: MakeFolderJob, refused: refusals.Refused
) -> None:
    job = make_folder_job("csv")
    source = input_of(job)
    assert isinstance(source, FolderInput) and not source.bounded
    assert source.identity() == [b"folder", (tmp_path / "in").as_uri().encode(), b"csv"]
    assert normal_url("S3://Bucket//a/b/?region=x") == "s3://Bucket/a/b?region=x"
    assert normal_url("file:///a/b/../c") == normal_url("/a/c/") == "file:///a/c"
    (tmp_path / "in").rmdir()
    refused(lambda: input_of(job).identity())
    refused(Folder, "ftp://x/y")


def test_releases_do_not_go_into_the_source(
    tmp_path: Path, make_folder_job: MakeFolderJob, refused: refusals.Refused
) -> None:
    path = make_folder_job("csv").path
    path.write_text(path.read_text().replace('path = "releases"', 'path = "in/releases"'))
    refused(lambda: input_of(load_job(path)).read())


def test_one_spelling_of_an_url(tmp_path: Path) -> None:
    assert normal_url(f"{tmp_path}/a/../b/") == normal_url(f"FILE://{tmp_path}/b")
    assert normal_url("GS://bucket//x/") == "gs://bucket/x"
    assert normal_url("s3://b/x/?region=r") == "s3://b/x?region=r"


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/a",
        "a/",
        "a//b",
        "../a",
        "a/./b",
        "_closed/x",
        "a\\b",
        "a\nb",
        "x" * (MAX_NAME_BYTES + 1),
    ],
)
def test_what_is_no_name(name: str) -> None:
    assert not is_name(name) and is_name("a/b.csv") and is_name("x" * MAX_NAME_BYTES)


def test_hidden_names() -> None:
    assert is_hidden("a/_b/c") and is_hidden(".a") and not is_hidden("a_b/c.d")


def test_a_position_finds_its_file_and_row() -> None:
    names = [f"f{n}" for n in range(100)]
    at = place("f7")
    assert 0 <= at.partition < 2**31 and 0 <= at.base < 2**62
    assert find(names, at.partition, at.base + 3) == [("f7", 3)]
    assert find(names, at.partition, at.base - 1) == []
    assert len({place(name) for name in names}) == 100


def test_listings_of_a_folder(tmp_path: Path, refused: refusals.Refused) -> None:
    (tmp_path / "day").mkdir()
    (tmp_path / "day" / "a.csv").write_text("abc")
    folder = pickle.loads(pickle.dumps(Folder(str(tmp_path))))  # noqa: S301
    assert folder.local and folder.is_there()
    [entry] = folder.list()
    assert (entry.name, entry.size) == ("day/a.csv", 3) and folder.info("day/a.csv") == entry
    assert list(folder.folders("")) == ["day"] and list(folder.list("none")) == []
    assert folder.info("none") is None
    with folder.stream("day/a.csv") as stream:
        assert stream.read() == b"abc"
    refused(Folder, "ftp://host/x")


def test_a_store_that_is_away_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, refused: refusals.Refused
) -> None:
    monkeypatch.setattr(store, "FIRST_PAUSE_SECONDS", 0.001)
    errors = [OSError(errno.EIO, "SECRET"), OSError(errno.EIO, "SECRET")]

    def call() -> str:
        if errors:
            raise errors.pop()
        return "there"

    assert patiently(call) == "there"
    monkeypatch.setattr(store, "PATIENCE_SECONDS", 0.01)
    errors = [OSError(errno.EIO, "SECRET")] * 1000
    error = refused(patiently, call)
    assert error.field == "table.path" and "SECRET" not in str(error)


def test_a_fault_of_the_name_is_not_waited_for() -> None:
    with pytest.raises(FileNotFoundError):
        patiently(lambda: os.stat("/none/at/all"))
    assert of_the_name(OSError(errno.ENAMETOOLONG, "")) and not of_the_name(OSError(errno.EIO, ""))


AT = 1_700_000_000_000_000


def test_what_is_seen_stays_seen_in_a_small_state() -> None:
    seen = nothing_seen(5, markers=False)
    entries = [(10 + n, n) for n in range(3 * LOOK_BACK)]
    for entry in entries:
        assert not seen.has(entry)
        seen = seen.with_entries([entry])
    assert all(seen.has(entry) for entry in entries) and len(seen.recent) == LOOK_BACK
    assert seen.has((5, -1)) and not seen.has((entries[-1][0] + 1, 0))
    assert entries[-1] in seen.recent


def test_nothing_before_the_beginning_is_needed() -> None:
    assert nothing_seen(7, True).has((7, 12345)) and not nothing_seen(7, False).has((7, 0))
    assert nothing_seen(0, True) == SeenFiles((0, -1))


def test_markers_come_in_order_and_none_of_the_future(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x")
    close_files(tmp_path, [], AT)
    close_files(tmp_path, ["a.csv"], AT + 100)
    close_files(tmp_path, [], AT + 200)
    steps = list(Markers(Folder(str(tmp_path)), behind=7).steps(nothing_seen(0, True), AT + 150))
    assert [step.upto for step in steps] == [AT - 7, AT + 93]
    assert [step.files for step in steps] == [[], [("a.csv", AT + 99, -1, -1)]]
    again = Markers(Folder(str(tmp_path))).steps(steps[-1].seen, AT + 300)
    assert [step.upto for step in again] == [AT + 200]


def test_lines_of_a_marker_that_name_no_file(tmp_path: Path) -> None:
    marker = tmp_path / "_closed" / "2023-11-14T22:13:21Z.jsonl"
    marker.parent.mkdir()
    good = '{"file": "a", "closed": "2023-11-14T22:13:20Z", "rows": 3}'
    lines = [good, good, good.replace('"a"', '"../a"'), good.replace("3}", "-3}"),
             good.replace(":20Z", ":59Z"), "no"]  # fmt: skip
    marker.write_text("\n".join(lines))
    [step] = Markers(Folder(str(tmp_path))).steps(nothing_seen(0, True), AT + 10**9)
    assert step.files == [("a", AT, 3, -1)]
    reasons = [reason for _, refused in step.refused for reason in refused.reasons]
    assert sorted(reasons) == ["bad_name", "listed_twice", *["malformed"] * 3]


def test_a_file_closed_at_the_instant_of_its_marker_is_read(tmp_path: Path) -> None:
    marker = tmp_path / "_closed" / "2023-11-14T22:13:21Z.jsonl"
    marker.parent.mkdir()
    names = ("20.999999Z", "21Z", "21.000001Z")
    lines = [f'{{"file": "{n}", "closed": "2023-11-14T22:13:{n}"}}' for n in names]
    marker.write_text("\n".join(lines))
    [step] = Markers(Folder(str(tmp_path))).steps(nothing_seen(0, True), AT + 10**9)
    assert [name for name, *_ in step.files] == ["20.999999Z", "21Z"]
    assert [refused.reasons for _, refused in step.refused] == [["malformed"]]


@pytest.mark.parametrize(
    ("text", "rows"), [(None, None), ("0", 0), ("12", 12), ("-1", -1), ("1.0", -1), ("1" * 16, -1)]
)
def test_counts_of_rows(text: str | None, rows: int | None) -> None:
    assert rows_of_text(text) == rows


def test_files_that_lay_still_and_one_that_changed(tmp_path: Path) -> None:
    for name, second in (("a.csv", 10), ("b.csv.gz", 11), ("c.csv", 30), ("_h.csv", 10)):
        (tmp_path / name).write_text("x")
        os.utime(tmp_path / name, (second, second))
    watch, now = Settled(Folder(str(tmp_path)), ".csv", 5_000_000), 20_000_000
    first, last = watch.steps(nothing_seen(0, False), now)
    assert [file[0] for file in first.files] == ["a.csv", "b.csv.gz"]
    assert (last.files, last.upto) == ([], now - 5_000_000 - MARGIN)
    os.utime(tmp_path / "a.csv", (12, 12))
    changed, _ = watch.steps(last.seen, now)
    assert changed.files == [] and changed.refused[0][1].reasons == ["file_changed"]


CLOSED_AT = 1_700_000_000_000_001


def test_an_instant_has_microseconds() -> None:
    assert rfc3339(CLOSED_AT) == "2023-11-14T22:13:20.000001Z"
    assert rfc3339(0) == "1970-01-01T00:00:00.000000Z"


def test_a_marker_names_files_as_closed_before_it(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x")
    (tmp_path / ".hidden.csv").write_text("x")
    assert new_files(tmp_path) == ["a.csv"]
    marker = close_files(tmp_path, ["a.csv"], CLOSED_AT)
    assert marker == "_closed/2023-11-14/2023-11-14T22:13:20.000001Z.jsonl"
    line = (tmp_path / marker).read_text()
    assert line == '{"file":"a.csv","closed":"2023-11-14T22:13:20.000000Z"}\n'
    assert new_files(tmp_path) == []


@pytest.mark.parametrize("at", [CLOSED_AT, CLOSED_AT - 1])
def test_time_goes_on(at: int, tmp_path: Path, refused: refusals.Refused) -> None:
    close_files(tmp_path, at=CLOSED_AT)
    refused(close_files, tmp_path, at=at)


@pytest.mark.parametrize("name", ["none.csv", "../a.csv", "/a.csv", "_closed/x.jsonl"])
def test_names_that_are_no_files(name: str, tmp_path: Path, refused: refusals.Refused) -> None:
    error = refused(close_files, tmp_path, [name], CLOSED_AT)
    assert error.field == "file" and not (tmp_path / "_closed").exists()
