"""The answer of a receipt, also as a table for people.

What bounds cut is part of a statement's answer: estimated where the query chose, else named.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.errors import DpstreamError
from dpstream.accounting.query.bounds import Cut
from dpstream.pipelines.formats.receipt import encoded, header_of
from dpstream.pipelines.render.answer import cut_lines
from dpstream.pipelines.sql.receipt import (
    MARK,
    Header,
    SqlAnswer,
    answer_text,
    presented,
    read,
    records,
)
from dpstream.state.ledger.contract import Answer
from tests.pipelines.cli.called import call
from tests.pipelines.sql.asking import FRESH, answer_to, data_set, dp, without_noise

HEADER = Header(
    run_id="ab" * 16, plan_hash="q", answered="2026-01-02T03:04:05Z", epsilon=2.0, delta=1e-9,
    mu=0.5, threshold_delta=1e-10, bounds={"s": (0.0, 1.0)}, nulls=("m",),
)  # fmt: skip
HEAD: dict[str, Any] = {
    "run_id": "ab", "plan_hash": "cd", "answered": "2024-01-01T00:00:00Z", "epsilon": 1.0,
    "delta": 1e-9, "mu": 0.2, "threshold_delta": 0.0,
}  # fmt: skip
ROWS = pa.table(
    {
        "page": ["a", None],
        "n": [3.0, 4.0],
        **{f"n{MARK}{part}": [1.0, 2.0] for part in ("sd", "low", "high")},
        "m": pa.array([None, 1.5]),
        **{f"m{MARK}{part}": [0.5, 0.5] for part in ("sd", "low", "high")},
    }
)


def lines_of(header: Header, group: str) -> list[str]:
    """What is said of bounds below an answer."""
    return cut_lines(header.cuts, header.not_estimated, "uid", group, True)


def answer_of(receipt: bytes, reports: Sequence[str] = ()) -> SqlAnswer:
    return presented(Answer("", receipt, "digest", True), *read(receipt), reports, False)


def test_round_trip_with_and_without_report() -> None:
    answer = answer_of(encoded(HEADER, ROWS), ["n"])
    assert answer.header == HEADER and (answer.digest, answer.charged) == ("digest", True)
    assert answer.table.column_names == ["page", "n", "n_sd", "n_noise_low", "n_noise_high", "m"]
    assert answer.table.column("page").to_pylist() == ["a", None]
    assert answer.intervals["m"].column("sd").to_pylist() == [0.5, 0.5]
    assert encoded(answer.header, ROWS) == answer.receipt


OPTIONS = "epsilon = 3, delta = 1e-9"
ITEMS = "SUM(seconds) AS s, AVG(seconds) AS a, VAR(seconds) AS v, COUNT(*) AS n"
DRAW = np.random.default_rng(11)
VALUES = DRAW.lognormal(4, 1.2, 60_000)


def log_normal(folder: Path, epsilon: float = 100.0) -> None:
    size = len(VALUES)
    data_set(folder, pa.table({"uid": np.arange(size), "page": ["p1"] * size, "seconds": VALUES,
                               "n": [1] * size}), epsilon=epsilon)  # fmt: skip


def test_reported_shares_of_log_normal_values_are_near_the_true_ones(tmp_path: Path) -> None:
    """And with them the intervals tell the truth: each holds its figure of the clamped values."""
    log_normal(tmp_path)
    answer = answer_to(tmp_path, dp(ITEMS, "FROM visits", OPTIONS))
    assert set(answer.header.cuts) == {"s", "a", "v", "n"}
    assert answer.header.not_estimated == ("rows of v",)
    for name, cut in answer.header.cuts.items():
        values = np.ones(len(VALUES)) if name == "n" else VALUES
        assert abs(cut.below - np.mean(values < cut.low)) <= cut.within < 0.03
        assert abs(cut.above - np.mean(values > cut.high)) <= cut.within
        low, high = answer.header.bounds[name]
        assert cut.low == pytest.approx(low) and cut.high == pytest.approx(high)
    [row] = answer.table.to_pylist()
    cuts = answer.header.cuts
    for name in ("s", "a"):
        truth = VALUES.sum() if name == "s" else VALUES.mean()
        low, high = cuts[name].low, cuts[name].high
        lost = np.maximum(VALUES - high, 0).sum() / VALUES.sum()
        assert cuts[name].amount == pytest.approx(lost, abs=0.05)
        [sd] = answer.intervals[name]["sd"].to_pylist()
        cut_values = np.clip(VALUES, low, high)
        assert abs(row[name] - (cut_values.sum() if name == "s" else cut_values.mean())) < 5 * sd
        assert row[name] / (1 - (cuts[name].amount or 0)) == pytest.approx(truth, rel=0.06)
    assert cuts["v"].amount is None and cuts["n"].amount == pytest.approx(0, abs=0.01)
    # Few values are beyond the variance's bounds, and they are most of what it lacks.
    assert cuts["v"].below + cuts["v"].above < 0.05 and row["v"] < 0.95 * VALUES.var()
    lines = {name: line for name in "sav" for line in lines_of(answer.header, "")
             if line.startswith(f"Bounds of {name},")}  # fmt: skip
    assert [name for name, line in lines.items() if "variance" in line] == ["v"]


def test_shares_are_of_noisy_counts_and_exact_only_without_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_normal(tmp_path)
    text = dp("SUM(seconds) AS s", "FROM visits", OPTIONS)
    shares = [answer_to(tmp_path, text, FRESH).header.cuts["s"] for _ in range(4)]
    assert len({cut.above for cut in shares}) == 4
    without_noise(monkeypatch)
    exact = answer_to(tmp_path, text, FRESH).header.cuts["s"]
    assert exact.above == pytest.approx(np.mean(exact.high < VALUES), abs=1e-9)


def test_given_bounds_are_named_and_not_paid_for(tmp_path: Path) -> None:
    data_set(tmp_path)
    text = dp("page, SUM(seconds, contribution_bounds_per_group => (0, 9)) AS s, MEDIAN(n, "
              "contribution_bounds_per_row => (0, 9)) AS m, COUNT(DISTINCT uid) AS u")  # fmt: skip
    answer = answer_to(tmp_path, text)
    assert answer.header.cuts == {}
    assert answer.header.not_estimated == ("groups", "bounds of s", "bounds of m", "rows of m")
    [line] = [line for line in lines_of(answer.header, "group") if "Not estimated" in line]
    assert all(name in line for name in answer.header.not_estimated)


def test_receipt_table_json_and_text_have_them(tmp_path: Path) -> None:
    log_normal(tmp_path)
    text = dp("AVG(seconds WITH REPORT) AS a", "FROM visits", OPTIONS)
    answer = answer_to(tmp_path, text)
    assert list(header_of(answer.receipt, Header).cuts.values()) == [answer.header.cuts["a"]]
    metadata = answer.table.schema.metadata
    cuts = msgspec.json.decode(metadata[b"dpstream.cuts"], type=dict[str, Cut])
    assert cuts == answer.header.cuts and b"noise" in metadata[b"dpstream.intervals"]
    assert answer.table.column_names == ["a", "a_sd", "a_noise_low", "a_noise_high"]
    output = json.loads(call("sql", "--project", tmp_path, text, "--json").output)
    assert output["cuts"]["a"]["above"] == cuts["a"].above and output["intervals_cover"] == "noise"
    assert set(output["rows"][0]["intervals"]["a"]) == {"sd", "noise_low", "noise_high"}
    printed = call("sql", "--project", tmp_path, text).output
    assert all(line in printed for line in lines_of(answer.header, "group"))


def test_tables_are_aligned_and_control_characters_are_not_printed() -> None:
    columns = {
        "page": ["a\x1b[2J", None], "n": [1_234.0, 5.5],
        f"n{MARK}sd": [1.0, 1.0], f"n{MARK}low": [1_200.0, 4.5], f"n{MARK}high": [1_268.0, 6.5],
    }  # fmt: skip
    header = Header(**HEAD)
    answer = answer_of(encoded(header, pa.table(columns)), ["n"])
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
    answer = answer_of(encoded(header, rows))
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
            answer_of(bad)
