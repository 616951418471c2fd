"""Questions are checked and priced before a row is looked at."""

import io
import math
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import dpstream
from dpstream.accounting.errors import DpstreamError, PolicyError, UsageError
from dpstream.accounting.query.calibration import mu_of_query
from tests.pipelines.frames.visits import as_pandas, as_polars, question, visits

TABLE = visits(200)
SUM = {"kind": "sum", "value": "seconds", "bounds": (0, 100)}


def refused(**given: Any) -> DpstreamError:
    with pytest.raises(DpstreamError) as error:
        question(TABLE, **given)
    return error.value


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"unit": "usr"}, "unit"), ({"unit": 7}, "unit"), ({"unit": "seconds"}, "unit"),
        ({"key": "user"}, "key"), ({"key": []}, "key"), ({"key": ["page", "page"]}, "key"),
        ({"key": [f"k{i}" for i in range(9)]}, "key"), ({"key": "seconds"}, "key"),
        ({"epsilon": 0}, "epsilon"), ({"epsilon": math.nan}, "epsilon"),
        ({"epsilon": "1"}, "epsilon"), ({"epsilon": 1e9}, "epsilon"),
        ({"epsilon": None}, "epsilon"), ({"delta": 1.0}, "delta"),
        ({"delta": -1e-9}, "delta"), ({"delta": 0}, "delta"), ({"delta": math.nan}, "delta"),
        ({"max_keys": 0}, "max_keys"), ({"max_keys": 1.5}, "max_keys"),
        ({"max_keys": 5_000}, "max_keys"), ({"kind": "count", "max_rows": 0}, "max_rows"),
        ({"public_keys": []}, "public_keys"), ({"public_keys": [1]}, "public_keys"),
        ({"public_keys": "p1"}, "public_keys"), ({"public_keys": ["p1", None]}, "public_keys"),
        ({"public_keys": [object()]}, "public_keys"), ({"public_keys": 3}, "public_keys"),
        ({"public_keys": ["p1"], "key": None}, "public_keys"),
        ({"public_keys": pa.table({"pag": ["a"]})}, "public_keys"),
        ({**SUM, "value": None}, "value"), ({**SUM, "value": "page"}, "value"),
        ({**SUM, "bounds": None}, "bounds"), ({**SUM, "bounds": (1, 0)}, "bounds"),
        ({**SUM, "bounds": (0, math.inf)}, "bounds"), ({**SUM, "bounds": "automatic"}, "bounds"),
        ({**SUM, "bounds": (1, 2, 3)}, "bounds"), ({**SUM, "bounds": (0, 5e-324)}, "bounds"),
        ({**SUM, "bounds": (-1e308, 1e308)}, "bounds"),
        ({**SUM, "bounds": (1e15, 1e15 + 1)}, "bounds"),
    ],
)  # fmt: skip
def test_each_mistake_names_its_argument(given: dict[str, Any], field: str) -> None:
    error = refused(**given)
    assert error.field == field and error.fix


def test_the_key_is_not_the_unit() -> None:
    assert isinstance(refused(key=["page", "user"]), PolicyError)


def test_a_key_is_not_called_as_the_answer() -> None:
    data = visits(50).rename_columns(["user", "units_sd", "seconds"])
    with pytest.raises(UsageError, match="rename the column"):
        question(data, key="units_sd")


def test_two_key_columns_take_a_table_of_public_keys() -> None:
    data = TABLE.append_column("day", pa.array(["mon"] * 200))
    for listed in (pd.DataFrame, pl.DataFrame, pa.table):
        public = listed({"day": ["tue", "mon", "mon"], "page": ["p1", "p1", "p1"]})
        query, _ = question(data, key=["page", "day"], public_keys=public)
        assert query.public is not None
        assert query.public.to_pylist() == [
            {"page": "p1", "day": "mon"}, {"page": "p1", "day": "tue"},
        ]  # fmt: skip
    with pytest.raises(UsageError, match="columns day, page"):
        question(data, key=["page", "day"], public_keys=["p1"])


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
    assert one == other and (one.column is not None and one.column.grid < 1)
    declared = [question(t, **given, whole_numbers=True)[0] for t in (integers, floats)]
    assert declared[0] == declared[1]
    if kind == "sum" or bounds == "auto":
        assert declared[0].column is not None and declared[0].column.grid == 1
        assert declared[0].digest != one.digest


def test_whole_numbers_are_declared_by_a_switch() -> None:
    given: dict[str, Any] = {"unit": "user", "value": "seconds", "bounds": (0, 80), "epsilon": 1.0}
    for switch in ("no", 1, None):
        with pytest.raises(UsageError, match="whole_numbers"):
            dpstream.sum(TABLE, **given | {"whole_numbers": switch})


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
    assert "public_keys" in refused(delta=0).fix


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
    assert question(pa.table({"user": [1, 2], "page": broken}))[0].kinds == ("int", "string")
