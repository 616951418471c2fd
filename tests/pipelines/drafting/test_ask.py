"""Flags first, then prompts; an answer that will not do is asked for again.

Columns are checked by type.

Values are read only where they are public; what they say is rounded and whole.
"""

import bz2
import gzip
import json
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from click.testing import CliRunner

from dpstream.accounting.fields import Field, FieldType
from dpstream.pipelines.drafting import sample
from dpstream.pipelines.drafting.ask import Given, Person, answers, field_of, time_of, value_of
from dpstream.pipelines.drafting.columns import Column, DataFile, column_of, data_file, text_column
from dpstream.pipelines.drafting.draft import (
    Answers,
    bounded,
    checked,
    grid_of,
    project_text,
    source_path,
    with_covers,
)
from dpstream.pipelines.drafting.sample import bounds, sampled_time, stretch, with_names
from dpstream.pipelines.drafting.windows import Windows
from dpstream.pipelines.project.sections import TimeColumn
from tests.golden.refusals import Refused
from tests.pipelines.drafting import SECRET, begun, commits

COLUMNS = (
    column_of("sha", pa.string()), column_of("author_id", pa.int32()),
    column_of("lang", pa.string()), column_of("at", pa.string()),
    column_of("pushed", pa.timestamp("us")), column_of("size", pa.float64()),
    column_of("micros", pa.int64()), column_of("twice", pa.string()), column_of("yes", pa.bool_()),
    column_of("twice", pa.string()),
)  # fmt: skip


PLAIN = TimeColumn("")


def test_types_of_the_schema_are_taken() -> None:
    assert field_of("author_id", COLUMNS, "--unit") == Field("author_id", "int")
    assert field_of("who", None, "--unit") == Field("who")
    counted = TimeColumn("", unit="ms")
    assert time_of("micros", COLUMNS, counted) == TimeColumn("micros", unit="ms")
    assert value_of("size", COLUMNS) == "size"


def test_what_will_not_do_names_flag_and_fix(refused: Refused) -> None:
    for call in (
        lambda: field_of("size", COLUMNS, "--unit"),
        lambda: field_of("pushed", COLUMNS, "--key"),
        lambda: field_of("user", COLUMNS, "--unit"),
        lambda: field_of("twice", COLUMNS, "--key"),
        lambda: field_of("", None, "--key"),
        lambda: time_of("yes", COLUMNS, PLAIN),
        lambda: time_of("micros", COLUMNS, PLAIN),
        lambda: value_of("pushed", COLUMNS),
    ):
        refused(call)


def test_names_of_a_text_file_are_not_listed(refused: Refused) -> None:
    error = refused(lambda: field_of("user", [text_column("alice")], "--unit"))
    assert "alice" not in str(error)


NOTHING = Given(
    file="", unit=None, key=(), time=None, value=(), bounds=(), start=None, end=None, window=None,
    every=None, epsilon=None, delta=1e-8, contributions=10, public_sample=False,
)  # fmt: skip
NOBODY, WHEN = Person(False), TimeColumn("when")
FLAGS = {
    "unit": "author", "key": ("path",), "time": "when", "start": "2023-01-01",
    "end": "2024-01-01", "epsilon": 2.0,
}  # fmt: skip


def answered(folder: Path, person: Person, **flags: Any) -> Answers:
    file = str(commits(folder / "a.parquet"))
    given = NOTHING._replace(file=file, **flags)
    return answers(given, person)


def test_a_person_is_asked_until_it_will_do(tmp_path: Path) -> None:
    typed = ("nobody", "lines", "author", "author", "path, sha", "epoch", "when", "5 0", "0 5",
             "2023", "2023-01-01", "2023-01-01", "2024-01-01", "", "x", "-3", "1")  # fmt: skip
    with CliRunner().isolation("\n".join(typed) + "\n") as (out, err, *_):
        replies = answered(tmp_path, Person(True), value=("lines",))
        printed = (out.getvalue() + err.getvalue()).decode()
    assert printed.startswith("Columns: sha, author, path, when, lines, epoch, nested.a\n")
    assert printed.count("Error: ") == 9 and SECRET not in printed
    assert [f.column for f in replies.key] == ["path", "sha"] and replies.unit.type == "int"
    assert (replies.time, replies.values) == (WHEN, (("lines", 0, 5),)) and replies.epsilon == 1.0
    assert replies.windows.length == "1 month"


