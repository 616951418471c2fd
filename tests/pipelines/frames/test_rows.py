"""Columns of whatever table somebody has become partials as SQL makes them.

What a row is depends on it alone.  An error says what to do and quotes no value.
"""

import datetime
import decimal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from msgspec.structs import replace

from dpstream.accounting.errors import UsageError
from dpstream.accounting.query.plan import QueryPlan
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.one_shot import aggregated, bounded
from dpstream.dp_transforms.one_shot.groups import Groups
from dpstream.dp_transforms.one_shot.partials import MAX_PARTIALS, histograms
from dpstream.pipelines.frames import rows as module
from dpstream.pipelines.frames.question import Figure
from dpstream.pipelines.frames.rows import Rows, histogram_values, partials_of, rows_of
from dpstream.pipelines.frames.table import check_numbers, columns_of, id_kind_of
from dpstream.pipelines.sql.load import load_catalog
from dpstream.pipelines.sql.query_plan import question_of as statement_of
from dpstream.pipelines.sql.work import Work
from dpstream.pipelines.tables.engine import Engine
from tests.golden.pinned import check, of_refusals, refusal
from tests.golden.refusals import Refused
from tests.pipelines.frames.visits import LIBRARIES, as_pandas, as_polars, question, ring, visits
from tests.pipelines.sql.asking import data_set, dp
from tests.pipelines.sql.asking import visits as shop_visits

HERE = Path(__file__).parent
NAME = (b"r" * 16, b"digest")
OPTIONS = "epsilon = 1, delta = 1e-9, max_groups_contributed = 3, max_rows_contributed = 2"
#: What is asked of a table, and what a statement calls it.
PAIRS: dict[str, tuple[dict[str, Any], str]] = {
    "units": ({"kind": "units"}, "COUNT(DISTINCT uid) AS units"),
    "count": (
        {"kind": "count"}, "COUNT(*, contribution_bounds_per_group => (0, 2)) AS count"
    ),
    "sum": (
        {"kind": "sum", "value": "seconds", "bounds": (5, 60)},
        "SUM(seconds, contribution_bounds_per_row => (5, 60)) AS sum",
    ),
    "whole": (
        {"kind": "sum", "value": "n", "bounds": (-2, 5)},
        "SUM(n, contribution_bounds_per_row => (-2, 5)) AS sum",
    ),
    "mean": (
        {"kind": "mean", "value": "seconds", "bounds": (0, 80)},
        "AVG(seconds, contribution_bounds_per_row => (0, 80)) AS mean",
    ),
    "quantiles": (
        {"kind": "quantiles", "value": "seconds", "bounds": (0, 80), "at": (0, 0.5, 1)},
        "APPROX_QUANTILES(seconds, 2, contribution_bounds_per_row => (0, 80)) AS quantiles",
    ),
}  # fmt: skip
#: Figures of one question, of a table in which seconds are missing.
SEVERAL: dict[str, Figure] = {
    "units": Figure("units"),
    "count": Figure("count"),
    "sum_n": Figure("sum", "n", (-2, 5)),
    "mean_seconds": Figure("mean", "seconds", (0, 80)),
    "quantiles_seconds": Figure("quantiles", "seconds", (0, 80), at=(0, 0.5, 1)),
}


def made(data: Any, keys: KeyRing | None = None, **given: Any) -> Rows:
    query, columns = question(data, **given)
    return rows_of(query, columns, ring() if keys is None else keys)


def totals(plan: QueryPlan, rows: Any, groups: Groups, ring: KeyRing) -> dict[str, list[int]]:
    shard, size = bounded(plan, rows, ring, NAME), len(groups.ids)
    partials = aggregated(shard, size)
    assert groups.values is not None
    names = groups.values.column(0).to_pylist()
    listed = [c for c in plan.columns if c.kind == "quantiles"]
    trees = [histograms([shard], column, np.arange(size), size) for column in listed]
    sums = [partials.units, *(partials.sums[i] for i in sorted(partials.sums))]
    return dict(zip(names, np.column_stack([*sums, *trees]).tolist(), strict=True))


