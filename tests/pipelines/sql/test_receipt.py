"""Receipts of statements, and that all ways of showing the same figures are one question.

What must stay two questions stands beside it: statements that differ in what is asked of private
rows.
"""

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.query.bounds import Cut
from dpstream.pipelines.formats.receipt import encoded, header_of
from dpstream.pipelines.render.answer import cut_lines
from dpstream.pipelines.sql.covering import StatementIdentity
from dpstream.pipelines.sql.load import load_catalog
from dpstream.pipelines.sql.query_plan import question_of
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
from tests.golden.pinned import refusal
from tests.pipelines.cli.called import call
from tests.pipelines.sql.asking import (
    COUNTED,
    FRESH,
    answer_to,
    charges,
    data_set,
    dp,
    without_noise,
)
from tests.pipelines.sql.queries import Row, presentations

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
    columns = dict.fromkeys(reports, "columns")
    return presented(Answer("", receipt, "digest", True), *read(receipt), columns, False, {})


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


@pytest.mark.parametrize("bounds", [", contribution_bounds_per_row => (0, 300)", ""])
def test_a_mean_that_is_mostly_noise_is_marked_and_counted(tmp_path: Path, bounds: str) -> None:
    """By the width of its bounds, given or chosen, under whatever label."""
    project = data_set(tmp_path)
    options = "epsilon = 5, delta = 1e-9, max_groups_contributed = 3"
    query = dp(f"page, AVG(seconds{bounds}) AS m, COUNT(DISTINCT uid) AS u", options=options)
    answer = answer_to(tmp_path, query)
    low, high = answer.header.bounds.get("m", (0, 300))
    sds = answer.intervals["m"]["sd"].to_pylist()
    noisy = [sd is not None and sd > (high - low) / 3 for sd in sds]
    rows = answer_text(answer).splitlines()[2:]
    assert [" ?" in row for row in rows] == noisy and answer.weak == {"m": noisy}
    printed = call("sql", "--project", str(project), query).output
    assert (f"{sum(noisy)} of {len(noisy)} values of m are mostly noise" in printed) is any(noisy)
    marked = presented(
        Answer("", encoded(HEADER, ROWS), "digest", True), HEADER, ROWS, {}, False, {"m": 1.0}
    )
    assert [" ?" in row for row in answer_text(marked).splitlines()[2:]] == [True, True]


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
        assert refusal(answer_of, bad) == "PolicyError account.path"


PLAIN = (
    "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 40, delta = 1e-9, "
    "max_groups_contributed = 12, mechanism = gaussian) page, n > 2 AS late, "
    "COUNT(*, contribution_bounds_per_group => (0, 30)) AS count, "
    "SUM(seconds, contribution_bounds_per_group => (0, 900)) AS sum, "
    "COUNT(DISTINCT uid) AS users, "
    "MEDIAN(seconds, contribution_bounds_per_row => (0, 100)) AS middle "
    "FROM visits GROUP BY page, late"
)


def _same(value: Any, expected: Any) -> bool:
    if value is None or expected is None:
        return value is expected
    return math.isclose(value, expected, rel_tol=1e-12)


def test_two_hundred_ways_of_showing_figures_cost_one_charge(tmp_path: Path) -> None:
    """And each shows the same figures, where they are asked for and by their own groups."""
    data_set(tmp_path)
    first = answer_to(tmp_path, PLAIN)
    released: dict[tuple[Any, Any], Row] = {
        (row["page"], row["late"]): row for row in first.table.to_pylist()
    }
    assert len(released) >= 12 and len({row["count"] for row in released.values()}) > 6
    compared = 0
    for seed in range(200):
        text, columns, groups = presentations(seed)
        answer = answer_to(tmp_path, text)
        assert not answer.charged and answer.receipt == first.receipt, text
        if groups is None:
            continue
        for row in answer.table.to_pylist():
            page, late = (row[name.strip("`")] for name in groups)
            for name, value in columns.items():
                expected = value(released[page, late])
                assert _same(row[name.strip("`")], expected), (text, name)
                compared += 1
    assert compared > 5_000 and len(charges(tmp_path)) == 1