@pytest.mark.parametrize("flag", FLAGS)
def test_a_missing_flag_is_named(flag: str, tmp_path: Path, refused: Refused) -> None:
    missing = NOTHING._asdict()[flag]
    refused(answered, tmp_path, NOBODY, **FLAGS | {flag: missing})
    assert answered(tmp_path, NOBODY, **FLAGS).windows.length == "1 month"


def test_all_missing_flags_are_named_at_once(tmp_path: Path, refused: Refused) -> None:
    error = refused(answered, tmp_path, NOBODY, unit="author", epsilon=1.0, value=("lines",))
    named = ["--key", "--time", "--start", "--end", "--bounds"]
    assert error.field.split(", ") == named
    assert all(f"{flag} " in error.fix for flag in named)
    assert "one of: sha, author, path" in error.fix and SECRET not in str(error)
    # a public sample answers for three of them
    refused(answered, tmp_path, NOBODY, value=("lines",), public_sample=True)


@pytest.mark.parametrize(
    ("flags", "field"),
    [({"value": ("lines",)}, "--bounds"), ({"bounds": ((0, 1),)}, "--bounds"),
     ({"key": ("author",)}, "--key"), ({"key": ("path", "path")}, "--key"),
     ({"end": "2023-01-01"}, "--end"), ({"time": "epoch"}, "--time"),
     ({"value": ("nested",), "bounds": ((0, 1),)}, "--value"),
     ({"csv": ("delimeter=;",)}, "--csv")],
)  # fmt: skip
def test_flags_that_will_not_do(
    flags: dict[str, Any], field: str, tmp_path: Path, refused: Refused
) -> None:
    error = refused(answered, tmp_path, NOBODY, **FLAGS | flags)
    assert error.field == field and SECRET not in str(error)


def test_a_public_sample_answers_start_end_and_bounds(tmp_path: Path) -> None:
    given = FLAGS | {"start": None, "end": None, "value": ("lines",), "public_sample": True}
    replies = answered(tmp_path, NOBODY, **given)
    assert replies.windows.start == "2023-03-01"
    assert replies.windows.end == "2023-09-22"
    assert replies.values == (("lines", 0, 200),)


def test_days_and_bounds_of_parquet(tmp_path: Path) -> None:
    file = data_file(str(commits(tmp_path / "a.parquet")))
    assert with_names(file) is file
    assert stretch(file, ("author", "int"), WHEN) == (date(2023, 3, 5), date(2023, 9, 22))
    assert bounds(file, "lines") == (0, 200)


def test_only_the_first_rows_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "SAMPLE_ROWS", 2)
    file = data_file(str(commits(tmp_path / "a.parquet")))
    assert bounds(file, "lines") == (0, 20)


def test_names_days_and_bounds_of_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [
        {"user": "a", "at": "2024-02-28 23:59:59", "x": -3},
        {"at": "2024-02-29T00:00:00Z", "y": 0},
    ]
    path.write_text("[1]\n" + "".join(json.dumps(row) + "\n" for row in rows))
    file = with_names(data_file(str(path)))
    assert [c.name for c in file.columns or ()] == ["user", "at", "x", "y"]
    assert stretch(file, ("user", "string"), TimeColumn("at"))[1] == date(2024, 3, 1)
    assert bounds(file, "x") == (-5, 0) and bounds(file, "y") == (0, 1)


def test_what_cannot_be_read_is_said_without_a_value(tmp_path: Path, refused: Refused) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"user,at\n{SECRET},{SECRET}\n,01.02.2024\n")
    file = data_file(str(path))
    for call, field in (
        (lambda: stretch(file, ("user", "int"), TimeColumn("at")), "--unit"),
        (lambda: stretch(file, ("user", "string"), TimeColumn("at")), "--time"),
        (lambda: bounds(file, "at"), "--value"),
    ):
        error = refused(call)
        assert error.field == field and SECRET not in str(error)
    path = tmp_path / "a.jsonl"
    path.write_text(SECRET)
    error = refused(lambda: with_names(data_file(str(path))))
    assert SECRET not in str(error)


def test_a_public_sample_tells_the_unit_of_numbers(tmp_path: Path, refused: Refused) -> None:
    path = tmp_path / "a.csv"
    path.write_text("user,at\na,1704067200000\nb,1704070800000\n")
    times = TimeColumn("at", unit="ms")
    assert sampled_time(data_file(str(path)), times) == times
    for unit in ("s", "us"):
        declared = msgspec.structs.replace(times, unit=unit)
        refused(sampled_time, data_file(str(path)), declared)


