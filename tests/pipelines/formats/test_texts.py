"""Text files: lines, CSV and JSON Lines, each line by itself."""

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

from dpstream.accounting import limits
from dpstream.pipelines.formats import lines as source_lines
from dpstream.pipelines.formats.encodings import encode, table_of_text
from dpstream.pipelines.formats.lines import BOM, MAX_LINE_BYTES, BrokenFileError, split
from dpstream.pipelines.formats.rows import (
    Reason,
    Refused,
    Rows,
    after,
    refuse,
    repair_text,
    runs,
)
from dpstream.pipelines.formats.small import read_texts
from dpstream.pipelines.formats.texts import (
    MAX_DEPTH,
    Objects,
    csv_header,
    csv_positions,
    most_brackets,
    read_csv,
    read_jsonl,
    read_text,
)
from dpstream.pipelines.project.sections import CsvSection
from tests.golden import refusals
from tests.pipelines.connectors.files.test_source import csv_rows, json_rows

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


def test_a_missing_column_shows_no_other_name(refused: refusals.Refused) -> None:
    assert csv_positions(["b", "a"], ["a", "b"]) == [1, 0]
    for header in (["SECRET", "b"], ["a", "a", "SECRET"]):
        error = refused(csv_positions, header, ["a"])
        assert error.field == "column 'a'" and "SECRET" not in str(error)
    refused(csv_positions, ["a;b"], ["a"])
    refused(csv_positions, ["a,b"], ["a"], CsvSection(delimiter=";"))


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


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_no_row_takes_the_byte_order_mark_of_another(marks: list[int], block: int) -> None:
    """One column too: there a row of nothing but a mark would be an empty line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source_lines, "BLOCK_BYTES", block)
        texts = [n * "\ufeff" + "x" * (n != 2) for n in marks]
        data = "\n".join(texts).encode()
        assert csv_rows(b"a\n" + data, ("a",))[0] == {i: (t,) for i, t in enumerate(texts)}
        assert csv_rows(BOM + b"a\n" + data, ("a",)) == csv_rows(b"a\n" + data, ("a",))
        objects = b"\n".join(n * BOM + b'{"a": 1}' for n in marks)
        good = {i: ("1",) for i, n in enumerate(marks) if n < 2}
        assert json_rows(objects, ("a",))[0] == good


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_file_that_has_no_line_breaks_any_more_is_read_no_further(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows before are; a line that ends within the bound is one bad row and no more."""
    monkeypatch.setattr(limits, "MAX_UNBROKEN_BYTES", 3 << 20)
    monkeypatch.setattr(source_lines, "BLOCK_BYTES", 1 << 16)
    row = b"x\n" if kind == "csv" else b'{"a": "x"}\n'
    head = b"a\n" if kind == "csv" else b""

    def parts_of(length: int) -> tuple[int, list[str], int]:
        stream = Endless(head + row * 3 + bytes(length) + b"\n" + row * 2)
        rows, reasons = 0, list[str]()
        for part in read_text(kind, stream, ["a"]):
            rows += 0 if isinstance(part, Refused) else part.batch.num_rows
            reasons += part.reasons if isinstance(part, Refused) else []
        return rows, reasons, stream.taken

    assert parts_of(2 << 20)[:2] == (5, ["line_too_long"])
    long_row = row.replace(b"x", b"x" * 60_000)
    many = sum(
        part.batch.num_rows
        for part in read_text(kind, io.BytesIO(head + long_row * 300), ["a"])
        if not isinstance(part, Refused)
    )
    assert many == 300  # whatever the blocks' ends add up to
    rows, reasons, taken = parts_of(64 << 20)
    assert (rows, reasons) == (3, ["no_line_break"]) and taken < 5 << 20


class Endless(io.BytesIO):
    """A file that knows how much of it was read."""

    taken = 0

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self.taken += len(data)
        return data


def test_messages_do_not_take_the_byte_order_mark_of_another() -> None:
    texts = [BOM + b'{"a": "x"}', b'{"a": "y"}', BOM + BOM + b"{}", b"{"]
    objects = Objects(("a",))
    alone = [objects.decode([text], 100)[0] for text in texts]
    assert objects.decode(texts, 100) == alone == [alone[0], alone[1], None, None]
    assert objects.arrays(alone[:2])[0].to_pylist() == ["x", "y"]


MOST = 10_000


def texts(*values: bytes) -> list[str | None]:
    objects = Objects(["a"])
    rows = objects.decode(list(values), MOST)
    assert None not in rows
    return objects.arrays(rows)[0].to_pylist()


@pytest.mark.parametrize(
    ("value", "text"),
    [(b'"x"', "x"), (b"1", "1"), (b"1.50", "1.5"), (b"true", "true"), (b"null", None),
     (b'"null"', "null"), (b'"\\u00e9"', "é")],
)  # fmt: skip
def test_scalars_are_their_shortest_text(value: bytes, text: str | None) -> None:
    line = b'{"a": ' + value + b"}"
    assert texts(line) == [text]
    # The same in any company.
    assert texts(line, b'{"a": "s"}', b'{"a": 2}', b'{"b": 0}') == [text, "s", "2", None]


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b"{", b'{"a": [1]}', b'{"a": {}}', b'{"a": 1} 2', b'{"a": "\xff"}',
     b'{"b": ' + b"[" * 200 + b"]" * 200 + b"}",
     b'{"b": "' + b"x" * MOST + b'"}'],
)  # fmt: skip
def test_what_is_no_object(text: bytes) -> None:
    rows = Objects(["a"]).decode([b'{"a": 1}', text, b'{"a": 2}'], MOST)
    assert [value is None for value in rows] == [False, True, False]