#: Parts of a statement, of which each line lists private questions that differ in it.
_JOIN = "FROM visits AS a JOIN visits AS b ON a.uid = b.uid"
_ROW = "contribution_bounds_per_row => (0, 9)"
_ALL = "SELECT uid, page FROM visits"
_NAMED = "FROM (SELECT uid, {} FROM visits) AS v"
DIFFERENT: dict[str, list[str]] = {
    "function": [
        dp(f"page, {call} AS x")
        for call in (
            "COUNT(*)", COUNTED, "COUNT(seconds)", "COUNT(n)", "COUNT(DISTINCT uid)", "SUM(n)",
            "SUM(seconds)", "SUM(n + 1)", "AVG(n)", "STDDEV(n)", "VAR(n)", "MIN(n)", "MAX(n)",
            "MEDIAN(n)", "APPROX_QUANTILES(n, 2)", "APPROX_QUANTILES(n, 4)",
        )
    ],
    "bounds": [
        dp(f"page, SUM(n, {bounds}) AS x")
        for bounds in (
            _ROW, "contribution_bounds_per_group => (0, 9)",
            "contribution_bounds_per_group => (0, 10)", "contribution_bounds_per_group => (-1, 9)",
            "contribution_norm => 9, contribution_bounds_per_group => (0, 9)",
        )
    ],
    "several functions": [
        dp(f"page, {calls}")
        for calls in (
            "SUM(n) AS x", "SUM(n) AS x, SUM(seconds) AS y", "SUM(n) AS x, AVG(seconds) AS y",
            f"SUM(n, {_ROW}) AS x", f"SUM(n, {_ROW}) AS x, SUM(n, {_ROW.replace('0', '1')}) AS y",
            f"SUM(n, {_ROW}) AS x, SUM(n, {_ROW.replace('9', '8')}) AS y",
            f"SUM(n, {_ROW}) AS x, SUM(n, {_ROW.replace('row', 'group')}) AS y",
            f"MEDIAN(n, {_ROW}) AS x", f"MEDIAN(n, {_ROW}) AS x, MAX(n, {_ROW}) AS y",
            f"MEDIAN(n, {_ROW}) AS x, MAX(n) AS y",
            f"MAX(n, {_ROW}) AS x, APPROX_QUANTILES(n, 2, {_ROW}) AS y",
        )
    ],
    "options": [
        dp("page, SUM(n) AS x", options=f"{options}, delta = {delta}")
        for options, delta in (
            ("epsilon = 2, max_groups_contributed = 3", "1e-9"),
            ("epsilon = 3, max_groups_contributed = 3", "1e-9"),
            ("epsilon = 2, max_groups_contributed = 4", "1e-9"),
            ("epsilon = 2, max_groups_contributed = 3", "1e-8"),
            ("epsilon = 2, max_groups_contributed = 3, mechanism = gaussian", "1e-9"),
            ("epsilon = 2, max_groups_contributed = 3, mechanism = geometric", "1e-9"),
            ("epsilon = 2, max_groups_contributed = 3, optimise = ANSWER", "1e-9"),
            ("epsilon = 2, max_groups_contributed = 3, max_rows_contributed = 6", "1e-9"),
            ("epsilon = 2, max_groups_contributed = 3, min_privacy_units_per_group = 2", "1e-9"),
            ("epsilon = 2, contribution_norm = 3", "1e-9"),
        )
    ],
    "groups": [
        dp(f"{groups}, COUNT(*) AS x", f"FROM visits GROUP BY {groups}")
        for groups in ("page", "n", "page, n", "n > 2", "n > 3", "page, n > 2", "n + 1")
    ] + [dp("COUNT(*) AS x", "FROM visits")],
    "rows": [
        dp("page, SUM(n) AS x", f"FROM visits WHERE {where} GROUP BY page")
        for where in ("n = 1", "n = 2", "n > 1", "seconds = 1", "page = 'a'", "page = 'A'",
                      "n = 1 AND seconds = 1", "n = 1 OR seconds = 1", "NOT n = 1")
    ] + [dp("page, SUM(n) AS x")],
    "sides of a join": [
        dp(f"{one}.page, SUM({other}.n) AS x", f"{_JOIN}{where} GROUP BY {one}.page")
        for one, other in ("aa", "ab", "ba", "bb")
        for where in ("", " WHERE a.n > 1", " WHERE b.n > 1")
    ],
    "joins": [
        dp("a.page, COUNT(*) AS x", f"FROM {relation} GROUP BY a.page")
        for relation in (
            "visits AS a JOIN visits AS b ON a.uid = b.uid",
            "visits AS a LEFT OUTER JOIN visits AS b ON a.uid = b.uid",
            "visits AS a RIGHT JOIN visits AS b ON a.uid = b.uid",
            "visits AS a JOIN visits AS b ON a.uid = b.uid AND a.n = b.n",
            "visits AS a JOIN visits AS b ON a.uid = b.uid AND a.page = b.page",
            "visits AS a JOIN pages AS b ON a.page = b.page",
            "visits AS a JOIN pages AS b ON a.page = b.title",
        )
    ],
    "columns of a subquery": [
        dp("g, SUM(s) AS x", f"{_NAMED.format(items)} GROUP BY g")
        for items in ("page AS g, n AS s", "page AS g, seconds AS s", "n AS g, n AS s",
                      "page AS g, n + 1 AS s", "page AS g, n + 2 AS s", "n AS g, seconds AS s",
                      "CAST(n AS STRING) AS g, n AS s", "n + 1 AS g, n + 2 AS s",
                      "n + 2 AS g, n + 1 AS s")
    ],
    "a subquery's own rows": [
        dp("page, COUNT(*) AS x", f"FROM ({query}) AS v GROUP BY page")
        for query in (
            "SELECT uid, page FROM visits", "SELECT DISTINCT uid, page FROM visits",
            "SELECT uid, page FROM visits WHERE n > 1",
            "SELECT DISTINCT uid, page, n FROM visits",
            "SELECT uid, page, COUNT(*) AS k FROM visits GROUP BY uid, page, n",
            "SELECT uid, page, COUNT(*) AS k FROM visits GROUP BY uid, page HAVING COUNT(*) > 1",
            f"{_ALL} UNION ALL {_ALL}",
            f"{_ALL} UNION DISTINCT {_ALL}",
            f"{_ALL} INTERSECT DISTINCT {_ALL} WHERE n > 1",
            f"{_ALL} EXCEPT DISTINCT {_ALL} WHERE n > 1",
            f"{_ALL} WHERE n > 1 EXCEPT DISTINCT {_ALL}",
        )
    ],
    "places in a set operation": [
        dp(
            "g, SUM(s) AS x",
            f"FROM (SELECT uid, {one} UNION ALL SELECT uid, {other}) AS v GROUP BY g",
        )
        for one, other in (
            ("n AS g, n + 1 AS s FROM visits", "n AS g, n + 1 AS s FROM visits"),
            ("n AS g, n AS s FROM visits", "n AS g, n + 1 AS s FROM visits"),
            ("n AS g, n + 1 AS s FROM visits", "n + 1 AS s, n AS g FROM visits"),
            ("n + 1 AS g, n AS s FROM visits", "n AS g, n + 1 AS s FROM visits"),
        )
    ],
}  # fmt: skip


