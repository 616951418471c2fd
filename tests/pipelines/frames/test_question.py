"""Questions are checked, priced and planned before a row is looked at, and nothing is written.

In whatever order keys are named and listed, a question is charged and drawn once.
"""

import io
import itertools
import json
import math
import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import dpstream
from dpstream.accounting.errors import DpstreamError
from dpstream.accounting.query.calibration import mu_of_query
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.pipelines.operate.account_view import view
from dpstream.pipelines.sql.explain import explain
from dpstream.pipelines.sql.load import load_catalog
from tests import accounts
from tests.golden.pinned import check, of_refusals
from tests.golden.refusals import Refused
from tests.pipelines.frames.visits import (
    LIBRARIES,
    account,
    as_pandas,
    as_polars,
    question,
    visits,
    with_secret,
)
from tests.pipelines.sql import asking

HERE = Path(__file__).parent
TABLE = visits(200)
DAYS = TABLE.append_column("day", pa.array(["mon"] * 200))
SUM = {"kind": "sum", "value": "seconds", "bounds": (0, 100)}


REFUSED: list[dict[str, Any]] = [
        {"unit": "usr"}, {"unit": 7}, {"unit": "seconds"},
        {"key": "user"}, {"key": []}, {"key": ["page", "page"]},
        {"key": [f"k{i}" for i in range(9)]}, {"key": "seconds"},
        {"epsilon": 0}, {"epsilon": math.nan},
        {"epsilon": "1"}, {"epsilon": 1e9},
        {"epsilon": None}, {"delta": 1.0},
        {"delta": -1e-9}, {"delta": 0}, {"delta": math.nan},
        {"max_keys": 0}, {"max_keys": 1.5},
        {"max_keys": 5_000}, {"kind": "count", "max_rows": 0},
        {"public_keys": []}, {"public_keys": [1]},
        {"public_keys": "p1"}, {"public_keys": ["p1", None]},
        {"public_keys": [object()]}, {"public_keys": 3},
        {"public_keys": ["p1"], "key": None},
        {"public_keys": pa.table({"pag": ["a"]})},
        {**SUM, "value": None}, {**SUM, "value": "page"},
        {**SUM, "bounds": None}, {**SUM, "bounds": (1, 0)},
        {**SUM, "bounds": (0, math.inf)}, {**SUM, "bounds": "automatic"},
        {**SUM, "bounds": (1, 2, 3)}, {**SUM, "bounds": (0, 5e-324)},
        {**SUM, "bounds": (-1e308, 1e308)},
        {**SUM, "bounds": (1e15, 1e15 + 1)},
    {"key": ["page", "user"]}, {"key": ["page", "day"], "public_keys": ["p1"]},
    {"mechanism": "laplace"}, {"mechanism": None}, {"optimise": "both"}, {"optimise": "limit"},
    {"mechanism": "gaussian", "delta": 0, "public_keys": ["p1"]},
    *({**SUM, "whole_numbers": switch} for switch in ("no", 1, None)),
]  # fmt: skip


def test_each_mistake_names_its_argument() -> None:
    calls = {
        re.sub(" at 0x[0-9a-f]+", "", str(given)): partial(question, DAYS, **given)
        for given in REFUSED
    }
    called = visits(50).rename_columns(["user", "units_sd", "seconds"])
    calls["a key that is called as the answer"] = partial(question, called, key="units_sd")
    check(HERE / "questions.txt", of_refusals(calls))


def test_two_key_columns_take_a_table_of_public_keys() -> None:
    for listed in (pd.DataFrame, pl.DataFrame, pa.table):
        public = listed({"day": ["tue", "mon", "mon"], "page": ["p1", "p1", "p1"]})
        query, _ = question(DAYS, key=["page", "day"], public_keys=public)
        assert query.public is not None
        assert query.public.to_pylist() == [
            {"page": "p1", "day": "mon"}, {"page": "p1", "day": "tue"},
        ]  # fmt: skip


def test_lists_series_and_arrays_of_public_keys_are_one_question() -> None:
    listed = ["p2", "p1", "p2"]
    given = (listed, tuple(listed), pd.Series(listed), pl.Series(listed), pa.array(listed),
             pa.chunked_array([listed]), np.array(listed),
             pd.DataFrame({"page": listed}))  # fmt: skip
    digests = {question(TABLE, public_keys=keys)[0].digest for keys in given}
    assert len(digests) == 1 and question(TABLE)[0].digest not in digests
    assert question(TABLE, public_keys=["p1"])[0].digest not in digests


