"""Statements of a file, EXPLAIN, and answers as tables for people."""

import pyarrow as pa
import pytest

from dpstream.accounting.errors import DpstreamError
from dpstream.pipelines.sql.receipt import MARK, Header, decoded, encoded
from dpstream.pipelines.sql.texts import explained, records, shown, split


def test_statements_end_at_semicolons_that_are_no_text() -> None:
    text = "SELECT ';' AS a; -- one; two\nSELECT 2 /* ; */;\n;  "
    assert [part.strip() for part in split(text)] == [
        "SELECT ';' AS a", "-- one; two\nSELECT 2 /* ; */",
    ]  # fmt: skip
    assert split("  ") == [] and split("SELECT 1") == ["SELECT 1"]
    with pytest.raises(DpstreamError):
        split("SELECT 'open")


def test_explain_is_a_word() -> None:
    assert explained(" Explain\nSELECT 1") == "\nSELECT 1"
    assert explained("SELECT 1") is None and explained("EXPLAINED x") is None


def test_tables_are_aligned_and_control_characters_are_not_printed() -> None:
    columns = {
        "page": ["a\x1b[2J", None], "n": [1_234.0, 5.5],
        f"n{MARK}sd": [1.0, 1.0], f"n{MARK}low": [1_200.0, 4.5], f"n{MARK}high": [1_268.0, 6.5],
    }  # fmt: skip
    header = Header("ab", "cd", "2024-01-01T00:00:00Z", 1.0, 1e-9, 0.2, 0.0, reports=("n",))
    answer = decoded(encoded(header, pa.table(columns)), "d", True, False)
    assert answer.header == header and answer.table.column_names[-1] == "n_high"
    assert shown(answer) == (
        "page           n\n-----  ---------\na\ufffd[2J  1,234 ±34\nNULL      5.5 ±1\n"
    )
    first, second = records(answer)
    assert first["values"]["n"] == 1_234.0 and second["values"]["page"] is None
    assert first["intervals"] == {"n": {"sd": 1.0, "low": 1_200.0, "high": 1_268.0}}


def test_bytes_of_another_form_are_refused() -> None:
    for bad in (b"", b"{}", b"dpsql\x01\x05\x00\x00\x00{}"):
        with pytest.raises(DpstreamError):
            decoded(bad, "d", True, False)
