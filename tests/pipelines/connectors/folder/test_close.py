"""Markers: whole, later than the last, and of files that are there (more in test_source)."""

from pathlib import Path

import pytest

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.connectors.folder.close import close_files, new_files, rfc3339

AT = 1_700_000_000_000_001


def test_an_instant_has_microseconds() -> None:
    assert rfc3339(AT) == "2023-11-14T22:13:20.000001Z"
    assert rfc3339(0) == "1970-01-01T00:00:00.000000Z"


def test_a_marker_names_files_as_closed_before_it(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x")
    (tmp_path / ".hidden.csv").write_text("x")
    assert new_files(tmp_path) == ["a.csv"]
    marker = close_files(tmp_path, ["a.csv"], AT)
    assert marker == "_closed/2023-11-14/2023-11-14T22:13:20.000001Z.jsonl"
    line = (tmp_path / marker).read_text()
    assert line == '{"file":"a.csv","closed":"2023-11-14T22:13:20.000000Z"}\n'
    assert new_files(tmp_path) == []


@pytest.mark.parametrize("at", [AT, AT - 1])
def test_time_goes_on(at: int, tmp_path: Path) -> None:
    close_files(tmp_path, at=AT)
    with pytest.raises(UsageError) as error:
        close_files(tmp_path, at=at)
    assert error.value.field == "marker"


@pytest.mark.parametrize("name", ["none.csv", "../a.csv", "/a.csv", "_closed/x.jsonl"])
def test_names_that_are_no_files(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        close_files(tmp_path, [name], AT)
    assert error.value.field == "file" and not (tmp_path / "_closed").exists()