def test_an_object_may_be_200_deep() -> None:
    assert texts(b'{"b": ' + b"[" * 199 + b"]" * 199 + b', "a": "x"}') == ["x"]


def test_brackets_in_texts_are_no_depth() -> None:
    text = b'{"a": "' + b"[" * (2 * MAX_DEPTH) + b']"}'
    assert most_brackets([text]) > MAX_DEPTH  # a bound only
    many = b'{"b": [' + b"[]," * MAX_DEPTH + b'[]], "a": "x"}'
    assert texts(many) == ["x"]
    [row] = Objects(["n"]).decode([text[:-1] + b', "n": 1}'], MOST)
    assert row is not None
    assert Objects(["n"]).decode([b'{"b": "\\"' + b"[" * 201 + b'", "n": 1}'], MOST) != [None]


def test_a_mark_is_dropped_and_the_last_of_a_field_counts() -> None:
    assert texts(BOM + b'{"a": 1, "a": 2}') == ["2"]


def test_lines_have_their_numbers() -> None:
    parts = list(read_jsonl(io.BytesIO(b'{"a": 1}\nno\n{"a": 3}'), ["a"]))
    refused = [part for part in parts if isinstance(part, Refused)]
    assert [part.offsets.tolist() for part in refused] == [[1]]
    assert [part.offset for part in parts if not isinstance(part, Refused)] == [0, 2]


JSON_PIECES = [b'{"a":1}', b'{"a":"x"}', b"{", b"}", b'"a"', b":", b",", b"2", b" ", b"\n", b"\n",
          b'{"b":{"c":[]},"a":3}', b"}\r\n", b"[", b"]", b'{"b":"', b'"}']  # fmt: skip


def alone(data: bytes) -> list[list[str | None] | None]:
    """Each line by itself."""
    objects, rows = Objects(["a"]), []
    for line in data.split(b"\n"):
        if line not in (b"", b"\r"):
            [value] = objects.decode([line], MOST)
            rows.append(None if value is None else objects.arrays([value])[0].to_pylist())
    return rows


@given(st.lists(st.sampled_from(JSON_PIECES), max_size=30).map(b"".join))
@example(b'{"a":1}{"a":2}\n{"a":\n3}\n')  # as many values as lines
@example(b'{"a":1}{"a":2}\n{"b":{}\n}\n')
@example(b'{"b":"}\n{","a":1}\n{"a":1}{"a":2}\n{}{}\n')
@example(b'{"a":1}\n' * 300 + b'{"b":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}\n")
@example(b'{"a":9223372036854775808}\n{"a":-1}')
@settings(deadline=None)
def test_json_lines_in_company_are_what_they_are_alone(data: bytes) -> None:
    rows = dict[int, list[str | None] | None]()
    for part in read_jsonl(io.BytesIO(data), ["a"]):
        if isinstance(part, Refused):
            rows |= dict.fromkeys(part.offsets.tolist())
        else:
            values = part.batch["a"].to_pylist()
            rows |= {part.offset + number: [value] for number, value in enumerate(values)}
    assert [rows[number] for number in range(len(rows))] == alone(data)


def test_good_lines_are_decoded_together() -> None:
    lines, _ = split(b'{"a":1}\n{"a":[1]}\r\n{"a":2}\r\n{"a":"\xc3\xa9"}\n')
    objects = Objects(["a"])
    assert objects.decode_together(lines) is None
    for begin, count, texts in ((0, 1, ["1"]), (2, 2, ["2", "é"])):
        values = objects.decode_together(lines.slice(begin, count))
        assert values is not None and objects.arrays(values)[0].to_pylist() == texts


@pytest.mark.parametrize(
    ("offsets", "begins"),
    [([], []), ([7], [7]), ([1, 2, 3], [1]), ([1, 3], [1, 3]), ([1, 2, 5, 9, 10], [1, 5, 9])],
)
def test_runs_are_consecutive_and_together_everything(
    offsets: list[int], begins: list[int]
) -> None:
    batch = pa.RecordBatch.from_pydict({"x": pa.array(offsets, pa.int64())})
    row_runs = list(runs(np.array(offsets, np.int64), batch))
    assert [rows.offset for rows in row_runs] == begins
    for rows in row_runs:
        at = rows.batch["x"].to_pylist()
        assert at == list(range(rows.offset, rows.offset + len(at)))
    assert sum(rows.batch.num_rows for rows in row_runs) == len(offsets)


def test_what_comes_after_a_part() -> None:
    assert after(Rows(4, pa.RecordBatch.from_pydict({"x": [1, 2]}))) == 6
    assert after(Refused(np.array([4, 9]), ["empty", "empty"])) == 10
    one = refuse(3, Reason.EMPTY)
    assert (one.offsets.tolist(), one.reasons) == ([3], ["empty"])


@pytest.mark.parametrize("large", [False, True])
def test_text_that_is_not_utf8_is_null(large: bool) -> None:
    raw = pa.array(
        [b"ok", b"\xff", None, "é".encode()], pa.large_binary() if large else pa.binary()
    )
    column = raw.view(pa.large_string() if large else pa.string())
    fixed = repair_text(column)
    assert fixed.to_pylist() == ["ok", None, None, "é"] and fixed.type == column.type


def test_good_text_and_numbers_are_not_copied() -> None:
    for column in (pa.array(["a"]), pa.array([1])):
        assert repair_text(column) is column