@pytest.mark.parametrize("name", PAIRS)
def test_sums_are_those_of_the_statement(name: str, tmp_path: Path) -> None:
    """One key ring and run: the same sample of groups, the same partials, DuckDB or numpy."""
    data = shop_visits()
    data = data.filter(pa.compute.is_valid(data["seconds"]))
    _agree(data, data_set(tmp_path, data), *PAIRS[name])


def test_several_figures_are_those_of_one_statement(tmp_path: Path) -> None:
    """A row without a value counts in the figures of others."""
    data = shop_visits()
    items = ", ".join(PAIRS[name][1] for name in ("units", "count", "whole", "mean", "quantiles"))
    for kind, name in (("sum", "sum_n"), ("mean", "mean_seconds"), ("quantiles",) * 2):
        items = items.replace(f"AS {kind}", f"AS {name}")
    assert data["seconds"].null_count
    _agree(data, data_set(tmp_path, data), {"figures": SEVERAL}, f"{items}_seconds")


def test_an_empty_unit_is_none_here_and_in_a_statement(tmp_path: Path) -> None:
    data = shop_visits()
    uid = pa.array([str(unit) if unit % 3 else "" for unit in data["uid"].to_pylist()])
    data = data.set_column(0, "uid", uid)
    path = data_set(tmp_path, data)
    path.write_text(path.read_text().replace('type = "int"', 'type = "string"'))
    _agree(data, path, *PAIRS["units"])


def _agree(data: pa.Table, project: Path, given: dict[str, Any], items: str) -> None:
    keys = ring()
    query, columns = question(data, unit="uid", max_keys=3, max_rows=2, **given)
    rows = rows_of(query, columns, keys)
    plan = query.gridded.plan
    catalog = load_catalog(project)
    statement = statement_of(dp(f"page, {items}", options=OPTIONS), catalog)
    labels = {column: label for label, column in statement.names.items()}
    theirs = tuple(replace(c, name=labels[c.name]) for c in statement.plan.columns)
    ordered = sorted(plan.columns, key=theirs.index)  # theirs are ours
    plan = replace(plan, columns=tuple(ordered))
    assert replace(statement.plan, columns=theirs) == plan
    work = Work.of(statement.per_column, catalog, statement.plan, NAME)
    with Engine(catalog, {"visits"}) as engine:
        groups = work.initial_groups(engine, keys)
        partials = work.partials(engine.run(work.stage_one()), groups, keys)
    rows_of_quantiles = {labels[name]: rows for name, rows in partials.rows.items()}
    partials = partials._replace(rows=rows_of_quantiles)
    ours = totals(plan, partials_of(plan, rows), rows.groups, keys)
    assert totals(plan, partials, groups, keys) == ours


def test_rows_without_a_unit_a_key_or_a_value_count_nowhere() -> None:
    data = pa.table({
        "user": ["a", None, "c", "", "e", "f"],
        "page": ["p", "p", None, "p", "p", "q"],
        "seconds": [1.0, 1.0, 1.0, 1.0, float("nan"), float("inf")],
    })  # fmt: skip
    rows = made(data, kind="sum", value="seconds", bounds=(0, 9))
    assert rows.group.tolist() == [0] and rows.values["sum"].number.tolist() == [1.0]
    assert len(made(data).unit) == 3


def test_two_spellings_of_a_text_are_one_unit_and_one_key() -> None:
    data = pa.table({"user": ["e\u0301", "\u00e9", "x"], "page": ["\u00e9", "e\u0301", "y"]})
    rows = made(data)
    assert len(set(rows.unit.tolist())) == 2 and len(rows.groups.ids) == 2


def test_public_keys_are_all_keys() -> None:
    rows = made(visits(500), public_keys=["p1", "zz"])
    assert rows.groups.values is not None
    assert rows.groups.values.column(0).to_pylist() == ["p1", "zz"]
    assert set(rows.group.tolist()) == {0}


