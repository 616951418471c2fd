"""Lines of text files: each is a row or refused on its own.

Random CSV with NUL bytes, quotes, line ends and broken characters against a reader of its own.

The reader here goes through one line after the other, character by character, as RFC 4180 has it.
"""

import io
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyarrow import csv as pacsv

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.formats.encodings import encode, table_of_text
from dpstream.pipelines.formats.lines import BOM, MAX_LINE_BYTES, BrokenFileError
from dpstream.pipelines.formats.rows import Refused
from dpstream.pipelines.formats.small import read_texts
from dpstream.pipelines.formats.texts import csv_header, csv_positions, read_csv, read_text

COLUMNS = ["user", "page", "note"]
#: Longer than ten characters: Arrow then looks for the end of a field in words of eight bytes.
FILLER = "x" * 130
Row = tuple[str | None, ...]


def fields_of(line: bytes) -> list[str | None] | None:
    """The fields of a line without its line end; ``None`` where the line is malformed."""
    if b"\0" in line or b"\r" in line or b"\n" in line:
        return None
    fields, at = list[str | None](), 0
    while True:
        value = b""
        if line[at : at + 1] == b'"':
            at += 1
            while line[at : at + 1] != b'"' or line[at : at + 2] == b'""':
                if at >= len(line):
                    return None
                value += line[at : at + 1]
                at += 1 + (line[at : at + 2] == b'""')
            at += 1
        else:
            end = line.find(b",", at)
            value = line[at : len(line) if end < 0 else end]
            if b'"' in value:
                return None
            at += len(value)
        try:
            fields.append(value.decode("utf-8"))
        except UnicodeDecodeError:
            fields.append(None)
        if at == len(line):
            return fields
        if line[at : at + 1] != b",":
            return None
        at += 1


def expected(text: bytes) -> tuple[dict[int, Row], dict[int, str]]:
    """Rows and reasons by number, as the reader of this module has them."""
    rows, refused, number = dict[int, Row](), dict[int, str](), 0
    for line in (ended.removesuffix(b"\r") for ended in text.split(b"\n")[1:]):
        if not line:
            continue
        fields = fields_of(line)
        if fields is None:
            refused[number] = "malformed"
        elif len(fields) != len(COLUMNS):
            refused[number] = "field_count"
        else:
            rows[number] = tuple(field or None for field in fields)
        number += 1
    return rows, refused


def read(parts: Iterator[object]) -> tuple[dict[int, Row], dict[int, str]]:
    rows, refused = dict[int, Row](), dict[int, str]()
    for part in parts:
        if isinstance(part, Refused):
            refused |= dict(zip(part.offsets.tolist(), part.reasons, strict=True))
        else:
            columns = [column.to_pylist() for column in part.batch.columns]  # type: ignore[attr-defined]
            values = [tuple(v or None for v in row) for row in zip(*columns, strict=True)]
            rows |= dict(enumerate(values, part.offset))  # type: ignore[attr-defined]
    return rows, refused


def hostile(draw: random.Random) -> bytes:
    """Some bytes that end in a line feed; often with as many fields as a row has."""
    symbols = [
        b"\0",
        b",",
        b'"',
        b'""',
        b"\r",
        b"\r\n",
        b"\n",
        b"\xff",
        b"\xc3\xa4",
        b"\xef\xbb\xbf",
    ]
    fields = []
    for _ in range(draw.choice([1, 3, 3, 3, 3, 4])):
        parts = draw.choices([*symbols, b"a", b"yyyyyyyyyyy"], k=draw.randint(0, 4))
        field = b"".join(parts) + b"z" * draw.randint(0, 20) + draw.choice([b"", b"\0", b"\0\0"])
        fields.append(field)
    return b",".join(fields) + b"\n"


def worlds(seed: int, rows: int, shares: float = 0.01) -> tuple[bytes, bytes]:
    """A file with hostile lines, and the same file without them."""
    draw = random.Random(seed)
    good, mixed = [b"user,page,note\n"], [b"user,page,note\n"]
    for number in range(rows):
        if draw.random() < shares:
            mixed.append(hostile(draw))
        line = (
            f'u{number},"p""{number}",{FILLER}\n' if number % 7 == 0 else f"u{number},p,{FILLER}\n"
        )
        good.append(line.encode())
        mixed.append(good[-1])
    return b"".join(mixed), b"".join(good)


def of_others(rows: dict[int, Row]) -> list[Row]:
    """The rows of the users that wrote nothing hostile, in order."""
    return [row for row in rows.values() if row[0] and row[0][1:].isdigit() and row[2] == FILLER]


@pytest.mark.parametrize("seed", range(2))
def test_hostile_lines_are_read_as_by_hand_and_change_no_other(seed: int) -> None:
    """Files longer than a block, with more rows than Arrow needs to change its way of reading."""
    mixed, good = worlds(seed, 70_000)
    assert len(good) > 9 << 20
    reading = read(read_text("csv", io.BytesIO(mixed), COLUMNS))
    assert reading == expected(mixed)
    alone, none = read(read_text("csv", io.BytesIO(good), COLUMNS))
    assert not none and of_others(reading[0]) == list(alone.values())


