"""A folder that grows: what is closed, where rows stand, bad files, a store that is away.

The rows of one closed file: its place, its given stamp, and what it has against it.
"""

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

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.cli.main import cli
from dpstream.pipelines.connectors.folder import store as folder_store
from dpstream.pipelines.connectors.folder import watch as folder_watch
from dpstream.pipelines.connectors.folder.source import Files, FolderInput
from dpstream.pipelines.connectors.folder.store import Folder, find, is_name, normal_url, place
from dpstream.pipelines.connectors.folder.watch import (
    LOOK_BACK,
    MARGIN,
    Settled,
    close_files,
    new_files,
    nothing_seen,
    rfc3339,
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
from tests.pipelines.formats.test_parquet import plain_bomb

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
    assert isinstance(refused, Refused) and refused.reasons == ["unreadable_file"]


__all__ = ["make_folder_job"]


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
    original, folder_watch.LOOK_BACK = folder_watch.LOOK_BACK, 5
    try:
        seen = nothing_seen(0, False)
        for i, entry in enumerate(entries):
            seen = seen.more([entry])
            assert all(seen.has(old) for old in entries[: i + 1])
            assert len(seen.recent) <= 5
            assert not seen.has((99, 0))
    finally:
        folder_watch.LOOK_BACK = original
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


def test_close_files(tmp_path: Path, make_folder_job: MakeFolderJob) -> None:
    job, folder = make_folder_job("jsonl"), tmp_path / "in"
    for name in ("a.jsonl", "b/c.jsonl", "_draft.jsonl"):
        write(folder / name, data(3))
    assert new_files(folder) == ["a.jsonl", "b/c.jsonl"]
    close_files(folder, ["a.jsonl"], START + 5)
    assert new_files(folder) == ["b/c.jsonl"]
    for names in (["b"], ["gone.jsonl"], ["../in/a.jsonl"]):
        with pytest.raises(UsageError, match="file"):
            close_files(folder, names)
    with pytest.raises(UsageError, match="not later"):
        close_files(folder, [], START + 5)
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


def test_identity(tmp_path: Path, make_folder_job: MakeFolderJob) -> None:
    job = make_folder_job("csv")
    source = input_of(job)
    assert isinstance(source, FolderInput) and not source.bounded
    assert source.identity() == [b"folder", (tmp_path / "in").as_uri().encode(), b"csv"]
    assert normal_url("S3://Bucket//a/b/?region=x") == "s3://Bucket/a/b?region=x"
    assert normal_url("file:///a/b/../c") == normal_url("/a/c/") == "file:///a/c"
    (tmp_path / "in").rmdir()
    with pytest.raises(UsageError, match="not a folder"):
        input_of(job).identity()
    with pytest.raises(UsageError, match="known store"):
        Folder("ftp://x/y")


def test_releases_do_not_go_into_the_source(tmp_path: Path, make_folder_job: MakeFolderJob) -> None:
    path = make_folder_job("csv").path
    path.write_text(path.read_text().replace('path = "releases"', 'path = "in/releases"'))
    with pytest.raises(UsageError, match=r"sink\.path"):
        input_of(load_job(path)).read()
