"""From rows of stage 1 to the answer: partials, sums through files, the pipeline of a runner.

Sums go through a file as they are, and meet others' by the value of their group.
"""

import copy
import pickle
import secrets
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dpstream.accounting.plan.unit import UnitIdentity
from dpstream.dp_transforms.batches import ArrowBatchCoder
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.dp_transforms.one_shot import Bounded, Totals
from dpstream.dp_transforms.one_shot.groups import Groups
from dpstream.pipelines.project.sections import Via
from dpstream.pipelines.runners.bounded import Runner
from dpstream.pipelines.sql import flow
from dpstream.pipelines.sql.flow import Own, Owners, Task, ToKey, build, unit_of
from dpstream.pipelines.sql.load import catalog_of, load_catalog
from dpstream.pipelines.sql.query_plan import question_of
from dpstream.pipelines.sql.stage import Spread
from dpstream.pipelines.sql.work import (
    Work,
    place_of,
    read_sums,
    write_sums,
)
from dpstream.pipelines.tables.catalog import Catalog
from tests import projects
from tests.golden.pinned import check, of_refusals, refusal
from tests.golden.refusals import Refused
from tests.pipelines.sql.asking import ALL, COUNTED, KEY, OPTIONS, answer_to, data_set, dp
from tests.pipelines.sql.shop import SHOP, database, of_units, shop, ugly_rows
from tests.pipelines.sql.test_spread import DIRECT, JOINED, company
from tests.pipelines.test_coders import UNPICKLED, parts_of


