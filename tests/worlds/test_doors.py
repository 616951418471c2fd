"""Every variant of a day says the same through every door: counts, units, times and sums by key."""

import itertools
import warnings
from collections import defaultdict
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import msgspec
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow.dataset import dataset

import dpstream
from dpstream.accounting.fields import Field
from dpstream.accounting.places import FILE_KINDS, file_kind
from dpstream.accounting.strength import WeakGuaranteeWarning
from dpstream.accounting.workloads.attributes import Attribute
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.pipelines.connectors.files.source import canonical_records
from dpstream.pipelines.connectors.files.types import check_types
from dpstream.pipelines.jobs.job import load_job
from dpstream.pipelines.jobs.keys import CellDomain
from dpstream.pipelines.session.config import load_config
from dpstream.pipelines.session.records.reading import Letters, files_of, records_of
from dpstream.pipelines.sql.explain import explain
from dpstream.pipelines.sql.load import load_catalog
from dpstream.pipelines.tables.engine import Engine
from dpstream.pipelines.workload.registered import bounded
from tests.worlds.fixtures import ROWS, SHOPS, VARIANTS, Variant, csv_of, instant_of, write

PROJECT = """\
version = 1

[data_set.day]
unit = {{ name = "who", type = "{unit}" }}
insecure_test_secret = "{secret}"
account = {{ path = "account.db", id = "0123456789abcdef" }}

[table.day]
path = "{path}"
unit_column = "{inside}user"
{table}

[job.daily]
table = "day"
key = ["{inside}shop"]
aggregate.records = {{ kind = "count" }}
start = "2024-03-01T00:00:00Z"
end = "2024-05-01T00:00:00Z"
window = "61 days"
release_every = "61 days"
budget = {{ epsilon = 1, delta = 1e-6, covers = "window" }}
contributions = 1000
sink = {{ kind = "parquet", path = "releases" }}

[job.daily.aggregate.amount]
kind = "sum"
column = "{inside}amount"
bounds = [-10000, 10000]
grid = 0.01
"""
TYPES = {"int": "INT64", "string": "STRING", "bytes": "BYTES"}
SESSION = """\
version = 1

[data_set.day]
insecure_test_secret = "{secret}"
account = {{ path = "account.db", id = "0123456789abcdef" }}

[table.day]
data_set = "day"
path = "{path}"
{table}

[table.day.dimension]
shop = {{ type = "category", values = {shops}, column = "{inside}shop" }}
amount = {{ type = "real", low = -10000, high = 10000, step = 100, column = "{inside}amount" }}
epsilon = {{ type = "budget", value = 1.0, most = 1.0, step = 0.5 }}

[table.day.dimension.at]
column = "{inside}at"
type = "timestamp"
low = "2024-03-01T00:00:00Z"
high = "2024-05-01T00:00:00Z"
step = "1 hour"
"""
SECRET = "0f" * 32
HOUR = 3_600_000_000


class Day(NamedTuple):
    """What a door has read, by key.

    Attributes:
        records: of each key; units: distinct ones; amount: sum in hundredths.
        times: micros of all records, sorted.
    """

    records: dict[str, int]
    units: dict[str, int]
    amount: dict[str, int]
    times: list[int]


def truth(variant: Variant) -> Day:
    by_shop = {shop: [row for row in ROWS if row.shop == shop] for shop in SHOPS}
    return Day(
        {shop: len(rows) for shop, rows in by_shop.items()},
        {shop: len({row.user for row in rows}) for shop, rows in by_shop.items()},
        {shop: int(sum(row.amount for row in rows) * 100) for shop, rows in by_shop.items()},
        sorted(instant_of(row, variant) for row in ROWS),
    )


def project(folder: Path, variant: Variant, text: str = PROJECT, table: str = "") -> Path:
    write(folder, variant)
    (folder / "dpstream.toml").write_text(
        text.format(
            unit=variant.unit, secret=SECRET, path=variant.name, table=f"{variant.table}\n{table}",
            shops=list(SHOPS), inside=variant.inside,
        )
    )  # fmt: skip
    return folder