def test_the_digest_covers_every_argument() -> None:
    given: list[dict[str, Any]] = [
        {}, {"epsilon": 2.0}, {"delta": 1e-8}, {"max_keys": 3}, {"key": None}, {"kind": "count"},
        {"kind": "count", "max_rows": 2}, SUM, {**SUM, "bounds": (0, 99)}, {**SUM, "kind": "mean"},
        {**SUM, "bounds": "auto"}, {**SUM, "max_rows": 1}, {"unit": "page", "key": None},
    ]  # fmt: skip
    assert len({question(TABLE, **options)[0].digest for options in given}) == len(given)


def test_tables_of_different_libraries_are_one_question() -> None:
    digests = {question(t)[0].digest for t in (TABLE, as_pandas(TABLE), as_polars(TABLE))}
    assert len(digests) == 1


@pytest.mark.parametrize("kind", ["sum", "mean"])
@pytest.mark.parametrize("bounds", [(0, 3), "auto"])
def test_a_missing_number_makes_no_other_question(kind: str, bounds: Any) -> None:
    """pandas makes floats of a column of whole numbers for it: the grid would show that."""
    rows = "user,page,v\n" + "".join(f"u{n},p{n % 2},{n % 3}\n" for n in range(20))
    integers, floats = (pd.read_csv(io.StringIO(rows + more)) for more in ("", "victim,p1,\n"))
    assert integers["v"].dtype == np.int64 and floats["v"].dtype == np.float64
    given: dict[str, Any] = {"kind": kind, "value": "v", "bounds": bounds}
    one, other = (question(table, **given)[0] for table in (integers, floats))
    assert one == other and one.gridded.plan.columns[0].grid < 1
    declared = [question(t, **given, whole_numbers=True)[0] for t in (integers, floats)]
    assert declared[0] == declared[1]
    if kind == "sum" or bounds == "auto":
        assert declared[0].gridded.plan.columns[0].grid == 1
        assert declared[0].digest != one.digest


def test_whole_numbers_are_answered_whole() -> None:
    given: dict[str, Any] = {"unit": "user", "value": "seconds", "bounds": (0, 80), "epsilon": 1.0}
    answer = dpstream.sum(TABLE, **given, max_rows=2, whole_numbers=True)
    [value] = answer.table["sum"].to_pylist()
    assert value == int(value)
    plan = dpstream.plan("sum", TABLE, **given, whole_numbers=True)
    assert plan.accepted


def test_delta_of_0_is_pure() -> None:
    for given in ({"key": None}, {"public_keys": ["p1"]}):
        query, _ = question(TABLE, delta=0, **given)
        charge = query.charge("ab" * 16, query.identity("user"))
        assert (charge.mu, charge.delta, charge.threshold_delta) == (None, 0, 0)


def test_the_charge_is_the_plans() -> None:
    query, _ = question(TABLE)
    charge = query.charge("ab" * 16, query.identity("visitor"))
    mu, threshold = mu_of_query(query.gridded.plan)
    assert (charge.mu, charge.threshold_delta, charge.kind) == (mu, threshold, "frame")
    assert '"visitor"' in charge.identity and '"int"' in charge.identity


def test_no_column_is_looked_into() -> None:
    """Not even one that cannot be read as its type says."""
    broken = pa.Array.from_buffers(pa.string(), 2, [None, pa.py_buffer(np.array([0, 1, 2], "i4")),
                                                    pa.py_buffer(b"\xff\xfe")])  # fmt: skip
    assert question(pa.table({"user": [1, 2], "page": broken}))[0].kinds == ("string",)


BY_DAY = visits().append_column("day", pa.array([f"d{n % 3}" for n in range(3_000)]))
BY_DAY = BY_DAY.append_column("hour", pa.array([n % 2 for n in range(3_000)]))
KEY = ("page", "day", "hour")


def _cells(answer: Any, figure: str) -> dict[tuple[Any, ...], Any]:
    """By values of the key, in its fixed order, the figure with its interval."""
    names = [name for name in answer.table.column_names if name.startswith(figure)]
    return {
        tuple(row[name] for name in KEY): tuple(row[name] for name in names)
        for row in answer.table.to_pylist()
    }


