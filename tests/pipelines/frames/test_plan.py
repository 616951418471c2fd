"""The dry run of a figure: what the function then does, of no row, and with nothing written."""

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import dpstream
from dpstream.accounting.errors import DpstreamError, UsageError
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.pipelines.frames import answer as module
from dpstream.pipelines.sql.explain import budget, explain
from dpstream.pipelines.sql.load import load_catalog
from tests import accounts
from tests.pipelines.frames.visits import LIBRARIES, account, visits, with_secret
from tests.pipelines.sql import asking
from tests.pipelines.stream.test_begin import CutOff, cut_off

TABLE = visits()
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
    tables = [TABLE, TABLE.slice(1), TABLE.slice(0, 1), TABLE.slice(0, 0)]
    data = [LIBRARIES[name](table) for name in LIBRARIES for table in tables]
    plans = [dpstream.plan(figure, one, **QUESTION, **FIGURES[figure], **paid) for one in data]  # type: ignore[arg-type]
    assert plans[0].accepted and plans[0].charge == (1.0, 1e-9)
    assert all(one == plans[0] for one in plans)


def test_a_stream_is_still_there_for_the_question() -> None:
    stream = pa.RecordBatchReader.from_batches(TABLE.schema, TABLE.to_batches())
    assert dpstream.plan("count", stream, **QUESTION) == dpstream.plan("count", TABLE, **QUESTION)
    assert stream.read_all().equals(TABLE)


def test_nothing_is_written(tmp_path: Path) -> None:
    paid = account(tmp_path)
    new_account = dpstream.account(
        tmp_path / "new" / "l.db", "visits", id=accounts.ID, secret=paid["account"].secret
    )
    before = files(tmp_path)
    assert dpstream.plan("count", TABLE, **QUESTION, **paid).accepted
    absent = dpstream.plan("count", TABLE, **QUESTION, **{**paid, "account": new_account})
    assert not absent.accepted
    assert files(tmp_path) == before and not (tmp_path / "new").exists()
    dpstream.count(TABLE, **QUESTION, **paid)
    before = files(tmp_path)
    for more in ({}, {"fresh": True}, {"as_of": "May"}, {"epsilon": 99.0}):
        dpstream.plan("count", TABLE, **{**QUESTION, **paid, **more})
    assert files(tmp_path) == before


def test_what_was_answered_is_free_whatever_the_limit_is_now(tmp_path: Path) -> None:
    paid = account(tmp_path, epsilon=2.0)
    planned = dpstream.plan("count", TABLE, **QUESTION, **paid)
    assert planned.account is not None and planned.left is not None and not planned.answered
    first = dpstream.count(TABLE, **QUESTION, **paid)
    again = dpstream.plan("count", TABLE.slice(0, 0), **QUESTION, **paid)
    assert again.answered and again.accepted and again.charge is None
    assert again.acceptance.run_id == first.header.run_id and again.account is not None
    assert again.account["used"] == pytest.approx(planned.account["with_this"])
    assert again.left == pytest.approx(planned.left) and again.cost == planned.cost
    for more in ({"fresh": True}, {"as_of": "May"}, {"max_keys": 3}):
        other = dpstream.plan("count", TABLE, **QUESTION, **paid, **more)
        assert other.charge == (1.0, 1e-9) and not other.answered
    low = account(tmp_path, epsilon=0.1)
    assert dpstream.plan("count", TABLE, **QUESTION, **low).answered
    assert dpstream.count(TABLE, **QUESTION, **low).receipt == first.receipt
    assert not dpstream.plan("count", TABLE, **QUESTION, **low, fresh=True).accepted


