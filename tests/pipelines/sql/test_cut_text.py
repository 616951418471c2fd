"""What bounds cut is part of a statement's answer: estimated where the query chose, else named."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.query.bounds import Cut
from dpstream.pipelines.formats.receipt import header_of
from dpstream.pipelines.sql.cut_text import lines_of
from dpstream.pipelines.sql.receipt import Header
from tests.pipelines.cli.called import call
from tests.pipelines.sql.asking import FRESH, answer_to, data_set, dp, without_noise

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
    lines = {name: line for name in "sav" for line in lines_of(answer.header, "uid", "")
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
    [line] = [line for line in lines_of(answer.header, "uid", "group") if "Not estimated" in line]
    assert all(name in line for name in answer.header.not_estimated)


def test_receipt_table_json_and_text_have_them(tmp_path: Path) -> None:
    log_normal(tmp_path)
    text = dp("AVG(seconds WITH REPORT) AS a", "FROM visits", OPTIONS)
    answer = answer_to(tmp_path, text)
    assert header_of(answer.receipt, Header).cuts == answer.header.cuts
    metadata = answer.table.schema.metadata
    cuts = msgspec.json.decode(metadata[b"dpstream.cuts"], type=dict[str, Cut])
    assert cuts == answer.header.cuts and b"noise" in metadata[b"dpstream.intervals"]
    assert answer.table.column_names == ["a", "a_sd", "a_noise_low", "a_noise_high"]
    output = json.loads(call("sql", "--project", tmp_path, text, "--json").output)
    assert output["cuts"]["a"]["above"] == cuts["a"].above and output["intervals_cover"] == "noise"
    assert set(output["rows"][0]["intervals"]["a"]) == {"sd", "noise_low", "noise_high"}
    printed = call("sql", "--project", tmp_path, text).output
    assert all(line in printed for line in lines_of(answer.header, "uid", "group"))
