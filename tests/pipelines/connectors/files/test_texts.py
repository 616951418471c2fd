"""Lines of text files: each is a row or refused on its own."""

import io

import pytest

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.connectors.files.texts import (
    csv_header,
    csv_positions,
    read_csv,
    read_text,
)
from dpstream.pipelines.connectors.records.compression import BrokenFileError
from dpstream.pipelines.connectors.records.lines import BOM, MAX_LINE_BYTES
from dpstream.pipelines.connectors.records.rows import Refused


@pytest.mark.parametrize(
    ("text", "header"),
    [(b"a,b\n1,2", ["a", "b"]), (BOM + b'"a,x",b\r\n', ["a,x", "b"]), (b"", None), (b"\n1", None),
     (b"\xff,b\n", None), (b'"a\n', None), (b"x" * (MAX_LINE_BYTES + 1), None)],
)  # fmt: skip
def test_headers(text: bytes, header: list[str] | None) -> None:
    assert csv_header(io.BytesIO(text)) == header


def test_a_missing_column_shows_no_other_name() -> None:
    assert csv_positions(["b", "a"], ["a", "b"]) == [1, 0]
    for header in (["SECRET", "b"], ["a", "a", "SECRET"]):
        with pytest.raises(UsageError) as error:
            csv_positions(header, ["a"])
        assert error.value.field == "column 'a'" and "SECRET" not in str(error.value)


def test_no_line_changes_another() -> None:
    text = b'a,b\n1,x\n2\n"3,y\n,"4 ""q"""\n5,""\n'
    rows, refused = {}, {}
    for part in read_csv(io.BytesIO(text), ["b", "a"]):
        if isinstance(part, Refused):
            refused |= dict(zip(part.offsets.tolist(), part.reasons, strict=True))
        else:
            rows |= dict(enumerate(part.batch.to_pylist(), part.offset))
    assert refused == {1: "field_count", 2: "malformed"}
    assert rows == {
        0: {"b": "x", "a": "1"},
        3: {"b": '4 "q"', "a": None},
        4: {"b": "", "a": "5"},
    }


class BreaksOff(io.BytesIO):
    """A compressed text whose rest cannot be unpacked."""

    def read(self, size: int | None = -1) -> bytes:
        found = super().read(size)
        if not found:
            raise BrokenFileError
        return found


def test_a_text_that_breaks_off_is_refused_once() -> None:
    [refused] = read_text("jsonl", BreaksOff(b""), ["a"])
    assert isinstance(refused, Refused) and refused.reasons == ["unreadable_file"]
    [whole] = read_text("jsonl", io.BytesIO(b'{"a": 1}\n{"a": true}\n'), ["a"])
    assert not isinstance(whole, Refused) and whole.batch["a"].to_pylist() == ["1", "true"]
