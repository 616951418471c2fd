"""Texts in DuckDB's words: the values that GoogleSQL gives, and no text beyond its bound."""

import pytest

from dpstream.pipelines.statements.text_forms import MAX_TEXT
from tests.pipelines.sql.values import value


@pytest.mark.parametrize(
    ("text", "expected"),
    [("SUBSTR(s, 0, 2)", "he"), ("SUBSTR(s, -10, 3)", "hel"), ("SUBSTR(s, -3, 2)", "ll"),
     ("SUBSTR(s, 2)", "ello"), ("SUBSTR(s, 0)", "hello"), ("SUBSTR(s, 2, -1)", None),
     ("SUBSTR(s, n, n)", None), ("SUBSTR(s, 2, 3)", "ell"), ("LEFT(s, n)", None),
     ("LEFT(s, -1)", None), ("LEFT(s, 2)", "he"), ("LEFT(s, n + 3)", "he"), ("RIGHT(s, -1)", None),
     ("RIGHT(s, 2)", "lo"), ("RIGHT(s, 0 - n)", "o"), ("SUBSTR(s, n)", "o"),
     (r"s LIKE 'h\\_llo'", False), (r"'a_b' LIKE 'a\\_b'", True), (r"'axb' LIKE 'a\\_b'", False),
     (r"'100%' LIKE '100\\%'", True), (r"'100x' LIKE '100\\%'", False), ("s LIKE 'h%'", True),
     ("s LIKE p", True), ("s LIKE CONCAT(s, CHR_)", None), ("s LIKE 'h%CHR_'", None),
     ("CONCAT(s, CHR_) LIKE CONCAT(s, CHR_, CHR_)", True), (r"NOT '100x' LIKE '100\\%'", True)],
)  # fmt: skip
def test_texts(text: str, expected: object) -> None:
    text = text.replace("'h%CHR_'", r"'h%\\'").replace("CHR_", r"'\\'")
    assert value(text, s="hello", n=-1, p="%l_o") == expected


@pytest.mark.parametrize(
    ("text", "size"),
    [("CONCAT(long, long)", 2_000), ("long || 'x'", 1_001), ("CONCAT(long)", 1_000),
     ("CONCAT(long, no)", None), ("REPLACE(long, 'a', 'bcd')", 3_000),
     ("REPLACE(long, 'aa', '')", 0),
     ("REPLACE(long, 'a', 'bcdefg') || long", 7_000), ("REPLACE(long, '', 'b')", 1_000),
     ("REPLACE(long, 'x', long)", 1_000), ("REPLACE(long, 'a', no)", None),
     ("REPLACE(long, 'a', long)", None), ("CONCAT('é', '\U0001f3f3')", 2)],
)  # fmt: skip
def test_texts_that_grow(text: str, size: int | None) -> None:
    grown_text = value(text.replace("no", "CAST(no AS STRING)"), long="a" * 1_000, no=None)
    assert (None if grown_text is None else len(grown_text)) == size


def test_no_text_grows_beyond_its_bound() -> None:
    """What a text takes before it is dropped would tell of the row that has it."""
    text = "long"
    for _ in range(8):
        text = f"CONCAT({text}, {text})"
    assert value(text, long="a" * 1_000) is None and len(value(text, long="a" * 200)) == 51_200
    assert len(value("CONCAT(long, long)", long="a" * (MAX_TEXT // 2))) == MAX_TEXT
    assert value("CONCAT(long, long, 'a')", long="a" * (MAX_TEXT // 2)) is None
    assert len(value("REPLACE(long, 'a', 'bb')", long="a" * (MAX_TEXT // 2))) == MAX_TEXT
    assert value("REPLACE(long, 'a', 'bb')", long="a" * (MAX_TEXT // 2 + 1)) is None
    assert value("CAST(CAST(long AS BYTES) || CAST(long AS BYTES) AS STRING)", long="ab") == "abab"
