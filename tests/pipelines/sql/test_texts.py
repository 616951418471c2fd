"""Statements of a file, EXPLAIN, and answers as tables for people."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dpstream.accounting.errors import DpstreamError
from dpstream.pipelines.formats.receipt import encoded
from dpstream.pipelines.sql.receipt import MARK, Header, decoded
from dpstream.pipelines.sql.texts import answer_text, explained, records, split
from dpstream.state.ledger.answers import Answer
from tests.pipelines.sql.asking import answer_to, data_set, dp

HEAD: dict[str, Any] = {
    "run_id": "ab", "plan_hash": "cd", "answered": "2024-01-01T00:00:00Z", "epsilon": 1.0,
    "delta": 1e-9, "mu": 0.2, "threshold_delta": 0.0,
}  # fmt: skip


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
    header = Header(**HEAD, reports=("n",))
    answer = decoded(Answer("ab", encoded(header, pa.table(columns)), "d", True), False)
    assert answer.header == header and answer.table.column_names[-1] == "n_noise_high"
    assert answer_text(answer) == (
        "page           n\n-----  ---------\na\ufffd[2J  1,234 ±34\nNULL      5.5 ±1\n"
    )
    first, second = records(answer)
    assert first["values"]["n"] == 1_234.0 and second["values"]["page"] is None
    assert first["intervals"] == {"n": {"sd": 1.0, "noise_low": 1_200.0, "noise_high": 1_268.0}}


def test_numbers_that_json_does_not_have(tmp_path: Path) -> None:
    """EXP of a released count, say."""
    inf, nan = float("inf"), float("nan")
    rows = pa.table({"n": [inf, -inf, nan, 1.5], "q": [[inf, 1.0], [nan], [None], []]})
    header = Header(**HEAD)
    answer = decoded(Answer("ab", encoded(header, rows), "d", True), False)
    assert [line.split()[0] for line in answer_text(answer).splitlines()[2:]] == [
        "Infinity", "-Infinity", "NaN", "1.5",
    ]  # fmt: skip
    text = json.dumps(records(answer), allow_nan=False)
    assert [row["values"] for row in json.loads(text)] == [
        {"n": "Infinity", "q": ["Infinity", 1.0]}, {"n": "-Infinity", "q": ["NaN"]},
        {"n": "NaN", "q": [None]}, {"n": 1.5, "q": []},
    ]  # fmt: skip
    data_set(tmp_path)
    full_answer = answer_to(tmp_path, dp("page, EXP(1000 * COUNT(DISTINCT uid)) AS e"))
    assert "Infinity" in answer_text(full_answer) and json.dumps(
        records(full_answer), allow_nan=False
    )


def test_bytes_of_another_form_are_refused() -> None:
    for bad in (b"", b"{}", b"dpsql\x01\x05\x00\x00\x00{}"):
        with pytest.raises(DpstreamError):
            decoded(Answer("ab", bad, "d", True), False)
