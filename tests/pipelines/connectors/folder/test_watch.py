"""What has newly been closed: what is seen, markers in order, files that lay still.

Markers: whole, later than the last, and of files that are there (more in test_source).
"""

import os
from pathlib import Path

import pytest

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.connectors.folder.store import Folder
from dpstream.pipelines.connectors.folder.watch import (
    LOOK_BACK,
    MARGIN,
    Markers,
    SeenFiles,
    Settled,
    close_files,
    new_files,
    nothing_seen,
    rfc3339,
    rows_of_text,
)

AT = 1_700_000_000_000_000


def test_what_is_seen_stays_seen_in_a_small_state() -> None:
    seen = nothing_seen(5, markers=False)
    entries = [(10 + n, n) for n in range(3 * LOOK_BACK)]
    for entry in entries:
        assert not seen.has(entry)
        seen = seen.more([entry])
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
def test_time_goes_on(at: int, tmp_path: Path) -> None:
    close_files(tmp_path, at=CLOSED_AT)
    with pytest.raises(UsageError) as error:
        close_files(tmp_path, at=at)
    assert error.value.field == "marker"


@pytest.mark.parametrize("name", ["none.csv", "../a.csv", "/a.csv", "_closed/x.jsonl"])
def test_names_that_are_no_files(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        close_files(tmp_path, [name], CLOSED_AT)
    assert error.value.field == "file" and not (tmp_path / "_closed").exists()