# The text of a first job: planned as it stands, whatever its columns are called.


OUT = begun(Path("/jobs"))
WEEKS = Windows("2024-01-01T00:00:00Z", "2024-02-05T00:00:00Z", "7d", 5)
ANSWERS = Answers(
    file=DataFile("/jobs/data/a [1].csv", Path("/jobs/data/a [1].csv"), "csv", None),
    unit=Field("who", "int"), key=(Field("page"), Field("lang")), time=TimeColumn("at"), values=(),
    windows=WEEKS, every=None, epsilon=1.0, delta=1e-8, contributions=10,
)  # fmt: skip


def test_a_job_says_what_was_answered() -> None:
    job = checked(project_text(ANSWERS, OUT), OUT)
    plan = job.plan
    assert (plan.unit, plan.key, plan.event_time) == (ANSWERS.unit, ANSWERS.key, "at")
    assert plan.timeline.triggers == 1 and plan.timeline.windows == 5
    assert (plan.privacy.epsilon, plan.privacy.delta, plan.privacy.contributions) == (1, 1e-8, 10)
    assert job.secret.file == "/jobs/visits.secret" and job.source.kind == "csv"
    assert job.ledger is not None and job.ledger.path == "/jobs/visits.account.db"


def test_what_is_suggested_in_comments_works() -> None:
    text = project_text(ANSWERS, OUT)
    assert 'covers = "lifetime"' in text and "'1d' also shows it grow" in text
    text = text.replace('covers = "lifetime"', 'covers = "window"').replace(
        'release_every = "7d"', 'release_every = "1d"'
    )
    plan = checked(text, OUT).plan
    assert plan.timeline.period == plan.timeline.window and plan.timeline.triggers == 7


def test_a_second_job_is_added_to_what_is_there() -> None:
    before = "# ours\n" + project_text(ANSWERS, OUT) + "\n\n"
    second = OUT._replace(before=before, job="hourly", new_data_set=None, new_table=False)
    text = project_text(ANSWERS._replace(epsilon=0.5), second)
    assert text.startswith(before.rstrip("\n")) and text.count("[table.visits]") == 1
    first, other = checked(text, OUT), checked(text, second)
    assert (first.plan.privacy.epsilon, other.plan.privacy.epsilon) == (1.0, 0.5)
    assert first.state.store != other.state.store and first.sink.path != other.sink.path
    assert first.ledger == other.ledger


def test_odd_names_are_written_whole() -> None:
    odd = 'a"b\\c\n\x7f #é'
    replies = ANSWERS._replace(unit=Field(odd), key=(Field("records"),), values=(
        bounded("records", 0, 1), bounded("count", -0.5, 0.25), bounded("_x", 0, 1e6)))  # fmt: skip
    plan = checked(project_text(replies, OUT), OUT).plan
    assert plan.unit.column == odd
    assert [a.name for a in plan.aggregates] == [
        "count", "mean_records", "mean_count", "x",
    ]  # fmt: skip
    assert [a.column for a in plan.aggregates][1:] == ["records", "count", "_x"]
    assert plan.aggregates[2].bounds == (-0.5, 0.25)


def test_a_file_is_no_pattern_and_a_pattern_is(tmp_path: Path) -> None:
    (tmp_path / "a[1].csv").touch()
    assert source_path(str(tmp_path / "a[1].csv"), tmp_path) == "a[[]1].csv"
    assert source_path(str(tmp_path / "*.csv"), tmp_path / "jobs") == "../*.csv"


@pytest.mark.parametrize(
    ("width", "grid"), [(100, 1), (120, 1), (1, 0.01), (0.5, 0.001), (1e6, 1e4)]
)
def test_the_grid_fits_the_bounds(width: float, grid: float) -> None:
    assert grid_of(0, width) == grid


@pytest.mark.parametrize("bounds", [(1, 1), (5, 0), (float("nan"), 1), (0, float("inf"))])
def test_what_are_no_bounds(bounds: tuple[float, float], refused: Refused) -> None:
    refused(bounded, "x", *bounds)