def test_the_order_of_keys_is_no_part_of_the_question(tmp_path: Path) -> None:
    paid = account(tmp_path)
    arguments: dict[str, Any] = {"unit": "user", "epsilon": 8.0, "max_keys": 12, **paid}
    first = dpstream.count(BY_DAY, key=KEY, **arguments)
    assert first.charged and len(first) > 20
    for order in itertools.permutations(KEY):
        answer = dpstream.count(BY_DAY, key=list(order), **arguments)
        assert answer.receipt == first.receipt and (order == KEY) == (answer.table == first.table)
        assert answer.table.column_names[:3] == list(order)
        rows = [tuple(row.values())[:3] for row in answer.table.to_pylist()]
        assert rows == sorted(rows) and _cells(answer, "count") == _cells(first, "count")
    assert not dpstream.count(BY_DAY, key=KEY, **arguments).charged
    assert dpstream.count(BY_DAY, key=KEY[:2], **arguments).charged


def test_the_way_in_which_public_keys_are_given_is_no_part_of_the_question() -> None:
    rows = [{"page": f"p{n}", "day": "d1", "hour": n % 2} for n in range(6)]
    digests = set()
    for order in itertools.permutations(KEY):
        listed = [{name: row[name] for name in order} for row in (*rows[::-1], *rows)]
        for public in (pa.Table.from_pylist(listed), pd.DataFrame(listed), pl.DataFrame(listed)):
            digests.add(question(BY_DAY, key=list(order), public_keys=public)[0].digest)
    assert len(digests) == 1
    other = pa.Table.from_pylist(rows[1:])
    assert question(BY_DAY, key=list(KEY), public_keys=other)[0].digest not in digests


def test_numbers_are_what_they_are_however_they_are_written() -> None:
    given: dict[str, Any] = {"kind": "sum", "value": "seconds", "key": "page"}
    written = [
        question(BY_DAY, **given, bounds=bounds, epsilon=epsilon)[0].digest
        for bounds in ((0, 100), [0.0, 1e2], pa.array([0, 100]).to_numpy())
        for epsilon in (1, 1.0, pa.scalar(1.0).as_py())
    ]
    assert len(set(written)) == 1


def test_a_far_day_leaves_the_others_of_its_column_as_they_are() -> None:
    days = [19_756, 2**31 - 1, 3_789_548]
    rows = 900
    table = pa.table(
        {
            "user": list(range(rows)),
            "day": pa.array([days[n % 3] for n in range(rows)], pa.int32()).cast(pa.date32()),
        }
    )
    answer = dpstream.histogram(table, unit="user", key="day", epsilon=8.0)
    assert len(answer) == 3
    texts = [line.split()[0] for line in repr(answer).splitlines()[-3:]]
    assert texts == ["2024-02-03", "+12345-06-07", "infinity"]
    frame = answer.to_pandas()
    assert list(frame.columns) == answer.table.column_names
    assert [str(day) for day in frame["day"]] == texts
    near = answer.table.slice(0, 1)
    assert frame["units"].tolist()[:1] == near["units"].to_pylist()


PLANNED = visits()
QUESTION: dict[str, Any] = {"unit": "user", "key": "page", "epsilon": 1.0}
VALUE: dict[str, Any] = {"value": "seconds"}
FIGURES: dict[str, dict[str, Any]] = {"histogram": {}, "count": {}, "sum": VALUE, "mean": VALUE}