@pytest.mark.parametrize("part", list(DIFFERENT))
def test_what_differs_in_private_rows_stays_two_questions(part: str, tmp_path: Path) -> None:
    catalog = load_catalog(data_set(tmp_path))
    questions = [question_of(text, catalog) for text in DIFFERENT[part]]
    identities = {tuple(StatementIdentity(question, catalog).identity) for question in questions}
    assert len(identities) == len(questions) > 2


def test_functions_that_differ_in_anything_are_not_one(tmp_path: Path) -> None:
    catalog = load_catalog(data_set(tmp_path))
    for text in DIFFERENT["several functions"]:
        assert len(question_of(text, catalog).select.functions) == text.count(" AS ")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("a", "visits AS a JOIN visits AS b ON a.uid = b.uid"),
         ("v", "visits AS v INNER JOIN `visits` AS a ON v.uid = a.uid")),
        (("a", "visits AS a LEFT JOIN visits AS b ON a.uid = b.uid"),
         ("t1", "(SELECT page, uid FROM visits) AS t1 left outer join visits AS t0 ON "
          "t1.uid = t0.uid")),
        (("a", "(SELECT uid, page, COUNT(*) AS k FROM visits GROUP BY uid, page) AS a"),
         ("b", "(SELECT COUNT(*) AS n, v.page, uid FROM visits AS v GROUP BY v.uid, v.page) AS b")),
        (("a", "(SELECT uid, page FROM visits UNION ALL SELECT uid, page FROM visits) AS a"),
         ("b", "(SELECT v.uid AS u, page AS page FROM visits AS v UNION ALL SELECT uid AS x, "
          "page AS y FROM (SELECT * FROM visits) AS w) AS b")),
    ],
)  # fmt: skip
def test_names_within_a_private_relation_are_no_part_of_the_question(
    one: tuple[str, str], other: tuple[str, str], tmp_path: Path
) -> None:
    catalog = load_catalog(data_set(tmp_path))
    first, second = (
        question_of(
            dp(f"{name}.page, COUNT(*) AS x", f"FROM {relation} GROUP BY {name}.page"), catalog
        )
        for name, relation in (one, other)
    )
    assert StatementIdentity(first, catalog).identity == StatementIdentity(second, catalog).identity


def test_public_groups_keep_their_figures_in_any_order(tmp_path: Path) -> None:
    """Of the columns of GROUP BY, of the public relation, and of the select list."""
    data_set(tmp_path)
    on = "v.page = p.page AND CONCAT('Title ', CAST(MOD(v.n + 3, 3) AS STRING)) = p.title"
    options = (
        "epsilon = 40, delta = 1e-9, max_groups_contributed = 12, mechanism = gaussian, "
        "group_selection_strategy = PUBLIC_GROUPS"
    )
    rows = list[list[tuple[Any, ...]]]()
    orders = ("{t}page, {t}title", "{t}title, {t}page")
    for listed, by, selected in itertools.product(orders, repeat=3):
        relation = f"(SELECT DISTINCT {listed.format(t='')} FROM pages) AS p"
        rest = f"FROM visits AS v RIGHT JOIN {relation} ON {on} GROUP BY {by.format(t='p.')}"
        items = f"{selected.format(t='p.')}, {COUNTED} AS n"
        table = answer_to(tmp_path, dp(items, rest, options)).table
        columns = (table[name].to_pylist() for name in ("page", "title", "n"))
        rows.append(sorted(zip(*columns, strict=True)))
    assert len(charges(tmp_path)) == 1 and all(one == rows[0] for one in rows)
    assert len(rows[0]) == 12 and max(n for _, _, n in rows[0]) > 100
