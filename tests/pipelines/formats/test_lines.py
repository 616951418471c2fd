"""A byte order mark is its own row's or text's; more lines with marks are in files.test_source.

JSON objects as rows of text: each is decoded alone.
"""

import io

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dpstream.accounting import limits
from dpstream.pipelines.formats import lines as source_lines
from dpstream.pipelines.formats.lines import (
    BOM,
    MAX_DEPTH,
    Objects,
    most_brackets,
    read_jsonl,
    split,
)
from dpstream.pipelines.formats.rows import Refused
from dpstream.pipelines.formats.texts import read_text
from tests.pipelines.connectors.files.test_source import csv_rows, json_rows


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
    assert (rows, reasons) == (3, ["unreadable_rest"]) and taken < 5 << 20


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
     b'{"b": ' + b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1) + b"}",
     b'{"b": "' + b"x" * MOST + b'"}'],
)  # fmt: skip
def test_what_is_no_object(text: bytes) -> None:
    rows = Objects(["a"]).decode([b'{"a": 1}', text, b'{"a": 2}'], MOST)
    assert [value is None for value in rows] == [False, True, False]


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


PIECES = [b'{"a":1}', b'{"a":"x"}', b"{", b"}", b'"a"', b":", b",", b"2", b" ", b"\n", b"\n",
          b'{"b":{"c":[]},"a":3}', b"}\r\n", b"[", b"]", b'{"b":"', b'"}']  # fmt: skip


def alone(data: bytes) -> list[list[str | None] | None]:
    """Each line by itself."""
    objects, rows = Objects(["a"]), []
    for line in data.split(b"\n"):
        if line not in (b"", b"\r"):
            [value] = objects.decode([line], MOST)
            rows.append(None if value is None else objects.arrays([value])[0].to_pylist())
    return rows


@given(st.lists(st.sampled_from(PIECES), max_size=30).map(b"".join))
@example(b'{"a":1}{"a":2}\n{"a":\n3}\n')  # as many values as lines
@example(b'{"a":1}{"a":2}\n{"b":{}\n}\n')
@example(b'{"b":"}\n{","a":1}\n{"a":1}{"a":2}\n{}{}\n')
@example(b'{"a":1}\n' * 300 + b'{"b":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}\n")
@example(b'{"a":9223372036854775808}\n{"a":-1}')
@settings(deadline=None)
def test_lines_in_company_are_what_they_are_alone(data: bytes) -> None:
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