def files(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file below a folder: what it holds, and when it was last changed."""
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


def error_of(figure: str, data: Any, **given: Any) -> DpstreamError:
    with pytest.raises(DpstreamError) as error:
        getattr(dpstream, figure)(data, **given)
    return error.value


@pytest.mark.parametrize("figure", FIGURES)
def test_tables_of_other_rows_have_the_same_plan(figure: str, tmp_path: Path) -> None:
    paid = account(tmp_path)
    tables = [PLANNED, PLANNED.slice(1), PLANNED.slice(0, 1), PLANNED.slice(0, 0)]
    data = [LIBRARIES[name](table) for name in LIBRARIES for table in tables]
    plans = [dpstream.plan(figure, one, **QUESTION, **FIGURES[figure], **paid) for one in data]  # type: ignore[arg-type]
    assert plans[0].accepted and plans[0].charge == (1.0, 1e-9)
    assert all(one == plans[0] for one in plans)


def test_a_stream_is_still_there_for_the_question() -> None:
    stream = pa.RecordBatchReader.from_batches(PLANNED.schema, PLANNED.to_batches())
    assert dpstream.plan("count", stream, **QUESTION) == dpstream.plan("count", PLANNED, **QUESTION)
    assert stream.read_all().equals(PLANNED)


def test_nothing_is_written(tmp_path: Path) -> None:
    paid = account(tmp_path)
    new_account = dpstream.account(
        tmp_path / "new" / "l.db", "visits", id=accounts.ID, secret=paid["account"].secret
    )
    before = files(tmp_path)
    assert dpstream.plan("count", PLANNED, **QUESTION, **paid).accepted
    absent = dpstream.plan("count", PLANNED, **QUESTION, **{**paid, "account": new_account})
    assert not absent.accepted
    assert files(tmp_path) == before and not (tmp_path / "new").exists()
    dpstream.count(PLANNED, **QUESTION, **paid)
    before = files(tmp_path)
    for more in ({}, {"fresh": True}, {"as_of": "May"}, {"epsilon": 99.0}):
        dpstream.plan("count", PLANNED, **{**QUESTION, **paid, **more})
    assert files(tmp_path) == before


def test_what_was_answered_is_free_whatever_the_limit_is_now(tmp_path: Path) -> None:
    paid = account(tmp_path, epsilon=2.0)
    planned = dpstream.plan("count", PLANNED, **QUESTION, **paid)
    assert planned.account is not None and planned.left is not None and not planned.answered
    first = dpstream.count(PLANNED, **QUESTION, **paid)
    again = dpstream.plan("count", PLANNED.slice(0, 0), **QUESTION, **paid)
    assert again.answered and again.accepted and again.charge is None
    assert again.acceptance.run_id == first.header.run_id and again.account is not None
    assert again.account["used"] == pytest.approx(planned.account["with_this"])
    assert again.left == pytest.approx(planned.left) and again.cost == planned.cost
    for more in ({"fresh": True}, {"as_of": "May"}, {"max_keys": 3}):
        other = dpstream.plan("count", PLANNED, **QUESTION, **paid, **more)
        assert other.charge == (1.0, 1e-9) and not other.answered
    low = account(tmp_path, epsilon=0.1)
    assert dpstream.plan("count", PLANNED, **QUESTION, **low).answered
    assert dpstream.count(PLANNED, **QUESTION, **low).receipt == first.receipt
    assert not dpstream.plan("count", PLANNED, **QUESTION, **low, fresh=True).accepted


@pytest.mark.parametrize(
    "given",
    [
        {"epsilon": 9.0}, {"unit": "page", "key": None}, {"delta": 0.5}, {"delta": 0},
        {"secret": SecretSource()}, {"secret": SecretSource("file:none.key")}, {"account": "l.db"},
        {"as_of": "a\nb"}, {"unit": "usr"}, {"key": "user"}, {"max_keys": 0},
        {"epsilon": -1}, {"public_keys": []}, {"max_rows": "many"},
    ],
)  # fmt: skip
def test_the_refusal_is_that_of_the_question(given: dict[str, Any], tmp_path: Path) -> None:
    paid = account(tmp_path, epsilon=2.0)
    dpstream.histogram(PLANNED, **QUESTION, **paid)  # of unit "user"
    if "secret" in given:
        given = with_secret(paid, given["secret"])
    options, before = {**QUESTION, **paid, **given}, files(tmp_path)
    plan = dpstream.plan("count", PLANNED, **options)
    assert files(tmp_path) == before
    refusal, error = plan.refusal, error_of("count", PLANNED, **options)
    assert refusal is not None and not plan.accepted and plan.charge is None and plan.left is None
    assert type(refusal) is type(error) and refusal.as_dict() == error.as_dict()
    assert repr(plan).partition("\n")[0].startswith("Can ask     NO. ")
    assert json.loads(json.dumps(plan.as_dict()))["acceptance"]["refusal"] == error.as_dict()


def test_a_table_that_is_none_is_refused() -> None:
    for data in (None, [1], PLANNED["user"], LIBRARIES["polars"](PLANNED)["user"], open):
        plan, error = dpstream.plan("count", data, **QUESTION), error_of("count", data, **QUESTION)
        assert plan.refusal is not None and plan.refusal.as_dict() == error.as_dict()
        assert (plan.cost, plan.columns, plan.thresholds) == (None, [], [])


def test_what_would_be_typed_wrong_is_an_error(refused: Refused) -> None:
    # type: ignore[arg-type]
    refused(dpstream.plan, "median", PLANNED, **QUESTION)
    for given in ({"max_row": 3}, {"value": "seconds"}):
        with pytest.raises(TypeError):
            dpstream.plan("count", PLANNED, **QUESTION, **given)
    with pytest.raises(TypeError):
        dpstream.plan("count", PLANNED, unit="user")


def test_a_weak_guarantee_is_in_the_plan() -> None:
    with warnings.catch_warnings(record=True) as raised:
        plan = dpstream.plan("count", PLANNED, unit="user", epsilon=30.0)
    assert plan.accepted and len(plan.warnings) == 1 and not raised
    assert repr(plan).splitlines()[-1].startswith("Warning")


def test_noise_of_given_bounds_is_the_answers() -> None:
    """Exactly: sd and the half width of the interval."""
    given: dict[str, Any] = {**QUESTION, "max_keys": 3, "public_keys": ["p0", "p1"]}
    for figure, more in (("histogram", {}), ("count", {"max_rows": 2}),
                         ("sum", {**VALUE, "bounds": (0, 60), "max_rows": 2})):  # fmt: skip
        for delta in (0, 1e-9):
            options = {**given, **more, "delta": delta}
            [column] = dpstream.plan(figure, PLANNED, **options).columns  # type: ignore[arg-type]
            answer = getattr(dpstream, figure)(PLANNED, **options).table.to_pylist()[0]
            [part], name = column["parts"], column["name"]
            assert part["sd"] == answer[f"{name}_sd"] and part["times"] is None
            width = answer[f"{name}_noise_high"] - answer[f"{name}_noise_low"]
            assert part["within"] == pytest.approx(width / 2)


def test_noise_of_chosen_bounds_is_the_answers_times_what_was_chosen() -> None:
    rows = 4_000
    data = pa.table({"user": [i // 6 for i in range(6 * rows)],
                     "page": [i % 6 // 3 for i in range(6 * rows)]})  # fmt: skip
    options = {**QUESTION, "epsilon": 3.0}
    [column] = dpstream.plan("count", data, **options).columns
    [part] = column["parts"]
    answer = dpstream.count(data, **options)
    keys, high = answer.cuts["groups of a unit"].high, answer.cuts["count"].high
    assert part["times"] == "high * sqrt(keys)" and high > 1
    drawn = answer.table["count_sd"][0].as_py()
    assert part["sd"] * high * math.sqrt(keys) == pytest.approx(drawn, rel=0.01)


EQUIVALENT: dict[str, tuple[str, dict[str, Any]]] = {
    "COUNT(DISTINCT uid)": ("histogram", {}),
    asking.COUNTED: ("count", {"max_rows": 30}),
    "COUNT(*)": ("count", {}),
    "SUM(seconds)": ("sum", VALUE),
    "AVG(seconds)": ("mean", VALUE),
}


@pytest.mark.parametrize("item", EQUIVALENT)
def test_figures_are_those_of_the_statement(item: str, tmp_path: Path) -> None:
    catalog = load_catalog(asking.data_set(tmp_path))
    explanation = explain(catalog, asking.dp(f"page, {item} AS f"))
    [statement] = explanation.statements
    figure, given = EQUIVALENT[item]
    account = dpstream.account(
        tmp_path / "ledger.db", "shop", id=accounts.ID,
        secret=f"file:{tmp_path / 'noise.secret'}",
    )  # fmt: skip
    plan = dpstream.plan(
        figure, asking.visits(), unit="uid", key="page", epsilon=2.0, max_keys=12, **given,  # type: ignore[arg-type]
        account=account,
    )  # fmt: skip
    assert (plan.cost, plan.thresholds) == (statement.cost, [statement.selection])
    [one], [other] = plan.columns, statement.columns
    if item == "COUNT(*)":  # the statement's is NULL where the frame's has a default bound
        assert (one.pop("null_below"), other.pop("null_below") > 0) == (None, True)
    assert {**one, "name": "f"} == other
    assert plan.account == explanation.acceptance.account
    assert plan.charge == explanation.acceptance.cost
    dpstream.histogram(asking.visits(), unit="uid", key="page", epsilon=2.0, max_keys=12,
                       account=account)  # fmt: skip
    again = dpstream.plan("histogram", asking.visits(), unit="uid", key="page", epsilon=2.0,
                          max_keys=12, account=account)  # fmt: skip
    assert again.answered and again.left == view(catalog.ledger)["left"]


@pytest.mark.parametrize("figure", ["count", "mean"])
@pytest.mark.filterwarnings("ignore:Too few units")
def test_only_a_figure_that_can_be_missing_says_of_how_few_units(figure: str) -> None:
    """Few units leave a mean without a number, and a count with its default bound."""
    options = {"unit": "user", "epsilon": 1.0, **FIGURES[figure]}
    [column] = dpstream.plan(figure, PLANNED, **options).columns  # type: ignore[arg-type]
    few = visits(rows=60, users=20)
    [number] = getattr(dpstream, figure)(few, **options).table[figure].to_pylist()
    assert (column["null_below"] is None) == (figure == "count") == (number is not None)
    assert figure == "count" or column["null_below"] > 2 * 20