def through_a_job(folder: Path, variant: Variant) -> Day:
    job = load_job(project(folder, variant))
    check_types(job)
    records, amount = defaultdict[str, int](int), defaultdict[str, int](int)
    units, times = defaultdict[str, set[bytes]](set), list[int]()
    for batch in canonical_records(job, job.plan, KeyRing(bytes.fromhex(SECRET))):
        rows = batch.to_pydict()
        times += rows["stamp"]
        shops = rows[f"{variant.inside}shop"]
        for shop, unit, value in zip(shops, rows["unit"], rows["v1"], strict=True):
            records[shop] += 1
            amount[shop] += value
            units[shop].add(bytes(unit))
    counted = {shop: len(of_shop) for shop, of_shop in units.items()}
    return Day(dict(records), counted, dict(amount), sorted(times))


def through_sql(folder: Path, variant: Variant) -> Day:
    kinds = {"user": TYPES[variant.unit], "shop": "STRING", "at": "TIMESTAMP", "amount": "NUMERIC"}
    columns = ", ".join(f"'{variant.inside}{name}' = '{kind}'" for name, kind in kinds.items())
    typed = f"columns = {{ {columns} }}" if is_text(variant.name) else ""
    user, shop, at, amount = (f'"{variant.inside}{name}"' for name in kinds)
    catalog = load_catalog(project(folder, variant, table=typed))
    with Engine(catalog, ["day"]) as engine:
        rows = engine.run(
            f"SELECT {shop} AS shop, COUNT(*) AS records, COUNT(DISTINCT {user}) AS units, "
            f"SUM(CAST({amount} AS DECIMAL(20, 2))) AS amount FROM day GROUP BY 1"
        ).to_pylist()
        times = list[int]()
        if catalog.tables["day"].columns[at.strip('"')] in ("TIMESTAMP", "DATETIME", "DATE"):
            instants = engine.run(f"SELECT EPOCH_US({at}::TIMESTAMP) AS t FROM day ORDER BY t")
            times = instants["t"].to_pylist()
    return Day(
        {row["shop"]: row["records"] for row in rows},
        {row["shop"]: row["units"] for row in rows},
        {row["shop"]: int(Decimal(row["amount"]) * 100) for row in rows},
        times,
    )


def is_text(name: str) -> bool:
    return not name.endswith(("parquet", "arrow", "orc"))


def through_a_workload(folder: Path, variant: Variant) -> dict[str, int]:
    """Records by key: the cells of a domain."""
    job = load_job(project(folder, variant, PROJECT.replace('"window"', '"lifetime"')))
    domain = CellDomain((Attribute("shop", SHOPS),), (Field(f"{variant.inside}shop"),))
    once = msgspec.structs.replace(job, plan=job.plan.once()).with_key(domain.key)
    codes = bounded(once, domain, KeyRing(bytes.fromhex(SECRET))).codes
    return {SHOPS[code]: int((codes == code).sum()) for code in np.unique(codes)}


def through_a_session(folder: Path, variant: Variant) -> tuple[dict[str, int], list[int]]:
    """Records by key, and the hours of their times."""
    config = load_config(project(folder, variant, SESSION))
    records, hours = defaultdict[str, int](int), list[int]()
    for part in records_of(config, files_of(config.records, "path"), None):
        assert not isinstance(part, Letters)
        assert part.usable.all()
        for shop, hour in part.at[:, [0, -1]].tolist():
            records[SHOPS[shop]] += 1
            hours.append(hour)
    return dict(records), sorted(hours)


LIBRARIES: dict[str, Callable[[Path], Any]] = {
    "arrow": pq.read_table,
    "data set": dataset,
    "reader": lambda path: dataset(path).scanner().to_reader(),
    "pandas": lambda path: pd.read_parquet(path, dtype_backend="pyarrow"),
    "polars": lambda path: pl.DataFrame(pq.read_table(path)),
    "duckdb": lambda path: duckdb.connect().from_parquet(str(path)),
}