def test_what_was_cut_off_goes_on_at_no_charge(tmp_path: Path) -> None:
    paid = account(tmp_path)
    with cut_off(module, "_drawn", 1, False), pytest.raises(CutOff):
        dpstream.count(TABLE, **QUESTION, **paid)
    for fresh in (False, True):
        plan = dpstream.plan("count", TABLE, **QUESTION, **paid, fresh=fresh)
        assert plan.accepted and plan.charge is None and not plan.answered
    assert dpstream.count(TABLE, **QUESTION, **paid, fresh=True).charged is False


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
    dpstream.histogram(TABLE, **QUESTION, **paid)  # of unit "user"
    if "secret" in given:
        given = with_secret(paid, given["secret"])
    options, before = {**QUESTION, **paid, **given}, files(tmp_path)
    plan = dpstream.plan("count", TABLE, **options)
    assert files(tmp_path) == before
    refusal, error = plan.refusal, error_of("count", TABLE, **options)
    assert refusal is not None and not plan.accepted and plan.charge is None and plan.left is None
    assert type(refusal) is type(error) and refusal.as_dict() == error.as_dict()
    assert repr(plan).partition("\n")[0].startswith("Can ask     NO. ")
    assert json.loads(json.dumps(plan.as_dict()))["acceptance"]["refusal"] == error.as_dict()


def test_a_table_that_is_none_is_refused() -> None:
    for data in (None, [1], TABLE["user"], LIBRARIES["polars"](TABLE)["user"], open):
        plan, error = dpstream.plan("count", data, **QUESTION), error_of("count", data, **QUESTION)
        assert plan.refusal is not None and plan.refusal.as_dict() == error.as_dict()
        assert (plan.cost, plan.columns, plan.thresholds) == (None, [], [])


def test_what_would_be_typed_wrong_is_an_error() -> None:
    with pytest.raises(UsageError) as error:
        dpstream.plan("median", TABLE, **QUESTION)  # type: ignore[arg-type]
    assert error.value.field == "figure" and "'count'" in error.value.fix
    for given in ({"max_row": 3}, {"value": "seconds"}):
        with pytest.raises(TypeError):
            dpstream.plan("count", TABLE, **QUESTION, **given)
    with pytest.raises(TypeError):
        dpstream.plan("count", TABLE, unit="user")


def test_a_weak_guarantee_is_in_the_plan() -> None:
    with warnings.catch_warnings(record=True) as raised:
        plan = dpstream.plan("count", TABLE, unit="user", epsilon=30.0)
    assert plan.accepted and len(plan.warnings) == 1 and not raised
    assert repr(plan).splitlines()[-1].startswith("Warning")


def test_noise_of_given_bounds_is_the_answers() -> None:
    """Exactly: sd and the half width of the interval."""
    given: dict[str, Any] = {**QUESTION, "max_keys": 3, "public_keys": ["p0", "p1"]}
    for figure, more in (("histogram", {}), ("count", {"max_rows": 2}),
                         ("sum", {**VALUE, "bounds": (0, 60), "max_rows": 2})):  # fmt: skip
        for delta in (0, 1e-9):
            options = {**given, **more, "delta": delta}
            [column] = dpstream.plan(figure, TABLE, **options).columns  # type: ignore[arg-type]
            answer = getattr(dpstream, figure)(TABLE, **options).table.to_pylist()[0]
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
    assert again.answered and again.left == budget(catalog)["left"]


@pytest.mark.parametrize("figure", ["count", "mean"])
@pytest.mark.filterwarnings("ignore:Too few units")
def test_only_a_figure_that_can_be_missing_says_of_how_few_units(figure: str) -> None:
    """Few units leave a mean without a number, and a count with its default bound."""
    options = {"unit": "user", "epsilon": 1.0, **FIGURES[figure]}
    [column] = dpstream.plan(figure, TABLE, **options).columns  # type: ignore[arg-type]
    few = visits(rows=60, users=20)
    [number] = getattr(dpstream, figure)(few, **options).table[figure].to_pylist()
    assert (column["null_below"] is None) == (figure == "count") == (number is not None)
    assert figure == "count" or column["null_below"] > 2 * 20
