"""JSON objects as rows of text: each is decoded alone."""

import io

import pytest

from dpstream.pipelines.connectors.records.jsonl import MAX_DEPTH, Objects, _deepest, read_jsonl
from dpstream.pipelines.connectors.records.lines import BOM
from dpstream.pipelines.connectors.records.rows import Refused

MOST = 10_000


def texts(*values: bytes) -> list[str | None]:
    objects = Objects(["a"])
    found = objects.decode(list(values), MOST)
    assert None not in found
    return objects.arrays(found)[0].to_pylist()


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
    found = Objects(["a"]).decode([b'{"a": 1}', text, b'{"a": 2}'], MOST)
    assert [value is None for value in found] == [False, True, False]


def test_brackets_in_texts_are_no_depth() -> None:
    text = b'{"a": "' + b"[" * (2 * MAX_DEPTH) + b']"}'
    assert _deepest([text]) > MAX_DEPTH  # a bound only
    many = b'{"b": [' + b"[]," * MAX_DEPTH + b'[]], "a": "x"}'
    assert texts(many) == ["x"]
    [found] = Objects(["n"]).decode([text[:-1] + b', "n": 1}'], MOST)
    assert found is not None
    assert Objects(["n"]).decode([b'{"b": "\\"' + b"[" * 201 + b'", "n": 1}'], MOST) != [None]


def test_a_mark_is_dropped_and_the_last_of_a_field_counts() -> None:
    assert texts(BOM + b'{"a": 1, "a": 2}') == ["2"]


def test_lines_have_their_numbers() -> None:
    parts = list(read_jsonl(io.BytesIO(b'{"a": 1}\nno\n{"a": 3}'), ["a"]))
    refused = [part for part in parts if isinstance(part, Refused)]
    assert [part.offsets.tolist() for part in refused] == [[1]]
    assert [part.offset for part in parts if not isinstance(part, Refused)] == [0, 2]