@pytest.mark.parametrize("cut", [-2, -1, 0, 1])
def test_a_nul_byte_at_a_block_border(cut: int) -> None:
    line = f"u,p,{FILLER}\n".encode()
    many = ((8 << 20) - 15) // len(line)
    head = b"user,page,note\n" + line * many
    head += b"v,q," + b"x" * ((8 << 20) - len(head) - 8 + cut) + b"\n"
    mixed = head + b"w\0,q\0,x\n" + line * 10_000
    assert read(read_text("csv", io.BytesIO(mixed), COLUMNS)) == expected(mixed)


def test_small_files_together_are_read_as_by_hand(tmp_path: Path) -> None:
    texts = {number: worlds(number, 4_000, 0.05)[0] for number in range(4)}
    for number, text in texts.items():
        (tmp_path / f"{number}.csv").write_bytes(text)
    rows: dict[int, dict[int, Row]] = {number: {} for number in texts}
    refused: dict[int, dict[int, str]] = {number: {} for number in texts}
    files = [(number, str(tmp_path / f"{number}.csv")) for number in texts]
    for part in read_texts("csv", files, COLUMNS):
        places = zip(part.partition.tolist(), part.offset.tolist(), strict=True)
        if isinstance(part.result, pa.RecordBatch):
            columns = [column.to_pylist() for column in part.result.columns]
            for (file, row), values in zip(places, zip(*columns, strict=True), strict=True):
                rows[file][row] = tuple(value or None for value in values)
        else:
            for (file, row), reason in zip(places, part.result, strict=True):
                refused[file][row] = reason
    assert {n: (rows[n], refused[n]) for n in texts} == {n: expected(t) for n, t in texts.items()}


@pytest.mark.parametrize("wrong", ["refuses", "loses a row"])
def test_lines_that_arrow_does_not_read_are_read_one_by_one(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed, _ = worlds(9, 500, 0.2)
    plain: Callable[..., pa.Table] = pacsv.read_csv

    def fails(*args: object) -> pa.Table:
        if wrong == "refuses":
            raise pa.ArrowInvalid("CSV parse error: u1,private")
        return plain(*args).slice(1)

    monkeypatch.setattr(pacsv, "read_csv", fails)
    parts = list(read_text("csv", io.BytesIO(mixed), COLUMNS))
    assert read(iter(parts)) == expected(mixed)
    monkeypatch.undo()
    for one, other in zip(parts, read_text("csv", io.BytesIO(mixed), COLUMNS), strict=True):
        if isinstance(one, Refused):
            assert isinstance(other, Refused) and np.array_equal(one.offsets, other.offsets)
        else:
            assert not isinstance(other, Refused) and one.batch.equals(other.batch)


def test_released_keys_with_nul_bytes_are_read_back() -> None:
    """Keys come from Parquet, JSON and messages too, and there a NUL byte is a character."""
    keys = [f"key {number} {FILLER}" for number in range(20_000)]
    keys[15_000:15_003] = [f"{FILLER}\0", '\0\0\0,\0"\0\n', "\ue000\0"]
    batch = pa.record_batch({"page": keys, "n": list(range(len(keys)))})
    text = encode(batch, "csv", guard=False)
    assert table_of_text(text, "csv", batch.schema).to_batches() == [batch]


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
    rows, refused = dict[int, dict[str, str | None]](), dict[int, str]()
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


PIECES = [b"1", b"x", b'"y"', b'"a,b"', b'""', b'"', b",", b",", b"\r", b"\n", b"\r\n", b"\0",
          b"1,2\n", b'"1","2"\n', b"1,2\r\n", BOM]  # fmt: skip


def rows_of(data: bytes) -> list[tuple[str | None, ...] | str]:
    """Every row, or why it is none."""
    rows = dict[int, tuple[str | None, ...] | str]()
    for part in read_csv(io.BytesIO(b"a,b\n" + data), ["a", "b"]):
        if isinstance(part, Refused):
            rows |= dict(zip(part.offsets.tolist(), part.reasons, strict=True))
        else:
            columns = [column.to_pylist() for column in part.batch.columns]
            rows |= dict(enumerate(zip(*columns, strict=True), part.offset))
    return [rows[number] for number in range(len(rows))]


@given(st.lists(st.sampled_from(PIECES), max_size=25).map(b"".join))
@example(b'1,2\n"1,2\n3",4\n')
@example(b'a"b,"c"\n1,2\n')
@example(b"1,2\r\n1,\r2\n")
@settings(deadline=None)
def test_lines_in_company_are_what_they_are_alone(data: bytes) -> None:
    together, alone = rows_of(data), [rows_of(line) for line in data.split(b"\n")]
    assert together == [row for rows in alone for row in rows]


class BreaksOff(io.BytesIO):
    """A compressed text whose rest cannot be unpacked."""

    def read(self, size: int | None = -1) -> bytes:
        chunk = super().read(size)
        if not chunk:
            raise BrokenFileError
        return chunk


def test_a_text_that_breaks_off_is_refused_once() -> None:
    [refused] = read_text("jsonl", BreaksOff(b""), ["a"])
    assert isinstance(refused, Refused) and refused.reasons == ["unreadable_file"]
    [rows] = read_text("jsonl", io.BytesIO(b'{"a": 1}\n{"a": true}\n'), ["a"])
    assert not isinstance(rows, Refused) and rows.batch["a"].to_pylist() == ["1", "true"]
