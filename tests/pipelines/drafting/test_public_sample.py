"""Values are read only where they are public; what they say is rounded and whole."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.drafting import public_sample
from dpstream.pipelines.drafting.columns import data_file
from dpstream.pipelines.drafting.public_sample import bounds, stretch, with_names
from tests.pipelines.drafting import SECRET, commits


def test_days_and_bounds_of_parquet(tmp_path: Path) -> None:
    file = data_file(str(commits(tmp_path / "a.parquet")))
    assert with_names(file) is file
    assert stretch(file, ("author", "int"), "when") == (
        datetime(2023, 3, 5, tzinfo=UTC), datetime(2023, 9, 22, tzinfo=UTC),
    )  # fmt: skip
    assert bounds(file, "lines") == (0, 200)


def test_only_the_first_rows_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(public_sample, "SAMPLE_ROWS", 2)
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


def test_what_cannot_be_read_is_said_without_a_value(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"user,at\n{SECRET},{SECRET}\n,2024-01-01\n")
    file = data_file(str(path))
    for call, field in (
        (lambda: stretch(file, ("user", "int"), "at"), "--unit"),
        (lambda: stretch(file, ("user", "string"), "at"), "--time"),
        (lambda: bounds(file, "at"), "--value"),
    ):
        with pytest.raises(UsageError) as error:
            call()
        assert error.value.field == field and SECRET not in str(error.value)
    path = tmp_path / "a.jsonl"
    path.write_text(SECRET)
    with pytest.raises(UsageError, match="one object a line") as error:
        with_names(data_file(str(path)))
    assert SECRET not in str(error.value)
