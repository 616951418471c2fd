"""Flags first, then prompts; an answer that will not do is asked for again.

Columns are checked by type.

Values are read only where they are public; what they say is rounded and whole.
"""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner

from dpstream.accounting.fields import Field
from dpstream.pipelines.drafting import ask
from dpstream.pipelines.drafting.ask import (
    Given,
    Person,
    answers,
    bounds,
    field_of,
    stretch,
    time_of,
    value_of,
    with_names,
)
from dpstream.pipelines.drafting.columns import column_of, data_file, text_column
from dpstream.pipelines.drafting.draft import Answers
from tests.golden.refusals import Refused
from tests.pipelines.drafting import SECRET, commits

COLUMNS = (
    column_of("sha", pa.string()), column_of("author_id", pa.int32()),
    column_of("lang", pa.string()), column_of("at", pa.string()),
    column_of("pushed", pa.timestamp("us")), column_of("size", pa.float64()),
    column_of("micros", pa.int64()), column_of("twice", pa.string()),
    column_of("twice", pa.string()),
)  # fmt: skip


def test_types_of_the_schema_are_taken() -> None:
    assert field_of("author_id", COLUMNS, "--unit") == Field("author_id", "int")
    assert field_of("who", None, "--unit") == Field("who")
    assert time_of("micros", COLUMNS, micros=True) == "micros"
    assert value_of("size", COLUMNS) == "size"


def test_what_will_not_do_names_flag_and_fix(refused: Refused) -> None:
    for call in (
        lambda: field_of("size", COLUMNS, "--unit"),
        lambda: field_of("pushed", COLUMNS, "--key"),
        lambda: field_of("user", COLUMNS, "--unit"),
        lambda: field_of("twice", COLUMNS, "--key"),
        lambda: field_of("", None, "--key"),
        lambda: time_of("size", COLUMNS, micros=True),
        lambda: time_of("micros", COLUMNS, micros=False),
        lambda: value_of("pushed", COLUMNS),
    ):
        refused(call)


def test_names_of_a_text_file_are_not_listed(refused: Refused) -> None:
    error = refused(lambda: field_of("user", [text_column("alice")], "--unit"))
    assert "alice" not in str(error)
    error = refused(lambda: field_of("user", [text_column("user;alice")], "--unit"))
    assert "alice" not in str(error)


NOTHING = Given(
    file="", unit=None, key=(), time=None, value=(), bounds=(), start=None, end=None, window=None,
    every=None, epsilon=None, delta=1e-8, contributions=10, micros=False, public_sample=False,
)  # fmt: skip
NOBODY = Person(False)
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
    assert printed.startswith("Columns: sha, author, path, when, lines, epoch, nested\n")
    assert printed.count("Error: ") == 9 and SECRET not in printed
    assert [f.column for f in replies.key] == ["path", "sha"] and replies.unit.type == "int"
    assert (replies.time, replies.values, replies.epsilon) == ("when", (("lines", 0, 5),), 1.0)
    assert replies.windows.length == "28d"


@pytest.mark.parametrize("flag", FLAGS)
def test_a_missing_flag_is_named(flag: str, tmp_path: Path, refused: Refused) -> None:
    missing = NOTHING._asdict()[flag]
    refused(answered, tmp_path, NOBODY, **FLAGS | {flag: missing})
    assert answered(tmp_path, NOBODY, **FLAGS).windows.length == "28d"


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
     ({"value": ("nested",), "bounds": ((0, 1),)}, "--value")],
)  # fmt: skip
def test_flags_that_will_not_do(
    flags: dict[str, Any], field: str, tmp_path: Path, refused: Refused
) -> None:
    error = refused(answered, tmp_path, NOBODY, **FLAGS | flags)
    assert error.field == field and SECRET not in str(error)


def test_a_public_sample_answers_start_end_and_bounds(tmp_path: Path) -> None:
    given = FLAGS | {"start": None, "end": None, "value": ("lines",), "public_sample": True}
    replies = answered(tmp_path, NOBODY, **given)
    assert replies.windows.start == "2023-03-05T00:00:00Z"
    assert replies.windows.end == "2023-09-22T00:00:00Z"
    assert replies.values == (("lines", 0, 200),)


def test_days_and_bounds_of_parquet(tmp_path: Path) -> None:
    file = data_file(str(commits(tmp_path / "a.parquet")))
    assert with_names(file) is file
    assert stretch(file, ("author", "int"), "when") == (
        datetime(2023, 3, 5, tzinfo=UTC), datetime(2023, 9, 22, tzinfo=UTC),
    )  # fmt: skip
    assert bounds(file, "lines") == (0, 200)


def test_only_the_first_rows_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ask, "SAMPLE_ROWS", 2)
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
    assert stretch(file, ("user", "string"), "at")[1] == datetime(2024, 3, 1, tzinfo=UTC)
    assert bounds(file, "x") == (-5, 0) and bounds(file, "y") == (0, 1)


def test_what_cannot_be_read_is_said_without_a_value(tmp_path: Path, refused: Refused) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"user,at\n{SECRET},{SECRET}\n,2024-01-01\n")
    file = data_file(str(path))
    for call, field in (
        (lambda: stretch(file, ("user", "int"), "at"), "--unit"),
        (lambda: stretch(file, ("user", "string"), "at"), "--time"),
        (lambda: bounds(file, "at"), "--value"),
    ):
        error = refused(call)
        assert error.field == field and SECRET not in str(error)
    path = tmp_path / "a.jsonl"
    path.write_text(SECRET)
    error = refused(lambda: with_names(data_file(str(path))))
    assert SECRET not in str(error)
