"""Each refusal's fix is typed, and the question is answered."""

from collections.abc import Callable
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import dpstream
from dpstream.accounting.errors import DpstreamError
from tests.pipelines.frames.visits import visits

TABLE = visits(300)
PANDAS, POLARS = TABLE.to_pandas(), pl.DataFrame(TABLE)
NUMBERED = PANDAS.set_axis(range(3), axis=1)
PERIODS = pd.Series(pd.period_range("2024-01", periods=3, freq="M").repeat(100))
TEXTS = ["1.5", "x", None] * 100
LARGE = [2**60 + number % 40 for number in range(300)]


def ask(data: Any, **given: Any) -> Any:
    arguments: dict[str, Any] = {"unit": "user", "key": "page", "epsilon": 1.0} | given
    value: dict[str, Any] = {"bounds": (0, 100)} if "value" in given else {}
    return (dpstream.sum if value else dpstream.histogram)(data, **arguments, **value)


def with_value(column: Any) -> pd.DataFrame:
    return PANDAS.assign(v=column)


#: What is asked, what its fix must name, and the question with it.
FIXES: dict[str, tuple[Callable[[], Any], str, Callable[[], Any]]] = {
    "a key of pandas that is a number": (
        lambda: ask(NUMBERED, unit="0", key=1), "key='1'",
        lambda: ask(NUMBERED, unit="0", key="1"),
    ),
    "a unit of pandas that is a number": (
        lambda: ask(NUMBERED, unit=0, key="1"), "unit='0'",
        lambda: ask(NUMBERED, unit="0", key="1"),
    ),
    "an index": (
        lambda: ask(PANDAS.set_index("page")), ".reset_index()",
        lambda: ask(PANDAS.set_index("page").reset_index()),
    ),
    "a wrong name": (
        lambda: ask(duckdb.from_arrow(TABLE), key="pag"), "'page'",
        lambda: ask(duckdb.from_arrow(TABLE), key="page"),
    ),
    "a relation that fails": (
        lambda: ask(duckdb.sql("SELECT 1 AS user, error('x') AS page")), "from_stream(data)",
        lambda: ask(duckdb.sql("SELECT 1 AS user, 'x' AS page")),
    ),
    "a lazy frame": (
        lambda: ask(POLARS.lazy()), "data.collect()", lambda: ask(POLARS.lazy().collect()),
    ),
    "a key of periods": (
        lambda: ask(PANDAS.assign(page=PERIODS)), ".astype(str)",
        lambda: ask(PANDAS.assign(page=PERIODS.astype(str))),
    ),
    "a key of periods in Arrow": (
        lambda: ask(pa.Table.from_pandas(PANDAS.assign(page=PERIODS))), "make it text",
        lambda: ask(PANDAS.assign(page=PERIODS.astype(str))),
    ),
    "booleans of pandas": (
        lambda: ask(with_value([True, None, False] * 100).astype({"v": "boolean"}), value="v"),
        ".astype('Int8')",
        lambda: ask(
            with_value([True, None, False] * 100).astype({"v": "boolean"}).astype({"v": "Int8"}),
            value="v",
        ),
    ),
    "booleans of Polars": (
        lambda: ask(POLARS.with_columns(v=pl.col("user") > 9), value="v"), ".cast(pl.Int8)",
        lambda: ask(POLARS.with_columns(v=(pl.col("user") > 9).cast(pl.Int8)), value="v"),
    ),
    "categories of Polars": (
        lambda: ask(POLARS.with_columns(v=pl.Series(TEXTS, dtype=pl.Categorical)), value="v"),
        ".cast(pl.String).cast(pl.Float64, strict=False)",
        lambda: ask(
            POLARS.with_columns(
                v=pl.Series(TEXTS, dtype=pl.Categorical)
                .cast(pl.String).cast(pl.Float64, strict=False)
            ),
            value="v",
        ),
    ),
    "categories of pandas": (
        lambda: ask(with_value(pd.Categorical(TEXTS)), value="v"),
        "pandas.to_numeric(column, errors='coerce')",
        lambda: ask(
            with_value(pd.to_numeric(pd.Series(pd.Categorical(TEXTS)), errors="coerce")), value="v"
        ),
    ),
    "objects of pandas": (
        lambda: ask(with_value(pd.Series([1, None, 2.5] * 100, dtype=object)), value="v"),
        ".astype('float')",
        lambda: ask(
            with_value(pd.Series([1, None, 2.5] * 100, dtype=object).astype("float")), value="v"
        ),
    ),
    "several types": (
        lambda: ask(PANDAS.assign(page=pd.Series([1, "a", b"b"] * 100, dtype=object))),
        ".astype('string')",
        lambda: ask(PANDAS.assign(page=pd.Series([1, "a", "b"] * 100).astype("string"))),
    ),
    "float ids": (
        lambda: ask(PANDAS.assign(user=np.array(LARGE, float))), "read it again as whole numbers",
        lambda: ask(PANDAS.assign(user=LARGE)),
    ),
    "small float ids": (
        lambda: ask(PANDAS.astype({"user": float})), ".astype('Int64')",
        lambda: ask(PANDAS.astype({"user": float}).astype({"user": "Int64"})),
    ),
    "small float ids of Polars": (
        lambda: ask(POLARS.cast({"user": pl.Float64})), ".cast(pl.Int64)",
        lambda: ask(POLARS.cast({"user": pl.Float64}).cast({"user": pl.Int64})),
    ),
    "lists": (
        lambda: ask(TABLE.to_pydict()), "pyarrow.table(",
        lambda: ask(pa.table(TABLE.to_pydict())),
    ),
    "no bounds": (
        lambda: dpstream.sum(TABLE, unit="user", value="seconds", epsilon=1.0, bounds=None),  # type: ignore[arg-type]
        "bounds='auto'",
        lambda: dpstream.sum(TABLE, unit="user", value="seconds", epsilon=1.0, bounds="auto"),
    ),
    "quantiles beyond 1": (
        lambda: dpstream.quantiles(TABLE, unit="user", value="seconds", epsilon=1.0, at=(25, 50)),
        "at=(0.25, 0.5, 0.75)",
        lambda: dpstream.quantiles(
            TABLE, unit="user", value="seconds", epsilon=1.0, at=(0.25, 0.5, 0.75)
        ),
    ),
    "no figures": (
        lambda: dpstream.aggregate(TABLE, unit="user", epsilon=1.0), "count=True",
        lambda: dpstream.aggregate(TABLE, unit="user", epsilon=1.0, count=True),
    ),
    "bounds of no figure": (
        lambda: dpstream.aggregate(
            TABLE, unit="user", epsilon=1.0, count=True, bounds={"seconds": (0, 9)}
        ),
        "sum, mean",
        lambda: dpstream.aggregate(
            TABLE, unit="user", epsilon=1.0, count=True, sum="seconds", bounds={"seconds": (0, 9)}
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FIXES)
def test_the_fix_works_when_it_is_applied(name: str) -> None:
    wrong, named, fixed = FIXES[name]
    with pytest.raises(DpstreamError) as refusal:
        wrong()
    assert named in refusal.value.fix
    assert fixed().epsilon == 1.0


def test_large_ids_stay_different() -> None:
    """As floats 40 of them are one."""
    answer = dpstream.histogram(
        PANDAS.assign(user=LARGE), unit="user", key="page", epsilon=50.0, public_keys=["p0"],
        max_keys=10,
    )  # fmt: skip
    exact = len({u for u, p in zip(LARGE, TABLE["page"].to_pylist(), strict=True) if p == "p0"})
    assert abs(answer.table["units"][0].as_py() - exact) < 10 < exact