LAYOUTS: dict[str, Any] = {
    "view": lambda t: pa.array(t, pa.string_view()),
    "large": lambda t: pa.array(t, pa.large_string()),
    "coded": lambda t: pa.array(t).dictionary_encode(), "pandas": pd.Series,
    "category": lambda t: pd.Series(t, dtype="category"), "polars": pl.Series,
    "categorical": lambda t: pl.Series(t, dtype=pl.Categorical),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_a_column_are_one_column(layout: str) -> None:
    texts = ["b", "a", None, "b"]
    plain = pa.table({"user": [1, 2, 3, 4], "page": texts})
    page = LAYOUTS[layout](texts)
    data: Any = pa.table({"user": [1, 2, 3, 4], "page": page}) if isinstance(page, pa.Array) else (
        pd.DataFrame({"user": [1, 2, 3, 4], "page": page}) if layout in ("pandas", "category")
        else pl.DataFrame({"user": [1, 2, 3, 4], "page": page})
    )  # fmt: skip
    keys = ring()
    one, other = made(data, keys), made(plain, keys)
    assert (one.unit_ids[one.unit] == other.unit_ids[other.unit]).all()
    assert (one.groups.ids[one.group] == other.groups.ids[other.group]).all()


@pytest.mark.parametrize("kind", [pa.large_binary(), pa.binary_view(), pa.binary(2)], ids=str)
def test_layouts_of_bytes_are_one_column(kind: pa.DataType) -> None:
    pages, keys = [b"bb", b"a\xff", None, b"bb"], ring()
    plain = made(pa.table({"user": [1, 2, 3, 4], "page": pages}), keys)
    other = made(pa.table({"user": [1, 2, 3, 4], "page": pa.array(pages, kind)}), keys)
    assert (other.groups.ids[other.group] == plain.groups.ids[plain.group]).all()


def test_both_zeros_are_one_value() -> None:
    """Equal rows have the same digest, and so the same noise."""
    data = {"user": [1, 2], "page": ["a", "a"], "seconds": [0.0, -0.0]}
    rows = made(pa.table(data), kind="sum", value="seconds", bounds=(-1, 1))
    assert not np.signbit(rows.values["sum"].number).any()


@pytest.mark.parametrize(
    "key",
    [
        [3, 4, None, 3], [True, False, None, True], [b"x", b"y", None, b"x"],
        [datetime.date(2024, 1, 1), datetime.date(1960, 1, 1), None, datetime.date(2024, 1, 1)],
        [datetime.datetime(2024, 1, 1), datetime.datetime(1960, 1, 1), None,
         datetime.datetime(2024, 1, 1)],
        [decimal.Decimal("1.5"), decimal.Decimal("-2"), None, decimal.Decimal("1.50")],
    ],
    ids=lambda key: type(key[0]).__name__,
)  # fmt: skip
def test_kinds_of_keys(key: list[Any]) -> None:
    rows = made(pa.table({"user": [1, 2, 3, 4], "page": key}))
    assert rows.group.tolist() == [0, 1, 0]


def test_a_mean_of_many_rows_is_scaled_to_as_many_as_count() -> None:
    data = pa.table(
        {"user": [1] * 10, "page": ["a"] * 10, "seconds": [float(i) for i in range(10)]}
    )
    query, columns = question(data, kind="mean", value="seconds", bounds=(0, 16), max_rows=2)
    plan = query.gridded.plan
    partials = partials_of(plan, rows_of(query, columns, ring()))
    total, number = (int(column[0]) for column in partials.sums)
    assert number == 2
    assert total * plan.columns[0].grid / number + 8 == pytest.approx(4.5, abs=1e-3)


def test_huge_values_do_not_wrap() -> None:
    data = pa.table({"user": [1] * 4, "page": ["a"] * 4, "seconds": [1e308, 1e308, -1e308, 5e-324]})
    for kind in ("sum", "mean"):
        query, columns = question(data, kind=kind, value="seconds", bounds=(0, 1))
        [total, *_] = partials_of(query.gridded.plan, rows_of(query, columns, ring())).sums
        assert 0 <= abs(int(total.sum())) <= 5 / query.gridded.plan.columns[0].grid
        query, columns = question(data, kind=kind, value="seconds", bounds="auto")
        wide = histogram_values(
            kind, query.gridded.plan.columns[0], rows_of(query, columns, ring())
        )
        assert len(wide.value) == 1 and abs(int(wide.value[0])) <= 1 << 32


def test_no_rows_are_rows() -> None:
    for key in (None, "page"):
        rows = made(visits(10).slice(0, 0), key=key)
        assert len(rows.unit) == 0 and len(rows.groups.ids) == (key is None)


def test_too_many_rows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_PARTIALS == 1 << 30
    monkeypatch.setattr(module, "MAX_PARTIALS", 9)
    assert refusal(made, visits(10)) == "UsageError data"


SECRET = "alice@example.org"


@pytest.mark.parametrize("library", LIBRARIES)
def test_columns_of_each_library_are_the_same(library: str) -> None:
    table = visits()
    columns = columns_of(LIBRARIES[library](table), {"unit": ["user"], "key": ["page"]})
    assert list(columns) == ["user", "page"]
    assert columns["user"].to_pylist() == table.column("user").to_pylist()
    assert columns["page"].cast(pa.string()).to_pylist() == table.column("page").to_pylist()


@pytest.mark.parametrize("library", LIBRARIES)
def test_parts_of_structs_have_paths(library: str) -> None:
    """A column that is called as a path is written wins; pandas' frames have columns alone."""
    table = visits(40)
    structs = table.append_column("at.page", table["user"]).to_struct_array().combine_chunks()
    nested = pa.table({"a.b": table["page"], "a": structs, "b": structs})
    named = {"unit": ["a.b"], "key": ["b.page", "a.at.page"]}
    if library == "pandas":
        with pytest.raises(UsageError) as error:
            columns_of(LIBRARIES[library](nested), named)
        assert ".struct.field(" in error.value.fix
        return
    columns = [
        column.to_pylist() for column in columns_of(LIBRARIES[library](nested), named).values()
    ]
    assert columns == [table[name].to_pylist() for name in ("page", "page", "user")]


def test_other_columns_are_not_looked_at() -> None:
    data = as_pandas(visits(100)).assign(what=[object()] * 100)
    data.index = pd.Index([object() for _ in range(100)])
    assert len(columns_of(data, {"key": ["page"]})["page"]) == 100
    of_polars = as_polars(visits(100)).with_columns(what=pl.lit(1, pl.Int128))  # unknown to Arrow
    assert len(columns_of(of_polars, {"key": ["page"]})["page"]) == 100
    with pytest.raises(UsageError):
        columns_of(of_polars, {"key": ["what"]})


def test_batches_readers_and_streams_are_tables() -> None:
    table = visits(50)
    [batch] = table.combine_chunks().to_batches()
    for data in (
        batch,
        table.to_reader(),
        pa.RecordBatchReader.from_batches(table.schema, [batch]),
    ):
        assert columns_of(data, {"key": ["page"]})["page"].to_pylist() == table["page"].to_pylist()


def test_tables_and_columns_that_are_refused() -> None:
    """No value is quoted, nor a name of a column that may be one."""
    private = pd.DataFrame({"user": [SECRET, "b"], "page": [SECRET, "c"], "n": [1, 2]})
    pivoted = private.pivot_table(index="user", columns="page", values="n")
    mixed = pd.DataFrame({"user": [1, SECRET], "page": ["a", "b"]})
    addresses = pl.DataFrame({"user": [1], "page": pl.Series([object()], dtype=pl.Object)})
    numbered = pd.DataFrame([[1, "a", 2]], columns=["user", "page", 7])
    tables: dict[str, tuple[Any, str]] = {
        "a path": ("visits.csv", "user"), "nothing": (None, "user"),
        "a dict": ({"user": [1]}, "user"), "a list": ([1], "user"),
        "a lazy frame": (as_polars(visits(5)).lazy(), "user"),
        "a column of pandas": (as_pandas(visits(5))["user"], "user"),
        "a column of Polars": (pl.Series([1]), "user"), "an array": (pa.array([1]), "user"),
        **{f"a wrong name, {name}": (LIBRARIES[name](visits(5)), "pag") for name in LIBRARIES},
        "a pivoted table": (pivoted, "user"), "several types": (mixed, "user"),
        "a column twice": (pd.DataFrame([[1, 2]], columns=["user", "user"]), "user"),
        "objects of Polars": (addresses, "page"), "a name that is no text": (numbered, "x"),
    }  # fmt: skip
    calls: dict[str, Callable[[], object]] = {
        name: partial(columns_of, data, {"unit": [column]})
        for name, (data, column) in tables.items()
    }
    kinds = [pa.float64(), pa.struct([(SECRET, pa.int8())])]
    calls |= {f"identities of kind {k.id}": partial(id_kind_of, "key", k) for k in kinds}
    numbers = [pa.string(), pa.bool_(), pa.timestamp("s")]
    calls |= {f"numbers of kind {k}": partial(check_numbers, "value", k) for k in numbers}
    text = of_refusals(calls)
    assert SECRET not in text and "0x" not in text
    check(HERE / "tables.txt", text)
    for kind in (pa.int8(), pa.float32(), pa.decimal128(5, 1), pa.null()):
        check_numbers("value", kind)


def test_values_of_several_types_are_refused_without_being_quoted(refused: Refused) -> None:
    data = pd.DataFrame({"user": [1, SECRET], "page": ["a", "b"]})
    error = refused(columns_of, data, {"unit": ["user"], "key": ["page"]})
    assert error.field == "unit" and SECRET not in str(error)
    assert error.__context__ is None or SECRET not in str(error.__context__)


@pytest.mark.parametrize(
    "other",
    [b"b", decimal.Decimal("1E+40"), datetime.date(2024, 1, 1), 7, 2.5, True, SECRET.encode()],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["object", "category"])
def test_a_row_of_a_pandas_column_of_objects_does_not_decide_its_type(
    other: Any, dtype: str, refused: Refused
) -> None:
    """Bytes among texts would make bytes of all, whose spellings are not made one."""
    texts = ["a", "e\u0301", None]
    data = pd.DataFrame({"user": pd.Series(texts, dtype="object").astype(dtype)})
    columns = columns_of(data, {"unit": ["user"]})
    assert columns["user"].cast(pa.string()).to_pylist() == texts
    alone = [[other], [other, None]] if dtype == "object" else []  # pandas types its categories
    for values in ([*texts, other], [other, *texts], *alone):
        data = pd.DataFrame({"user": pd.Series(values, dtype="object").astype(dtype)})
        error = refused(columns_of, data, {"unit": ["user"]})
        assert error.field == "unit" and SECRET not in str(error)


@pytest.mark.parametrize(
    ("kind", "identity_type"),
    [
        (pa.string(), "string"), (pa.large_string(), "string"), (pa.string_view(), "string"),
        (pa.null(), "string"), (pa.dictionary(pa.int32(), pa.string()), "string"),
        (pa.binary(4), "bytes"), (pa.uint8(), "int"), (pa.bool_(), "bool"), (pa.date32(), "date"),
        (pa.timestamp("ns", "UTC"), "timestamp"), (pa.decimal128(9, 2), "decimal"),
    ],
)  # fmt: skip
def test_kinds_of_identities(kind: pa.DataType, identity_type: str) -> None:
    assert id_kind_of("key", kind) == identity_type


def test_polars_kinds() -> None:
    data = pl.DataFrame({
        "day": [datetime.date(2024, 1, 1)], "sum": [decimal.Decimal("1.5")], "ok": [True],
    })  # fmt: skip
    columns = columns_of(data, {"key": ["day", "sum", "ok"]})
    assert [id_kind_of("key", columns[name].type) for name in data.columns] == [
        "date",
        "decimal",
        "bool",
    ]