def through_a_table(data: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Records and units by key of a question whose noise is less than a half."""
    with warnings.catch_warnings(action="ignore", category=WeakGuaranteeWarning):
        answer = dpstream.aggregate(
            data, unit="user", key="shop", epsilon=200, public_keys=list(SHOPS), max_keys=3,
            max_rows=9, units=True, count=True, mechanism="geometric",
        )  # fmt: skip
    rows = pa.table(answer).to_pylist()
    counts, units = ({row["shop"]: round(row[of]) for row in rows} for of in ("count", "units"))
    return counts, units


FLAT = [name for name, variant in VARIANTS.items() if "parquet" in name and not variant.inside]


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", FLAT)
def test_a_question_about_a_table_counts_the_day(name: str, library: str, tmp_path: Path) -> None:
    data = LIBRARIES[library](write(tmp_path, VARIANTS[name]))
    expected = truth(VARIANTS[name])
    assert through_a_table(data) == (expected.records, expected.units)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_job_reads_the_day(name: str, tmp_path: Path) -> None:
    assert through_a_job(tmp_path, VARIANTS[name]) == truth(VARIANTS[name])


#: What GoogleSQL types otherwise: numbers since 1970 stay numbers, local times are DATETIME.
OTHER_TIMES = ("seconds", "millis", "micros-", "local", "text")


@pytest.mark.parametrize("name", VARIANTS)
def test_sql_reads_the_day(name: str, tmp_path: Path) -> None:
    day, expected = through_sql(tmp_path, VARIANTS[name]), truth(VARIANTS[name])
    if not is_text(name) and any(form in name for form in OTHER_TIMES):
        expected = expected._replace(times=day.times)
    assert day == expected


_CAST = 'EPOCH_US(TRY_CAST("at" AS TIMESTAMPTZ))'


@pytest.mark.parametrize(
    ("time", "kind", "instant"),
    [
        ("german", "STRING", _CAST),
        ("seconds", "STRING", _CAST),
        ("seconds", "INT64", '"at" * 1000000'),
    ],
)
def test_sql_casts_a_time_to_its_instant(
    time: str, kind: str, instant: str, tmp_path: Path
) -> None:
    variant = csv_of(time=time)
    typed = f'columns = {{ user = "INT64", at = "{kind}" }}'
    with Engine(load_catalog(project(tmp_path, variant, table=typed)), ["day"]) as engine:
        times = engine.run(f"SELECT {instant} AS t FROM day ORDER BY t")["t"].to_pylist()
    assert times == truth(variant).times


@pytest.mark.parametrize(("kind", "is_told"), [("TIMESTAMP", True), ("DATE", False)])
def test_an_explanation_says_whose_days_they_are(kind: str, is_told: bool, tmp_path: Path) -> None:
    typed = f'columns = {{ user = "INT64", at = "{kind}" }}'
    catalog = load_catalog(project(tmp_path, csv_of(time="german"), table=typed))
    statement = (
        "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 1, delta = 1e-9, "
        "max_groups_contributed = 1) CAST(`at` AS DATE) AS d, COUNT(*) AS n FROM day GROUP BY d"
    )
    warnings = explain(catalog, statement).statements[0].warnings
    assert any("day.at" in warning for warning in warnings) == is_told


@pytest.mark.parametrize("name", VARIANTS)
def test_a_workload_reads_the_day(name: str, tmp_path: Path) -> None:
    assert through_a_workload(tmp_path, VARIANTS[name]) == truth(VARIANTS[name]).records


@pytest.mark.parametrize("name", VARIANTS)
def test_a_session_reads_the_day(name: str, tmp_path: Path) -> None:
    expected = truth(VARIANTS[name])
    records, hours = through_a_session(tmp_path, VARIANTS[name])
    start = np.datetime64("2024-03-01", "us").astype(np.int64)
    assert records == expected.records
    assert hours == [(time - start) // HOUR for time in expected.times]


def test_there_are_enough_variants() -> None:
    assert len(VARIANTS) >= 150
    forms = {file_kind(name) for name in VARIANTS}
    assert forms == {*FILE_KINDS}
    assert len(list(itertools.chain(ROWS))) == 96
