"""Keys without figures, of a table and of a statement: those of a slow selection, and few alone."""

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

import dpstream
from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.accounting.query import calibration, thresholds
from dpstream.accounting.query.calibration import allocate_query
from dpstream.accounting.query.plan import QueryPlan
from dpstream.pipelines.sql.dbapi import connect
from tests import accounts
from tests.pipelines.frames.visits import account, visits
from tests.pipelines.sql.asking import answer_to, charges, data_set, dp, without_noise

QUESTION: dict[str, Any] = {"unit": "user", "key": "page", "epsilon": 1.0, "max_keys": 3}


def selected(rows: list[tuple[int, str]], epsilon: float = 1.0, delta: float = 1e-9) -> list[str]:
    """Keys of units of at most three, by the mathematics of the selection and without noise."""
    budget = allocate_query(QueryPlan(epsilon, delta, 3, None, "gaussian", True))
    assert budget.selection is not None
    keys_of, weight = defaultdict[int, set[str]](set), defaultdict[str, float](float)
    for unit, key in rows:
        keys_of[unit].add(key)
    for keys in keys_of.values():
        assert len(keys) <= 3
        for key in keys:
            weight[key] += 1 / math.sqrt(len(keys))
    tau = budget.selection.tau / budget.selection.most
    assert all(abs(w - tau) > 0.01 for w in weight.values())  # no tie that rounding decides
    return sorted(key for key, total in weight.items() if total > tau)


def table_of_three() -> pa.Table:
    """Units of one to three keys; some keys have few units."""
    draw = np.random.default_rng(9)
    pages = [f"p{key}" for key in range(40)]
    rows = [
        (unit, pages[int(draw.exponential(5)) % 40])
        for unit in range(700)
        for _ in range(1 + unit % 3)
    ]
    return pa.table({"user": [unit for unit, _ in rows], "page": [page for _, page in rows]})


def test_keys_are_those_of_the_selection_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = table_of_three()
    rows = list(zip(table["user"].to_pylist(), table["page"].to_pylist(), strict=True))
    without_noise(monkeypatch)
    answer = dpstream.keys(table, **QUESTION)
    assert answer.table.column_names == ["page"] and "interval" not in answer.guarantee
    assert 3 < len(answer) < 40
    assert answer.table["page"].to_pylist() == selected(rows)
    data_set(tmp_path, table.rename_columns(["uid", "page"]))
    options = "epsilon = 1, delta = 1e-9, max_groups_contributed = 3"
    grouped = answer_to(tmp_path, dp("page", options=options))
    assert grouped.table["page"].to_pylist() == selected(rows) and grouped.intervals == {}
    distinct = answer_to(tmp_path, dp("DISTINCT page", "FROM visits", options))
    assert not distinct.charged and distinct.receipt == grouped.receipt
    [charge] = charges(tmp_path)
    assert (charge.kind, charge.epsilon, charge.delta) == ("keys", 1.0, 1e-9)
    few = answer_to(
        tmp_path, dp("page", "FROM visits GROUP BY page ORDER BY page DESC LIMIT 2", options)
    )
    assert few.table["page"].to_pylist() == selected(rows)[:-3:-1]


@pytest.mark.parametrize(("part", "holds"), [(1.0, True), (0.8, False)], ids=["tau", "lower tau"])
def test_keys_of_one_unit_are_shown_as_rarely_as_delta_says(
    monkeypatch: pytest.MonkeyPatch, part: float, holds: bool
) -> None:
    """One unit in each of many keys; with a threshold that is a fifth lower this test fails."""
    real = thresholds.gaussian_selection

    def lower(*of: Any) -> Any:
        made = real(*of)
        return msgspec.structs.replace(made, threshold=round(part * made.threshold))

    monkeypatch.setattr(calibration, "gaussian_selection", lower)
    size, delta = 60_000, 0.005
    table = pa.table({"user": np.arange(size), "page": np.arange(size)})
    released_keys = len(dpstream.keys(table, **QUESTION | {"max_keys": 1, "delta": delta},
                              mechanism="gaussian"))  # fmt: skip
    expected = calibration.THETA * delta * size
    assert (abs(released_keys - expected) < 5 * math.sqrt(expected)) is holds


def test_a_plan_of_keys_and_their_account(tmp_path: Path) -> None:
    table, paid = visits(), account(tmp_path)
    plan = dpstream.plan("keys", table, **QUESTION, **paid)
    assert plan.accepted and plan.charge == (1.0, 1e-9) and plan.columns == []
    [threshold] = plan.thresholds
    of_figures = dpstream.plan("histogram", table, **QUESTION).thresholds[0]
    assert threshold["tau"] < of_figures["tau"]
    chosen = dpstream.plan("keys", table, **QUESTION | {"max_keys": None}).thresholds
    assert [one["groups"] for one in chosen] == [1, 256]
    assert accounts.charges(tmp_path / "ledger.db") == []
    first = dpstream.keys(table, **QUESTION, **paid)
    assert first.charged and len(first) > 3
    assert dpstream.plan("keys", table, **QUESTION, **paid).answered
    again = dpstream.keys(table.slice(0, 0), **QUESTION, **paid)
    assert not again.charged and again.table.equals(first.table)
    [charge] = accounts.charges(tmp_path / "ledger.db")
    assert charge.kind == "keys" and charge.epsilon == 1.0


def test_explain_says_the_threshold_of_keys(tmp_path: Path) -> None:
    path = data_set(tmp_path)
    with connect(path) as connection:
        plan = connection.cursor().execute("EXPLAIN " + dp("page")).fetchall()
    assert any("group_0" in line for (line,) in plan) and charges(tmp_path) == []


def test_what_is_no_question_of_keys_is_refused(tmp_path: Path) -> None:
    for more in ({"key": None}, {"delta": 0.0}, {"epsilon": 0.0}, {"key": "user"}):
        with pytest.raises((UsageError, PolicyError)):
            dpstream.keys(visits(), **QUESTION | more)
    data_set(tmp_path)
    refused = {
        "contribution_norm": dp("page", options="epsilon = 1, delta = 1e-9, contribution_norm = 4"),
        "max_groups": dp("page", options="epsilon = 1, delta = 1e-9"),
        "distinct and GROUP BY": dp("DISTINCT page"),
        "a constant": dp("1 AS one", "FROM visits"),
        "distinct expressions": dp("DISTINCT UPPER(page)", "FROM visits"),
        "the unit": dp("uid", "FROM visits GROUP BY uid"),
        "public groups": dp(
            "p.page", "FROM visits AS v RIGHT JOIN (SELECT DISTINCT page FROM pages) AS p "
            "ON v.page = p.page GROUP BY p.page",
            "epsilon = 1, delta = 1e-9, max_groups_contributed = 3, "
            "group_selection_strategy = PUBLIC_GROUPS",
        ),
    }  # fmt: skip
    for text in refused.values():
        with pytest.raises((UsageError, PolicyError)):
            answer_to(tmp_path, text)
    assert charges(tmp_path) == []