@pytest.mark.parametrize(
    "change",
    [{"epsilon": -1.0}, {"epsilon": float("nan")},
     {"epsilon": 2000.0}, {"delta": 1.0}, {"delta": 0.0},
     {"contributions": 0}, {"every": "2d"},
     {"every": "soon"}, {"key": (Field("_page"),)},
     {"windows": WEEKS._replace(length="1us")},
     {"every": "1d", "windows": WEEKS._replace(length="1 month", calendar="UTC")}],
)  # fmt: skip
def test_what_a_plan_would_refuse_is_refused_by_its_flag(
    change: dict[str, Any], refused: Refused
) -> None:
    refused(lambda: checked(project_text(ANSWERS._replace(**change), OUT), OUT))


@pytest.mark.parametrize(
    ("covers", "period"),
    [("Window", "7d"), (" Lifetime ", None), ("14d", "14d"), ("10d", ""), ("everything", "")],
)
def test_what_the_budget_covers(covers: str, period: str | None, refused: Refused) -> None:
    """A window, everything, or a length of whole windows."""
    if period != "":
        assert with_covers(ANSWERS, OUT, covers).period == period
        return
    refused(with_covers, ANSWERS, OUT, covers)


# What a schema says of columns; that nothing but a schema is read.


HEAD = b'user,"page, or part",at\n'


@pytest.mark.parametrize(
    ("kind", "identity", "time", "number"),
    [
        (pa.large_string(), "string", "text", False),
        (pa.dictionary(pa.int8(), pa.string_view()), "string", "text", False),
        (pa.uint16(), "int", "ticks", True),
        (pa.bool_(), "bool", None, False),
        (pa.binary(16), "bytes", None, False),
        (pa.decimal128(9, 2), None, None, True),
        (pa.float32(), None, "ticks", True),
        (pa.timestamp("ns"), None, "instant", False),
        (pa.date32(), None, "instant", False),
        (pa.struct({"a": pa.string()}), None, None, False),
        (pa.list_(pa.string()), None, None, False),
    ],
    ids=str,
)
def test_types(
    kind: pa.DataType, identity: FieldType | None, time: str | None, number: bool
) -> None:
    assert column_of("c", kind)._replace(sql=None) == Column("c", identity, time, number, None)


def test_a_parquet_schema_and_the_first_of_a_pattern(tmp_path: Path) -> None:
    commits(tmp_path / "b.parquet")
    file = data_file(str(tmp_path / "*.parquet"))
    assert file.kind == "parquet" and file.first.name == "b.parquet"
    assert [c.name for c in file.columns or ()][1:3] == ["author", "path"]


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress, pa.compress])
def test_a_csv_header_however_it_is_packed(pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    name = {gzip.compress: "a.csv.gz", bz2.compress: "a.csv.bz2", pa.compress: "a.csv.zst"}
    path = tmp_path / name.get(pack, "a.csv")
    body = b"\xef\xbb\xbf" + HEAD + b"x,y,z\n"
    if pack is pa.compress:
        with pa.CompressedOutputStream(str(path), "zstd") as out:
            out.write(body)
    else:
        path.write_bytes(pack(body))
    file = data_file(str(path))
    assert [c.name for c in file.columns or ()] == ["user", "page, or part", "at"]
    assert not any(c.listed for c in file.columns or ())


def test_json_lines_have_no_schema(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"{SECRET}": 1}}\n')
    assert data_file(str(path)).columns is None


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", b""),
        ("a.csv", SECRET.encode() + b",2024-01-01T00:00:00Z,7\n"),
        ("a.csv", SECRET.encode() + b",a@b.example\n"),
        ("a.csv", "usér,page\n".encode("cp1252")),
        ("a.csv.gz", b"user,page\n"),
        ("a.csv.xz", b"\xfd7zXZ\x00"),
        ("a.parquet", SECRET.encode()),
        ("a.parquet", b""),
        ("a.parquet", gzip.compress(b"PAR1", mtime=0)),
        ("a.xlsx", b""),
        ("b.csv", None),
    ],
)  # fmt: skip
def test_what_is_no_data(
    name: str, content: bytes | None, tmp_path: Path, refused: Refused
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    error = refused(data_file, str(tmp_path / name))
    assert error.field == "FILE" and SECRET not in str(error)


def test_a_folder_is_answered_with_a_pattern(tmp_path: Path, refused: Refused) -> None:
    refused(data_file, str(tmp_path))


def test_no_row_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = commits(tmp_path / "a.parquet")
    raw = path.read_bytes()
    foot = int.from_bytes(raw[-8:-4], "little") + 8
    path.write_bytes(b"PAR1" + b"\xff" * (len(raw) - foot - 4) + raw[-foot:])
    assert len(data_file(str(path)).columns or ()) == 7
