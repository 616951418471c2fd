"""Charged before it is counted, committed before it is seen, paid once.

The answer's table is everybody's, and its words say what is promised.  An account stores the family
of noise that was chosen.  Keys without figures are those of a slow selection, and few alone.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from matplotlib import pyplot

import dpstream
from dpstream.accounting.query import calibration, thresholds
from dpstream.accounting.query.calibration import allocate_query
from dpstream.accounting.query.plan import QueryPlan
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.pipelines.frames import answer as module
from dpstream.state.ledger.events import Charge
from tests import accounts
from tests.golden.pinned import check, of_cases, of_refusals
from tests.golden.refusals import Refused
from tests.pipelines.frames.visits import KEY, account, visits, with_secret
from tests.pipelines.sql.asking import answer_to, charges, data_set, dp, without_noise
from tests.pipelines.stream.test_begin import CutOff, cut_off

HERE = Path(__file__).parent
TABLE = visits()


def test_libraries_take_it_as_a_table() -> None:
    answer = dpstream.histogram(TABLE, unit="user", key="page", epsilon=2.0)
    names = ["page", "units", "units_sd", "units_noise_low", "units_noise_high"]
    assert answer.table.column_names == names and len(answer) == answer.table.num_rows > 3
    assert pa.table(answer).equals(answer.table)
    frame = answer.to_pandas()
    assert isinstance(frame, pd.DataFrame) and list(frame.columns) == names
    assert pl.DataFrame(answer).rows() == [tuple(row.values()) for row in answer.table.to_pylist()]
    assert answer.table["page"].to_pylist() == sorted(answer.table["page"].to_pylist())


#: A function, and its arguments.
GUARANTEED: list[tuple[str, dict[str, Any]]] = [
    ("histogram", {"key": "page", "epsilon": 2.0, "max_keys": 3}),
    ("histogram", {"key": "page", "epsilon": 1.23456789, "max_keys": 3}),
    ("histogram", {"key": "page", "epsilon": 2.0, "max_keys": 3, "delta": 0,
                   "public_keys": ["p0"]}),
    ("count", {"key": "page", "epsilon": 2.0, "max_keys": 3, "max_rows": 2,
               "public_keys": ["p0"]}),
    ("sum", {"value": "seconds", "bounds": (0, 99.5), "epsilon": 0.1, "max_rows": 5}),
    ("mean", {"value": "seconds", "bounds": (0, 80), "epsilon": 1.0, "max_rows": 5,
              "mechanism": "gaussian"}),
    ("keys", {"key": "page", "epsilon": 1.0, "max_keys": 1}),
]  # fmt: skip


def test_guarantees_say_what_of_a_unit_counts() -> None:
    """Figures are rounded up."""
    texts = {}
    for figure, given in GUARANTEED:
        answer = getattr(dpstream, figure)(TABLE, unit="user", **given)
        assert answer.charged is None and answer.epsilon == given["epsilon"]
        texts[f"{figure} {given}"] = f"{answer.guarantee}\n"
    check(HERE / "guarantees.txt", of_cases(texts))


def test_the_first_rows_are_shown_and_the_rest_counted() -> None:
    text = repr(dpstream.count(TABLE, unit="user", key="page", epsilon=1.0,
                                public_keys=[f"p{i}" for i in range(13)]))  # fmt: skip
    assert "... 3 more rows" in text and "count_noise_high" in text
    [line] = [line for line in text.splitlines() if line.split()[:1] == ["p0"]]
    assert len(line.split()) == 5
    empty = dpstream.mean(TABLE.slice(0, 0), unit="user", value="seconds", bounds=(0, 1), epsilon=1)
    assert repr(empty).splitlines()[-1].split() in (["–"] * 4, repr(empty).splitlines()[-1].split())


def test_nothing_is_printed_that_was_not_released() -> None:
    data = pa.table({"user": ["alice"], "page": ["secret"]})
    answer = dpstream.histogram(data, unit="user", key="page", epsilon=1.0)
    assert "alice" not in repr(answer) and "secret" not in repr(answer)


QUESTION: dict[str, Any] = {"unit": "user", "key": "page", "epsilon": 1.0}


def entries(folder: Path) -> list[Charge]:
    return accounts.charges(folder / "ledger.db")


def test_without_an_account_every_answer_has_noise_of_its_own() -> None:
    one, other = (dpstream.histogram(TABLE, **QUESTION, public_keys=["p0", "p1"]) for _ in range(2))
    assert one.charged is None and one.header.run_id != other.header.run_id
    assert one.table != other.table and "no account" in one.guarantee


def test_a_fixed_test_key_is_said(tmp_path: Path) -> None:
    paid = with_secret(account(tmp_path), SecretSource(None, KEY))
    answer = dpstream.histogram(TABLE, **QUESTION, **paid)
    assert answer.guarantee.startswith("NOT PRIVATE")


def test_automatic_bounds_are_released_and_cost_nothing_more(tmp_path: Path) -> None:
    paid = account(tmp_path)
    options = {**QUESTION, "epsilon": 20.0, "max_keys": 2}
    answer = dpstream.sum(TABLE, **options, **paid, value="seconds", bounds="auto")
    low, high = answer.header.bounds["sum"]
    assert low < high and answer.cuts["sum"].low == pytest.approx(low)
    assert len(entries(tmp_path)) == 1 and entries(tmp_path)[0].epsilon == 20.0
    few = TABLE.slice(0, 3)
    none = dpstream.mean(
        few, **QUESTION, **paid, value="seconds", bounds="auto", public_keys=["p0"]
    )
    assert none.table.column("mean").null_count == 1 and "missing" in none.guarantee


def test_receipts_hold_no_row_and_metadata_say_what_holds(tmp_path: Path) -> None:
    data = pa.table({"user": ["alice"] * 3, "page": ["of-alice-alone"] * 3})
    paid = account(tmp_path)
    (tmp_path / "ledger.db").unlink()
    accounts.create(tmp_path / "ledger.db", "visits", (100.0, 1e-5))
    answer = dpstream.histogram(data, **QUESTION, **paid)
    assert len(answer) == 0 and b"alice" not in answer.receipt
    metadata = answer.table.schema.metadata
    assert metadata[b"dpstream.guarantee"].decode() == answer.guarantee
    assert float(metadata[b"dpstream.epsilon"]) == answer.epsilon == 1.0
    written = b"".join(path.read_bytes() for path in tmp_path.glob("ledger*"))
    assert b"alice" not in written


ONE: dict[str, Any] = {
    "unit": "user", "key": "page", "public_keys": ["p0", "p1"], "max_keys": 1, "epsilon": 1.0,
}  # fmt: skip


def sds(plan: Any) -> dict[str, tuple[Any, int | None]]:
    """sd of the first part, and how many such questions the limit allows, by family."""
    return {
        row["mechanism"]: (row["columns"][0]["parts"][0]["sd"], row["questions"])
        for row in plan.families
    }


@pytest.mark.parametrize(
    ("given", "gaussian", "geometric"),
    [({}, 5.503, 1.357), ({"max_keys": 8}, 15.55, 11.31), ({"epsilon": 6.0}, 1.066, 0.0706)],
    ids=["one key", "eight keys", "epsilon 6"],
)
def test_without_an_account_the_answer_alone_is_compared(
    given: dict[str, Any], gaussian: float, geometric: float
) -> None:
    plan = dpstream.plan("histogram", TABLE, **ONE | given)
    assert sds(plan)["gaussian"] == (pytest.approx(gaussian, rel=1e-3), None)
    assert sds(plan)["geometric"] == (pytest.approx(geometric, rel=1e-3), None)
    assert plan.cost is not None and plan.cost["mu"] is None and plan.cost["delta"] == 0
    answer = dpstream.histogram(TABLE, **ONE | given)
    assert answer.table["units_sd"][0].as_py() == pytest.approx(geometric, rel=1e-3)
    assert answer.table.schema.metadata[b"dpstream.mechanism"] == b"geometric"
    assert answer.header.mu is None and answer.delta == 0


def test_a_family_that_is_asked_for_is_taken() -> None:
    for mechanism, sd in (("gaussian", 5.503), ("geometric", 1.357)):
        answer = dpstream.histogram(TABLE, **ONE, mechanism=mechanism)  # type: ignore[arg-type]
        assert answer.table["units_sd"][0].as_py() == pytest.approx(sd, rel=1e-3)
    # With keys of a unit that are chosen privately, one answer in fifty has few keys or none.
    selected = dpstream.count(
        TABLE, unit="user", key="page", max_keys=4, epsilon=4.0, mechanism="geometric"
    )
    assert selected.header.mu is None and selected.delta == 1e-9 and len(selected) > 3


def test_with_an_account_the_limit_is_shared(tmp_path: Path) -> None:
    paid = account(tmp_path, epsilon=8.0)
    plan = dpstream.plan("histogram", TABLE, **ONE, **paid)
    assert {name: row[1] for name, row in sds(plan).items()} == {"gaussian": 76, "geometric": 8}
    assert plan.cost is not None and plan.cost["mu"] is not None
    assert "76 such questions" in repr(plan) and "8 such questions" in repr(plan)
    answer = dpstream.histogram(TABLE, **ONE, **paid)
    assert answer.header.mu == plan.cost["mu"]
    after = dpstream.plan("histogram", TABLE, **ONE | {"epsilon": 1.5}, **paid)
    assert sds(dpstream.plan("histogram", TABLE, **ONE, **paid, fresh=True))["gaussian"][1] == 75
    assert after.accepted
    # Another way to choose is another question.
    alone = dpstream.histogram(TABLE, **ONE, **paid, optimise="answer")
    assert alone.charged and alone.header.mu is None
    assert alone.table["units_sd"][0].as_py() == pytest.approx(1.357, rel=1e-3)


def test_the_charge_fixes_the_family(tmp_path: Path) -> None:
    """What was cut off goes on with the noise that was charged, whatever a new one would take."""
    paid, large = account(tmp_path, epsilon=8.0), ONE | {"epsilon": 7.9, "max_keys": 8}
    with cut_off(module, "_drawn", 1, False), pytest.raises(CutOff):
        dpstream.histogram(TABLE, **large, **paid)
    account(tmp_path, epsilon=100.0)  # of which a question takes a small share
    for label, mechanism in (("later", "gaussian"), ("", "geometric")):
        plan = dpstream.plan("histogram", TABLE, **large, **paid, as_of=label)
        assert [row["mechanism"] for row in plan.families if row["taken"]] == [mechanism]
        assert plan.cost is not None and (plan.cost["mu"] is None) is (mechanism == "geometric")
        assert plan.accepted and (plan.charge is None) is (label == "")
    answer = dpstream.histogram(TABLE, **large, **paid)
    assert not answer.charged and answer.header.mu is None
    assert answer.table["units_sd"][0].as_py() == pytest.approx(1.3755, rel=1e-3)


OF_KEYS: dict[str, Any] = {"unit": "user", "key": "page", "epsilon": 1.0, "max_keys": 3}


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
    answer = dpstream.keys(table, **OF_KEYS)
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
    released_keys = len(dpstream.keys(table, **OF_KEYS | {"max_keys": 1, "delta": delta},
                              mechanism="gaussian"))  # fmt: skip
    expected = calibration.THETA * delta * size
    assert (abs(released_keys - expected) < 5 * math.sqrt(expected)) is holds


def test_a_plan_of_keys_and_their_account(tmp_path: Path) -> None:
    table, paid = visits(), account(tmp_path)
    plan = dpstream.plan("keys", table, **OF_KEYS, **paid)
    assert plan.accepted and plan.charge == (1.0, 1e-9) and plan.columns == []
    [threshold] = plan.thresholds
    of_figures = dpstream.plan("histogram", table, **OF_KEYS).thresholds[0]
    assert threshold["tau"] < of_figures["tau"]
    chosen = dpstream.plan("keys", table, **OF_KEYS | {"max_keys": None}).thresholds
    assert [one["groups"] for one in chosen] == [1, 256]
    assert accounts.charges(tmp_path / "ledger.db") == []
    first = dpstream.keys(table, **OF_KEYS, **paid)
    assert first.charged and len(first) > 3
    assert dpstream.plan("keys", table, **OF_KEYS, **paid).answered
    again = dpstream.keys(table.slice(0, 0), **OF_KEYS, **paid)
    assert not again.charged and again.table.equals(first.table)
    [charge] = accounts.charges(tmp_path / "ledger.db")
    assert charge.kind == "keys" and charge.epsilon == 1.0


def test_what_is_no_question_of_keys_is_refused(tmp_path: Path) -> None:
    data_set(tmp_path)
    texts = {
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
    calls: dict[str, Callable[[], object]] = {
        name: partial(answer_to, tmp_path, text) for name, text in texts.items()
    }
    for more in ({"key": None}, {"delta": 0.0}, {"epsilon": 0.0}, {"key": "user"}):
        calls[f"{more}"] = partial(dpstream.keys, visits(), **OF_KEYS | more)
    check(HERE / "keys.txt", of_refusals(calls))
    assert charges(tmp_path) == []


FIGURES: dict[str, Any] = {
    "count": True, "mean": ["seconds", "user"], "quantiles": "seconds", "at": (0.9, 0.5),
    "bounds": {"seconds": (0, 100), "user": (0, 400)},
}  # fmt: skip


def test_several_figures_are_one_answer_at_one_charge(tmp_path: Path) -> None:
    paid, given = account(tmp_path), {**QUESTION, "epsilon": 30.0, **FIGURES}
    answer = dpstream.aggregate(TABLE, **given, **paid)
    [charge] = entries(tmp_path)
    assert (charge.epsilon, charge.kind) == (30.0, "frame")
    figures = ["count", "mean_seconds", "mean_user", "q50_seconds", "q90_seconds"]
    assert [n for n in answer.table.column_names[1:] if "_sd" not in n and "_noise_" not in n] == (
        figures
    )
    other = given | {"mean": ("user", "seconds"), "at": [0.5, 0.9]}
    again = dpstream.aggregate(TABLE, **other, **paid)
    assert not again.charged and again.receipt == answer.receipt
    page = pc.equal(TABLE["page"], "p0")
    exact = np.quantile(TABLE.filter(page)["seconds"].to_numpy(), [0.5, 0.9])
    row = answer.table.to_pylist()[0]
    for name, value in zip(figures[3:], exact, strict=True):
        assert row[name] == pytest.approx(value, abs=25)
    assert dpstream.plan("aggregate", TABLE, **given, **paid).answered


def test_no_bounds_can_be_chosen_for_one_figure_alone() -> None:
    few = {**ONE, "bounds": {"seconds": (0, 100)}, "mean": ["seconds", "user"]}
    answer = dpstream.aggregate(TABLE.slice(0, 9), **few)
    assert answer.table["mean_user"].null_count == 2 and answer.header.nulls == ("mean_user",)
    assert "mean_user is missing" in answer.guarantee
    many = dpstream.aggregate(TABLE, unit="user", epsilon=60.0, count=True, quantiles="seconds")
    assert "rows of one user count for count," in many.guarantee


def test_means_that_are_mostly_noise_are_marked_and_counted() -> None:
    given: dict[str, Any] = {"value": "seconds", "bounds": (0, 100), "mechanism": "gaussian"}
    keys = ["p0", *(f"z{n}" for n in range(40))]  # of which one has rows
    answer = dpstream.mean(TABLE, **QUESTION | {"epsilon": 9.0}, **given, public_keys=keys)
    sds = answer.table["mean_sd"].to_pylist()
    noisy = [sd is not None and sd > 100 / 3 for sd in sds]
    assert 0 < sum(noisy) < len(sds)
    assert [" ?" in row for row in repr(answer).splitlines()[-11:-1]] == noisy[:10]
    assert f"{sum(noisy)} of {len(sds)} values of mean" in repr(answer)
    assert answer._repr_html_().count(" ?</td>") == sum(noisy[:10])


def test_what_a_notebook_shows_is_escaped() -> None:
    answer = dpstream.histogram(TABLE, **ONE | {"public_keys": ["<b>&"]})
    html = answer._repr_html_()
    assert "<td>&lt;b&gt;&amp;</td>" in html and "<b>" not in html
    assert "differential privacy" in html and html.count("<tr>") == 2


def test_a_picture_has_each_key_and_its_interval(refused: Refused) -> None:
    keys = [f"$p{n}" for n in range(60)]
    answer = dpstream.aggregate(TABLE, **QUESTION, public_keys=keys, count=True, units=True)
    axes = answer.plot("count")
    [line] = [line for line in axes.lines if line.get_marker() == "o"]
    largest = sorted(answer.table["count"].to_pylist())[-40:]
    assert sorted(line.get_xdata()) == largest and axes.get_xlabel() == "count"
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == [k for k in answer.table["page"].to_pylist() if k in labels]
    assert answer.plot(ax=axes) is axes
    refused(answer.plot, "counts")
    refused(dpstream.keys(TABLE, **QUESTION).plot)
    pyplot.close(axes.figure)