def test_shards_and_kinds_of_files_change_no_byte_of_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under one run id (a fixed one), 1 and 5 turns of units and three formats agree."""
    tables = []
    text = dp(ALL + ", STDDEV(n, contribution_bounds_per_row => (-3, 8)) AS d, SUM(n) AS x, "
              "MAX(seconds) AS hi") + " ORDER BY page"  # fmt: skip
    text = text.replace("max_groups_contributed = 12", "max_groups_contributed = 4")
    text = text.replace("epsilon = 2", "epsilon = 60")
    monkeypatch.setattr(secrets, "token_hex", lambda size: "5a" * size)
    for kind, shards in (("parquet", 1), ("parquet", 5), ("csv", 1), ("jsonl", 3)):
        folder = tmp_path / f"{kind}{shards}"
        folder.mkdir()
        data_set(folder, kind=kind)
        tables.append(answer_to(folder, text, shards=shards))
    assert tables[0].header.bounds.keys() == {"x", "hi"} and tables[0].table.num_rows >= 6
    first = tables[0].table.drop_columns([])
    assert all(answer.table.equals(first) for answer in tables[1:2])
    # Another catalog is another question: noise differs, the columns do not.
    assert all(answer.table.schema == first.schema for answer in tables[2:])


def test_outer_parts_work_on_released_columns(tmp_path: Path) -> None:
    data_set(tmp_path)
    inner = dp(f"page, {COUNTED} AS n", options=OPTIONS.replace("= 2", "= 60"))
    text = (
        f"SELECT t.title, r.page, r.n, r.n / 2 AS h FROM ({inner}) AS r "
        "JOIN pages AS t ON r.page = t.page WHERE r.n > 10 ORDER BY r.n DESC LIMIT 3"
    )
    answer = answer_to(tmp_path, text)
    rows = answer.table.to_pylist()
    assert [row["page"] for row in rows] == ["p0", "p1", "p2"]
    assert all(row["h"] == row["n"] / 2 for row in rows) and rows[1]["title"] == "Title 1"
    assert set(answer.intervals) == {"n"}
    sorted_n = [row["n"] for row in rows]
    assert sorted_n == sorted(sorted_n, reverse=True)


_LAPLACE = "epsilon = 20, delta = 1e-9, max_groups_contributed = 2, mechanism = GEOMETRIC"
_PUBLIC = OPTIONS + ", group_selection_strategy = PUBLIC_GROUPS"
_ROWS = "(SELECT * FROM visits WHERE {where}) AS v"
#: Statements of every kind, on some rows or on none.
_EMPTIED = {
    "no groups": dp("SUM(n) AS s, MIN(seconds) AS lo, COUNT(DISTINCT uid) AS u", f"FROM {_ROWS}",
                    "epsilon = 2, delta = 1e-9"),
    "thresholds": dp(f"page, seconds > 1 AS late, {COUNTED} AS n, COUNT(DISTINCT uid) AS u",
                     f"FROM {_ROWS} GROUP BY page, late"),
    "every function": dp(
        "page, SUM(seconds WITH REPORT, contribution_bounds_per_group => (0, 9)) AS s, "
        "AVG(seconds, contribution_bounds_per_row => (0, 9)) AS a, "
        "STDDEV(seconds, contribution_bounds_per_row => (0, 9)) AS d, "
        "MEDIAN(seconds, contribution_bounds_per_row => (0, 9)) AS m, "
        "APPROX_QUANTILES(seconds, 4, contribution_bounds_per_row => (0, 9)) AS q",
        f"FROM {_ROWS} GROUP BY page HAVING s > 1 ORDER BY page LIMIT 3"),
    "bounds": dp("page, SUM(seconds) AS s, MAX(seconds) AS hi, AVG(n) AS a",
                 f"FROM {_ROWS} GROUP BY page"),
    "geometric": dp(f"page, {COUNTED} AS n, COUNT(DISTINCT uid) AS u",
                  f"FROM {_ROWS} GROUP BY page", _LAPLACE),
    "laplace bounds": dp("page, SUM(n) AS s, COUNT(DISTINCT uid) AS u",
                         f"FROM {_ROWS} GROUP BY page", _LAPLACE),
    "a norm": dp(f"page, {COUNTED} AS n", f"FROM {_ROWS} GROUP BY page",
                 "epsilon = 2, delta = 1e-9, contribution_norm = 4"),
    "public groups": dp("p.page, MEDIAN(v.seconds, contribution_bounds_per_row => (0, 9)) AS m",
                        f"FROM {_ROWS} RIGHT JOIN (SELECT DISTINCT page FROM pages) AS p "
                        "ON v.page = p.page GROUP BY p.page", _PUBLIC),
    "no public groups": dp(f"p.page, {COUNTED} AS n",
                           f"FROM {_ROWS} RIGHT JOIN (SELECT DISTINCT page FROM pages "
                           "WHERE title = 'none') AS p ON v.page = p.page GROUP BY p.page",
                           _PUBLIC),
}  # fmt: skip


@pytest.mark.parametrize("kind", _EMPTIED)
def test_a_relation_without_rows_is_answered_as_any_other(kind: str, tmp_path: Path) -> None:
    """An error would tell whether the one row is there that a condition asks for."""
    data_set(tmp_path, epsilon=1e3)
    text = _EMPTIED[kind]
    full = answer_to(tmp_path, text.format(where="uid >= 0"), shards=2)
    none = answer_to(tmp_path, text.format(where="uid = -1"), shards=2)
    assert none.table.schema == full.table.schema
    assert {name: table.schema for name, table in none.intervals.items()} == {
        name: table.schema for name, table in full.intervals.items()
    }
    if kind in ("thresholds", "every function", "no public groups"):
        assert none.table.num_rows == 0


def test_nor_do_workers_fail_without_a_row(tmp_path: Path) -> None:
    data_set(tmp_path)
    text = _EMPTIED["every function"].format(where="uid = -1")
    answer = answer_to(tmp_path, text, runner=Runner("DirectRunner"), shards=2)
    assert answer.table.num_rows == 0 and "page" in answer.table.column_names


@pytest.mark.parametrize(
    "order",
    ["CAST(page AS INT64)", "1 / (n - n)", "EXP(1e9 * n)", "page", "1", "n * 9e307 * 10 DESC",
     "LOG(n - n, 0)", "CAST(CAST(page AS DATE) AS STRING), n DESC"],
)  # fmt: skip
def test_an_order_that_fails_is_no_order(order: str, tmp_path: Path) -> None:
    """After the charge nothing may fail: what was paid for is seen."""
    data_set(tmp_path)
    options = OPTIONS.replace("= 2", "= 60")
    inner = dp(f"page, {COUNTED} AS n", options=options)
    assert answer_to(tmp_path, f"{inner} ORDER BY {order}").table.num_rows >= 6
    outside = f"SELECT r.page, r.n FROM ({inner}) AS r ORDER BY {order}"
    assert answer_to(tmp_path, outside).table.num_rows >= 6


def test_an_outer_query_that_groups_is_ordered(tmp_path: Path) -> None:
    data_set(tmp_path)
    inner = dp(f"page, {COUNTED} AS n", options=OPTIONS.replace("= 2", "= 60"))
    text = (
        f"SELECT t.title, SUM(r.n) AS n FROM ({inner}) AS r JOIN pages AS t ON r.page = t.page "
        "GROUP BY t.title ORDER BY "
    )
    orders = ("n DESC", "SUM(r.n) DESC", "CAST(t.title AS INT64), n DESC")
    tables = {order: answer_to(tmp_path, text + order).table.to_pylist() for order in orders}
    rows = tables["n DESC"]
    assert [row["n"] for row in rows] == sorted((row["n"] for row in rows), reverse=True)
    assert {row["title"] for row in rows} == {"Title 0", "Title 1", "Title 2"}
    assert [len(rows) for rows in tables.values()] == [3, 3, 3]


_TEXT = (
    "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 1, delta = 1e-9, "
    "max_groups_contributed = 4) page, COUNT(*) AS n, "
    "MEDIAN(seconds, contribution_bounds_per_row => (0, 9)) AS m FROM visits "
    "WHERE page <> ' GROUP BY \"unit\"' GROUP BY page"
)


def test_turns_of_units_are_all_rows_once() -> None:
    question = question_of(_TEXT, shop())
    work = Work.of(question.per_column, shop(), question.plan, (b"run", b"question"), wide=True)
    connection = database(shop(), ugly_rows(3))
    all_rows = connection.sql(work.stage_one()).fetchall()
    turns = [connection.sql(work.stage_one(3, i)).fetchall() for i in range(3)]
    assert sorted(map(str, all_rows)) == sorted(str(row) for rows in turns for row in rows)
    units = [{row[0] for row in rows} for rows in turns]
    assert len(all_rows) > 10 and all(units) and sum(map(len, units)) == len(set.union(*units))
    subset_rows = database(shop(), of_units(ugly_rows(3), {1, 2})).sql(work.stage_one()).fetchall()
    assert sorted(map(str, subset_rows)) == sorted(str(row) for row in all_rows if row[0] in (1, 2))


NONE = np.zeros(0, np.int64)


@pytest.fixture
def ring() -> KeyRing:
    return KeyRing(bytearray.fromhex(KEY))


def groups(ring: KeyRing, *names: str | None) -> Groups:
    page_groups = Groups(["page"], ["string"], ring.key)
    if names:
        page_groups.codes([pa.chunked_array([pa.array(names, pa.string())])])
    return page_groups


def sums(*units: int) -> Totals:
    unit_counts = np.array(units, np.int64)
    return Totals(unit_counts, 7 * unit_counts, {0: -unit_counts, 3: unit_counts << 40})


def rows(group: int, value: int) -> Bounded:
    one = np.array([0]), np.array([value]), np.array([5])
    return Bounded(NONE, np.array([group]), NONE, {}, {"m": one})


def test_shards_meet_by_group(tmp_path: Path, ring: KeyRing) -> None:
    write_sums(place_of(tmp_path, 0), groups(ring, "b", None), sums(3, 4), rows(1, 9))
    write_sums(place_of(tmp_path, 1), groups(ring, None, "a", "b"), sums(10, 20, 30), rows(2, 8))
    write_sums(place_of(tmp_path, 2), groups(ring), sums(), rows(0, 0)._replace(
        rows={"m": (NONE, NONE, NONE)}))  # fmt: skip
    assert stat.S_IMODE(place_of(tmp_path, 0).stat().st_mode) == 0o600
    page_groups = groups(ring)
    shards = list(read_sums(tmp_path, 3, page_groups, ["m"]))
    total = shards[0][0].plus(shards[1][0]).plus(shards[2][0])
    assert page_groups.values is not None and page_groups.values["page"].to_pylist() == [
        "b",
        None,
        "a",
    ]
    assert total.units.tolist() == [33, 14, 20] and total.weighted.tolist() == [231, 98, 140]
    assert total.sums[0].tolist() == [-33, -14, -20] and total.sums[3][0] == 33 << 40
    at, value, weight = shards[1][1].rows["m"]
    assert shards[1][1].group[at].tolist() == [0] and (value[0], weight[0]) == (8, 5)


@pytest.mark.parametrize("what", ["missing", "cut", "empty"])
def test_what_is_not_there_is_an_error(what: str, tmp_path: Path, ring: KeyRing) -> None:
    path = place_of(tmp_path, 0)
    write_sums(path, groups(ring, "b"), sums(3), rows(0, 9))
    if what == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: 100 if what == "cut" else 0])
    assert refusal(list, read_sums(tmp_path, 1, groups(ring), ["m"])) == "RunError runner"


#: What Beam's reshuffle keeps beside each element: its time stamp.
_STAMPS = "/ReshufflePerKey/"


def task_of(folder: Path) -> tuple[Task, list[Any]]:
    """The task of a statement on a chain of keys."""
    path = company(folder)
    path.write_text(path.read_text().replace('path = "pages.csv"', 'path = "pages.csv"\n# secret'))
    catalog = load_catalog(path)
    question = question_of(JOINED, catalog)
    spread = Spread(DIRECT, question, catalog, 4)
    work = Work.of(question.per_column, catalog, question.plan, (b"run", question.digest.encode()))
    keys = catalog.secret.of_run("5a" * 16, "")
    task = Task(work, None, spread._catalog, spread._columns, (), 4, str(folder), keys)
    return task, spread._pieces


def coders(task: Task, pieces: list[Any]) -> dict[str, list[Any]]:
    """Of each collection, by its producer, all coders in its coder."""
    pipeline = beam.Pipeline()
    build(pipeline, task, pieces)
    proto, context = pipeline.to_runner_api(return_context=True)
    out = {}
    for transform in proto.components.transforms.values():
        for name in transform.outputs.values():
            if not transform.subtransforms and _STAMPS not in transform.unique_name:
                coder = context.coders.get_by_id(proto.components.pcollections[name].coder_id)
                out[transform.unique_name] = list(parts_of(coder))
    return out


def test_no_row_is_pickled_between_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task, pieces = task_of(tmp_path)
    coder_parts = coders(task, pieces)
    for stage in ("Read", "Own", "Key", "Both", "Owners", "ToShard", "All", "ByShard"):
        here = [
            parts for name, parts in coder_parts.items() if name.split("/")[0].startswith(stage)
        ]
        assert here and all(any(isinstance(p, ArrowBatchCoder) for p in parts) for parts in here)

    def strange(coder_parts: dict[str, list[Any]]) -> list[str]:
        return [
            n
            for n, parts in coder_parts.items()
            if not all(isinstance(p, UNPICKLED) for p in parts)
        ]

    assert strange(coder_parts) == []
    monkeypatch.setattr(flow, "Routed", Any)
    assert strange(coders(task, pieces))  # a lost type is found


def test_neither_key_nor_database_is_in_the_pipeline(tmp_path: Path) -> None:
    task, pieces = task_of(tmp_path)
    pipeline = beam.Pipeline()
    build(pipeline, task, pieces)
    proto = pipeline.to_runner_api().SerializeToString() + pickle.dumps(task)
    assert KEY.encode() not in proto and bytes.fromhex(KEY) not in proto
    assert set(task.catalog.tables) == {"people", "orders", "items", "pages"}
    assert not task.catalog.secret.given
    assert list(task.columns) == ["people", "orders", "items"]  # who owns others comes first
    assert task.columns["people"] == ("uid", "code") and "day" in task.columns["orders"]


def test_rows_get_the_shard_of_whoever_owns_them(tmp_path: Path) -> None:
    """By keys on the way, or by the unit itself: every row of a unit is on one shard."""
    task, _ = task_of(tmp_path)
    assert unit_of(task.catalog.tables["people"]) == "uid"
    assert unit_of(task.catalog.tables["items"]) is None
    task = task._replace(keys=SecretSource(f"file:{tmp_path}/noise.secret"))
    people = pa.RecordBatch.from_pydict(
        {"uid": pa.array([1, 2, None, 3], pa.int64()), "code": ["a", "b", "c", None]}
    )
    orders = pa.RecordBatch.from_pydict(
        {"id": pa.array(range(6)), "person": ["b", "a", "c", None, "x", "a"]}
    )
    own, up = Own(task, "uid"), ToKey(task, 0, "people", ("code",))
    down = ToKey(task, 1, "orders", ("person",))
    for stage in (own, up, down):
        stage.setup()
    [routed] = own.process(people)
    assert routed.column("uid").to_pylist() == [1, 2, 3]
    buckets: dict[int, list[Any]] = {}
    for stage, rows in ((up, routed), (down, orders)):
        for bucket, pair in stage.process(rows):
            buckets.setdefault(bucket, []).append(pair)
    owned_rows = [row for met in buckets.items() for batch in Owners().process(met)
             for row in batch.to_pylist()]  # fmt: skip
    shard = dict(zip(routed.column("uid").to_pylist(), routed.column(flow._SHARD).to_pylist(),
                     strict=True))  # fmt: skip
    assert sorted((row["id"], row[flow._SHARD]) for row in owned_rows) == [
        (0, shard[2]), (1, shard[1]), (5, shard[1]),
    ]  # fmt: skip
    for stage in (own, up, down):
        stage.teardown()


# A data set of the project file: one unit, tables that say who owns their rows.


CATALOG_TEXT = """
version = 1
[data_set.shop]
unit = { name = "Customer", type = "int" }
account = { path = "ledger.db", id = "0acc0acc0acc0acc" }
[data_set.other]
unit = { name = "dog" }
[table.Customers]
data_set = "shop"
path = "customers/*.parquet"
unit_column = "ID"
[table.orders]
data_set = "shop"
uri = "sqlite:///shop.db"
remote = "Orders"
columns = { order_id = "INT64", customer_id = "int64", price = "NUMERIC" }
unit_via = { table = "customers", on = [["customer_id", "id"]] }
[table.countries]
path = "countries.txt"
format = "csv"
columns = { code = "STRING" }
public = true
[table.live]
data_set = "shop"
folder = "live"
format = "parquet"
unit_column = "ID"
time_column = "at"
[table.dogs]
data_set = "other"
path = "dogs.csv"
unit_column = "dog"
columns = { dog = "STRING" }
"""


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "customers").mkdir()
    table = pa.table({"ID": pa.array([1], pa.int32()), "Name": ["x"], "tags": [["a"]]})
    pq.write_table(table, tmp_path / "customers" / "1.parquet")
    (tmp_path / "dpstream.toml").write_text(CATALOG_TEXT)
    catalog = load_catalog(tmp_path, "shop")
    assert catalog.unit == UnitIdentity("Customer", "int") and catalog.unit.period is None
    assert catalog.ledger.path == str(tmp_path / "ledger.db") and catalog.ledger.unit == "Customer"
    customers, orders, countries = catalog.tables.values()
    assert (customers.name, customers.kind, customers.unit) == ("customers", "parquet", "id")
    assert customers.columns == {"id": "INT64", "name": "STRING"}  # a list has no type here
    assert orders.via == Via("customers", (("customer_id", "id"),))
    assert (orders.kind, orders.remote, orders.unit) == ("sqlite", "Orders", "customer")
    assert orders.units == ("customer", "customer_id") and customers.units == ("id",)
    assert (countries.kind, countries.unit, countries.units) == ("csv", None, ())
    assert catalog.schema["orders"]["customer"] == "INT64"
    assert "customer" not in catalog.schema["customers"]
    assert catalog.declared_keys == [("customers", ("id",))]


def test_the_data_set_that_has_tables_for_statements_is_chosen(refused: Refused) -> None:
    session = {"data_set": "rides", "path": "rides.csv", "dimension": {"hour": {"type": "integer"}}}
    live = {"data_set": "dogs", "folder": "live", "unit_column": "dog"}
    sections = _changed(table__rides=session, table__live=live)
    for name in ("users", "visits", "orders", "items"):
        sections["table"][name]["data_set"] = "shop"
    sections["data_set"] |= {"rides": {}, "persons": {"unit": {"name": "person"}}, "dogs": {}}
    catalog = catalog_of(projects.of_sections(Path("/shop"), sections))
    assert catalog.ledger.data_set == "shop" and "rides" not in catalog.tables
    sections["table"]["dogs"] = {"data_set": "dogs", "path": "dogs.csv", "unit_column": "dog"}
    refused(lambda: catalog_of(projects.of_sections(Path("/shop"), sections)))
    sections["table"] = {"rides": session}
    assert (
        refusal(catalog_of, projects.of_sections(Path("/shop"), sections))
        == "UsageError --data-set"
    )


def _changed(**changes: Any) -> dict[str, Any]:
    """The shop with paths of it (``table__users__path``) replaced; ``None`` removes."""
    tables = copy.deepcopy(SHOP)
    for path, value in changes.items():
        *way, last = path.split("__")
        at: Any = tables
        for part in way:
            at = at[part]
        if value is None:
            del at[last]
        else:
            at[last] = value
    return tables


REFUSED: list[dict[str, Any]] = [
    {"table__users__unit_column": None},
    {"table__users__public": True},
    {"table__pages__unit_column": "uid"},
    {"data_set__shop__unit__type": "string"},
    {"table__users__unit_column": "user"},
    {"table__released": {"path": "x.csv", "public": True}},
    {"table__a-b": {"path": "x.csv", "public": True}},
    {"table__Users": SHOP["table"]["users"]},
    {"table__users__path": None},
    {"table__users__path": "users.xlsx"},
    {"table__users__uri": "sqlite:///x"},
    {"table__users__remote": "x"},
    {"table__users__path": None, "table__users__uri": "mysql://x"},
    {"table__users__columns": None},
    {"table__users__columns": {"uid": "LIST"}},
    {"table__users__columns": {"uid": "INT64", "UID": "INT64"}},
    {"table__users__columns": {"uid": "INT64", "a:b": "INT64"}},
    {"table__orders__unit_via": {"table": "nobody", "on": [["customer_id", "uid"]]}},
    {"table__orders__unit_via": {"table": "items", "on": [["order_id", "order_id"]]}},
    {"table__orders__unit_via": {"table": "depts", "on": [["customer_id", "floor"]]}},
    {"table__orders__unit_via": {"table": "users", "on": []}},
    {"table__orders__unit_via": {"table": "users", "on": [["customer_id", "dept"]]}},
    {"table__orders__unit_via": {"table": "users", "on": [["price", "score"]]}},
    {"table__orders__unit_via": {"table": "users", "on": [["nothing", "uid"]]}},
    {"table__orders__columns__uid": "INT64"},
    {"data_set__shop__unit__period": "1d"},
    {"data_set__shop__unit__name": ""},
    {"data_set__shop__account__limit": {"epsilon": 1.0, "delta": 1e-9}},
    {"data_set__shop__account__id": "no id"},
    {"data_set__shop__account": None},
    {"data_set__shop__unit": None},
    {"table": {}},
    {"table__users": {"path": "x.parquet", "unit_column": "uid"}},
]  # fmt: skip


def test_refusals(tmp_path: Path) -> None:
    """Of a file too that is none, has no Parquet where it says so, or lets nobody choose."""

    def loaded(folder: Path, changes: dict[str, Any]) -> Catalog:
        return catalog_of(projects.of_sections(folder, _changed(**changes)))

    (tmp_path / "x.parquet").write_text("no")
    calls: dict[str, Callable[[], object]] = {}
    for changes in REFUSED:
        calls[f"{changes}"] = partial(loaded, tmp_path, changes)
    contents = {"text": b"x = [", "UTF-8": b"\xff", "a small file": b"# " + b"x" * (1 << 20)}
    for name, content in contents.items():
        (tmp_path / f"{name}.toml").write_bytes(content)
        calls[f"no {name}"] = partial(load_catalog, tmp_path / f"{name}.toml")
    calls["no file"] = partial(load_catalog, tmp_path / "none.toml")
    (tmp_path / "dpstream.toml").write_text(CATALOG_TEXT.replace('data_set = "other"\n', ""))
    for chosen in ("shop", "shops", None):
        calls[f"data set {chosen}"] = partial(load_catalog, tmp_path, chosen)
    text = of_refusals(calls).replace(str(tmp_path), "FOLDER")
    check(Path(__file__).with_name("catalogs.txt"), text)
