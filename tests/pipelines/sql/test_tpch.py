"""Statements of the shape of TPC-H, customers protected through declared keys."""

import datetime
import math
import random
import re
import time
from pathlib import Path
from typing import Any

import duckdb
import pytest

from dpstream.pipelines.sql.ask import ask
from dpstream.pipelines.sql.load import catalog_of
from dpstream.pipelines.sql.query_plan import stage_one
from dpstream.pipelines.statements.statement import Statement, statement_of
from dpstream.pipelines.tables.catalog import Catalog
from dpstream.pipelines.tables.registration import register
from tests import accounts, projects
from tests.pipelines.sql.asking import KEY, without_noise

#: Name, who owns the rows, columns by type.
TABLES: list[tuple[str, dict[str, Any], str]] = [
    ("customer", {"unit_column": "c_custkey"},
     "INT64 c_custkey c_nationkey; STRING c_mktsegment"),
    ("orders", {"unit_via": {"table": "customer", "on": [["o_custkey", "c_custkey"]]}},
     "INT64 o_orderkey o_custkey; DATE o_orderdate; STRING o_orderpriority o_comment"),
    ("lineitem", {"unit_via": {"table": "orders", "on": [["l_orderkey", "o_orderkey"]]}},
     "INT64 l_orderkey l_suppkey l_partkey; NUMERIC l_quantity l_extendedprice "
     "l_discount l_tax; STRING l_returnflag l_linestatus l_shipmode l_shipinstruct; "
     "DATE l_shipdate l_commitdate l_receiptdate"),
    ("supplier", {"public": True},
     "INT64 s_suppkey s_nationkey"),
    ("nation", {"public": True},
     "INT64 n_nationkey n_regionkey; STRING n_name"),
    ("region", {"public": True},
     "INT64 r_regionkey; STRING r_name"),
    ("part", {"public": True},
     "INT64 p_partkey p_size; STRING p_type p_name p_brand p_container"),
    ("partsupp", {"public": True},
     "INT64 ps_partkey ps_suppkey; NUMERIC ps_supplycost"),
]  # fmt: skip


def table_section(name: str, owner: dict[str, Any], columns_of: str) -> dict[str, Any]:
    parts = [part.split() for part in columns_of.split(";")]
    columns = {column: kind for kind, *named in parts for column in named}
    return {"path": f"{name}.csv", "columns": columns, **owner}


def _catalog(folder: Path) -> Catalog:
    tables = {table[0]: table_section(*table) for table in TABLES}
    unit = ("c_unit", "int")
    return catalog_of(projects.of_tables(folder, unit, tables, insecure_test_secret=KEY))


_CATALOG = _catalog(Path("/tpch"))
_TYPES = {"INT64": "BIGINT", "NUMERIC": "DECIMAL(15, 2)", "STRING": "VARCHAR", "DATE": "DATE"}
DP = (
    "SELECT WITH DIFFERENTIAL_PRIVACY "
    "OPTIONS(epsilon = 1, delta = 1e-9, max_groups_contributed = 4)"
)
REV = (
    "SUM(l_extendedprice * (1 - l_discount), "
    "contribution_bounds_per_group => (0, 100000)) AS revenue"
)
#: The supplier of a line that came late.
_LATE = "CASE WHEN l_receiptdate > l_commitdate THEN l_suppkey END"
#: In the order of the benchmark.  Q3, Q10 and Q18 name orders and customers there: here they group
#: by day, nation and year.  Q21 asks for the one late supplier of an order by its least and its
#: most one, because two suppliers of an order are compared.
QUERIES = {
    "Q1": (
        f"{DP}  l_returnflag, l_linestatus, SUM(l_quantity) AS q, AVG(l_discount) AS d, "
        f"{REV}, COUNT(*) AS n FROM lineitem WHERE l_shipdate <= DATE '1998-09-02' GROUP "
        "BY l_returnflag, l_linestatus ORDER BY l_returnflag"
    ),
    "Q3": (
        f"{DP}  o_orderdate, {REV} FROM customer JOIN orders ON c_custkey = o_custkey JOIN "
        "lineitem ON l_orderkey = o_orderkey WHERE c_mktsegment = 'BUILDING' AND o_orderdate < "
        "DATE '1995-03-15' AND l_shipdate > DATE '1995-03-15' GROUP BY o_orderdate ORDER BY "
        "revenue DESC LIMIT 10"
    ),
    "Q4": (
        f"{DP}  o_orderpriority, COUNT(*) AS order_count FROM orders WHERE o_orderdate >= DATE "
        "'1993-07-01' AND o_orderdate < DATE_ADD(DATE '1993-07-01', INTERVAL 3 MONTH) AND EXISTS "
        "(SELECT * FROM lineitem WHERE l_orderkey = o_orderkey AND l_commitdate < l_receiptdate) "
        "GROUP BY o_orderpriority ORDER BY o_orderpriority"
    ),
    "Q5": (
        f"{DP}  n_name, {REV} FROM customer JOIN orders ON c_custkey = o_custkey JOIN "
        "lineitem ON l_orderkey = o_orderkey JOIN supplier ON l_suppkey = s_suppkey AND "
        "c_nationkey = s_nationkey JOIN nation ON s_nationkey = n_nationkey JOIN region "
        "ON n_regionkey = r_regionkey WHERE r_name = 'ASIA' AND o_orderdate >= DATE "
        "'1994-01-01' AND o_orderdate < DATE_ADD(DATE '1994-01-01', INTERVAL 1 YEAR) "
        "GROUP BY n_name ORDER BY revenue DESC"
    ),
    "Q6": (
        f"{DP}  {REV} FROM lineitem WHERE l_shipdate >= DATE '1994-01-01' AND l_discount "
        "BETWEEN 0.05 AND 0.07 AND l_quantity < 24"
    ),
    "Q7": (
        f"{DP}  supp_nation, cust_nation, l_year, SUM(volume) AS revenue FROM (SELECT "
        "customer.c_custkey, n1.n_name AS supp_nation, n2.n_name AS cust_nation, "
        "EXTRACT(YEAR FROM l_shipdate) AS l_year, l_extendedprice * (1 - l_discount) AS "
        "volume FROM customer JOIN orders ON c_custkey = o_custkey JOIN lineitem ON "
        "l_orderkey = o_orderkey JOIN supplier ON l_suppkey = s_suppkey JOIN nation AS n1"
        " ON s_nationkey = n1.n_nationkey JOIN nation AS n2 ON c_nationkey = "
        "n2.n_nationkey) AS shipping GROUP BY supp_nation, cust_nation, l_year"
    ),
    "Q8": (
        f"{DP}  o_year, SUM(CASE WHEN nation = 'BRAZIL' THEN volume ELSE 0 END) / "
        "SUM(volume) AS share FROM (SELECT c_custkey, EXTRACT(YEAR FROM o_orderdate) AS "
        "o_year, l_extendedprice * (1 - l_discount) AS volume, n2.n_name AS nation FROM "
        "customer JOIN orders ON c_custkey = o_custkey JOIN lineitem ON l_orderkey = "
        "o_orderkey JOIN part ON p_partkey = l_partkey JOIN supplier ON s_suppkey = "
        "l_suppkey JOIN nation AS n2 ON s_nationkey = n2.n_nationkey) AS x GROUP BY "
        "o_year"
    ),
    "Q9": (
        f"{DP}  nation, o_year, SUM(amount) AS p FROM (SELECT o_custkey, n_name AS nation,"
        " EXTRACT(YEAR FROM o_orderdate) AS o_year, l_extendedprice * (1 - l_discount) - "
        "ps_supplycost * l_quantity AS amount FROM orders JOIN lineitem ON l_orderkey = "
        "o_orderkey JOIN part ON p_partkey = l_partkey JOIN supplier ON s_suppkey = "
        "l_suppkey JOIN partsupp ON ps_suppkey = l_suppkey AND ps_partkey = l_partkey "
        "JOIN nation ON s_nationkey = n_nationkey WHERE p_name LIKE '%green%') AS profit "
        "GROUP BY nation, o_year"
    ),
    "Q10": (
        f"{DP}  n_name, {REV} FROM customer, orders, lineitem, nation WHERE c_custkey = o_custkey "
        "AND l_orderkey = o_orderkey AND o_orderdate >= DATE '1993-10-01' AND o_orderdate < "
        "DATE_ADD(DATE '1993-10-01', INTERVAL 3 MONTH) AND l_returnflag = 'R' AND c_nationkey = "
        "n_nationkey GROUP BY n_name ORDER BY revenue DESC LIMIT 20"
    ),
    "Q12": (
        f"{DP}  l_shipmode, SUM(CASE WHEN o_orderpriority = '1-URGENT' OR o_orderpriority "
        "= '2-HIGH' THEN 1 ELSE 0 END) AS h FROM orders JOIN lineitem ON o_orderkey = "
        "l_orderkey WHERE l_shipmode IN ('MAIL', 'SHIP') AND l_commitdate < l_receiptdate"
        " GROUP BY l_shipmode"
    ),
    "Q13": (
        f"{DP}  c_count, COUNT(*) AS custdist FROM (SELECT c_custkey, COUNT(o_orderkey) AS"
        " c_count FROM customer LEFT JOIN orders ON c_custkey = o_custkey AND o_comment "
        "NOT LIKE '%special%requests%' GROUP BY c_custkey) AS c_orders GROUP BY c_count "
        "ORDER BY custdist DESC"
    ),
    "Q14": (
        f"{DP}  100.00 * SUM(CASE WHEN p_type LIKE 'PROMO%' THEN l_extendedprice * (1 - "
        "l_discount) ELSE 0 END) / SUM(l_extendedprice * (1 - l_discount)) AS promo FROM "
        "lineitem JOIN part ON l_partkey = p_partkey WHERE l_shipdate >= DATE "
        "'1995-09-01'"
    ),
    "Q18": (
        f"{DP}  EXTRACT(YEAR FROM o_orderdate) AS y, COUNT(*) AS n, SUM(q) AS quantity FROM ("
        "SELECT o_custkey, o_orderkey, o_orderdate, SUM(l_quantity) AS q FROM orders JOIN lineitem "
        "ON o_orderkey = l_orderkey GROUP BY o_custkey, o_orderkey, o_orderdate HAVING "
        "SUM(l_quantity) > 250) AS large GROUP BY y"
    ),
    "Q19": (
        f"{DP}  {REV} FROM lineitem JOIN part ON p_partkey = l_partkey WHERE (p_brand = "
        "'Brand#12' AND p_container IN ('SM CASE', 'SM BOX') AND l_quantity BETWEEN 1 AND"
        " 11 AND p_size BETWEEN 1 AND 5) OR (p_brand = 'Brand#23' AND l_shipmode IN "
        "('AIR', 'AIR REG'))"
    ),
    "Q21": (
        f"{DP}  n_name, SUM(waiting) AS numwait FROM (SELECT o_custkey, o_orderkey, MIN(l_suppkey) "
        f"AS least, MAX(l_suppkey) AS most, MIN({_LATE}) AS late, MAX({_LATE}) AS latest, "
        "COUNTIF(l_receiptdate > l_commitdate) AS waiting FROM orders JOIN lineitem ON o_orderkey "
        "= l_orderkey GROUP BY o_custkey, o_orderkey) AS o JOIN supplier ON s_suppkey = late JOIN "
        "nation ON s_nationkey = n_nationkey WHERE late = latest AND least <> most GROUP BY n_name "
        "ORDER BY numwait DESC LIMIT 100"
    ),
}


@pytest.mark.parametrize("name", QUERIES)
def test_a_query_is_accepted_and_runs(name: str) -> None:
    start = time.process_time()
    statement = statement_of(QUERIES[name], _CATALOG)
    assert time.process_time() - start < 0.25  # 4 to 16 ms; the first one loads parts of sqlglot
    connection = duckdb.connect()
    for table in _CATALOG.tables.values():
        of = ", ".join(f"{column} {_TYPES[kind]}" for column, kind in table.columns.items())
        connection.execute(f"CREATE TABLE {table.name} ({of})")
    grids = {f.name: (1.0, 0, 10) for f in statement.functions}
    cursor = connection.execute(stage_one(statement, _CATALOG, grids).sql("duckdb"))
    partials = {"count": ["value"], "sum": ["value"], "mean": ["value", "count"], "units": []}
    names = ["unit", *(f"group_{i}" for i in range(len(statement.groups)))]
    for i, function in enumerate(statement.functions):
        names += [f"{part}_{i}" for part in partials.get(function.kind, ["rows"])]
    assert [part[0] for part in cursor.description or ()] == names
    assert statement.unit.sql(dialect="duckdb").endswith(('custkey"', '"c_unit"'))


_CUSTOMERS, _NATIONS, _SUPPLIERS, _PARTS = 150, ["BRAZIL", "INDIA", "CHINA", "FRANCE"], 12, 40


def _data() -> dict[str, list[tuple[Any, ...]]]:
    """Rows of every table, in the order of its columns in TABLES."""
    draw = random.Random(14)
    pick, number = draw.choice, draw.randrange
    day = lambda: datetime.date(1993, 1, 1) + datetime.timedelta(number(2_000))  # noqa: E731
    orders = [
        (i, number(_CUSTOMERS + 3), day(), pick(["1-URGENT", "2-HIGH", "3-LOW"]),
         pick(["quick", "special requests", "special big requests"]))
        for i in range(1_500)
    ]  # fmt: skip
    lines = [
        (number(1_520), number(_SUPPLIERS), number(_PARTS), number(1, 50), number(90_000) / 100,
         number(11) / 100, number(9) / 100, pick("ANR"), pick("FO"),
         pick(["MAIL", "SHIP", "AIR", "AIR REG"]), "NONE", day(), day(), day())
        for _ in range(6_000)
    ]  # fmt: skip
    return {
        "customer": [(i, number(4), pick(["AUTO", "BUILDING"])) for i in range(_CUSTOMERS)],
        "orders": orders,
        "lineitem": lines,
        "supplier": [(i, number(4)) for i in range(_SUPPLIERS)],
        "nation": [(i, number(2), name) for i, name in enumerate(_NATIONS)],
        "region": [(0, "ASIA"), (1, "EUROPE")],
        "part": [
            (i, number(1, 6), pick(["PROMO A", "STANDARD B"]), pick(["green x", "red y"]),
             pick(["Brand#12", "Brand#23"]), pick(["SM CASE", "SM BOX", "LG"]))
            for i in range(_PARTS)
        ],
        "partsupp": [(p, s, number(1_000) / 100) for p in range(_PARTS) for s in range(_SUPPLIERS)],
    }  # fmt: skip


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> tuple[Catalog, Any]:
    """The catalog, its keys checked, and a plain database in which rows have their customer."""
    folder, plain = tmp_path_factory.mktemp("tpch"), duckdb.connect()
    for name, rows in _data().items():
        columns = _CATALOG.tables[name].columns
        lines = "".join(",".join(map(str, row)) + "\n" for row in rows)
        (folder / f"{name}.csv").write_text(",".join(columns) + "\n" + lines)
        types = ", ".join(f"'{column}': '{_TYPES[kind]}'" for column, kind in columns.items())
        read = f"read_csv('{folder}/{name}.csv', columns = {{{types}}}, header = true)"
        plain.execute(f"CREATE TABLE {name}_ AS SELECT * FROM {read}")
    owner = {
        "orders": "orders_ JOIN customer_ ON o_custkey = c_custkey",
        "lineitem": "lineitem_ JOIN orders_ ON l_orderkey = o_orderkey "
                    "JOIN customer_ ON o_custkey = c_custkey",
    }  # fmt: skip
    for name in _data():
        owned = f"SELECT {name}_.*, c_custkey AS c_unit FROM {owner.get(name)}"
        text = owned if name in owner else f"SELECT * FROM {name}_"
        plain.execute(f"CREATE VIEW {name} AS {text}")
    catalog = accounts.of_catalog(_catalog(folder))
    register(catalog)
    return catalog, plain


def _bounded(text: str) -> str:
    """The question with bounds that some customers reach, and all groups and rows of each."""
    options = "epsilon = 600, delta = 1e-9, max_groups_contributed = 90, max_rows_contributed = 400"
    text = text.replace(DP, f"SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS({options})")
    text = text.replace("(0, 100000)", "(0, 3000)")
    text = re.sub(r"AVG\((\w+)\)", r"AVG(\1, contribution_bounds_per_row => (0, 0.125))", text)
    text = re.sub(r"COUNT\(\*\)", "COUNT(*, contribution_bounds_per_group => (0, 9))", text)
    most = {"volume": 4_000, "amount": 1_000, "q": 300, "waiting": 4}
    most |= {} if "HAVING" in text else {"l_quantity": 300}  # else of one order, not private
    for name, bound in most.items():
        text = text.replace(
            f"SUM({name})", f"SUM({name}, contribution_bounds_per_group => (-{bound}, {bound}))"
        )
    text = re.sub(
        r"SUM\((CASE .*? END|l_extendedprice \* \(1 - l_discount\))\)",
        r"SUM(\1, contribution_bounds_per_group => (0, 2000))", text,
    )  # fmt: skip
    return text.replace("1 ELSE 0 END, contribution_bounds_per_group => (0, 2000)",
                        "1 ELSE 0 END, contribution_bounds_per_group => (0, 3)")  # fmt: skip


def _truth(statement: Statement, plain: Any) -> tuple[list[dict[str, Any]], int]:
    """The answer by plain DuckDB on the bounded rows, and how many partials a bound has cut."""
    source = statement.source.copy()
    items = [f"{statement.unit.sql('duckdb')} AS u"]
    items += [f"{g.expression.sql('duckdb')} AS g{i}" for i, g in enumerate(statement.groups)]
    inner, outer, cut = [], [], []
    for i, function in enumerate(statement.functions):
        value = "1" if function.argument is None else function.argument.sql("duckdb")
        low, high = function.low, function.high
        items.append(f"CAST({value} AS DOUBLE) AS x{i}")
        if function.kind == "mean":
            inner += [f"SUM(LEAST(GREATEST(x{i}, {low}), {high})) AS v{i}", f"COUNT(x{i}) AS n{i}"]
            outer.append(f'SUM(v{i}) / SUM(n{i}) AS "{function.name}"')
            continue
        inner.append(f"COALESCE(SUM(x{i}), 0) AS v{i}")
        outer.append(f'SUM(LEAST(GREATEST(v{i}, {low}), {high})) AS "{function.name}"')
        cut.append(f"COUNT_IF(v{i} NOT BETWEEN {low} AND {high})")
    groups = [f"g{i}" for i in range(len(statement.groups))]
    by = ", ".join(["u", *groups])
    source = source.select(*items, dialect="duckdb", append=False)
    partials = f"SELECT {by}, {', '.join(inner)} FROM ({source.sql('duckdb')}) GROUP BY {by}"
    named = [f'{g} AS "{group.name}"' for g, group in zip(groups, statement.groups, strict=True)]
    text = f"SELECT {', '.join([*named, *outer])} FROM ({partials})"
    if groups:
        text += f" GROUP BY {', '.join(groups)} HAVING COUNT(*) >= 2"
    plain.execute(f"CREATE OR REPLACE TEMP TABLE released AS {text}")
    [[clamped]] = plain.sql(f"SELECT {' + '.join(cut)} FROM ({partials})").fetchall()
    return plain.sql(statement.outer.sql("duckdb")).to_arrow_table().to_pylist(), clamped


@pytest.mark.parametrize("name", QUERIES)
def test_without_noise_it_is_duckdb_s_answer_on_the_bounded_rows(
    name: str, tables: tuple[Catalog, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog, plain = tables
    without_noise(monkeypatch)
    text = _bounded(QUERIES[name])
    statement = statement_of(text, catalog)
    assert all(f.low is not None for f in statement.functions if f.kind != "units")
    wanted, clamped = _truth(statement, plain)
    answer = ask(catalog, text)
    rows, means = (
        answer.table.to_pylist(),
        {f.name for f in statement.functions if f.kind == "mean"},
    )
    ends = {name: answer.intervals[name].to_pylist() for name in means}
    rows = [row | {name: ends[name][at] for name in means} for at, row in enumerate(rows)]
    groups = [g.name for g in statement.groups]
    by = lambda row: tuple(str(row[g]) for g in groups)  # noqa: E731
    assert len(rows) == len(wanted) >= 1 and (clamped > 0 or name in ("Q4", "Q13"))
    for row, true in zip(sorted(rows, key=by), sorted(wanted, key=by), strict=True):
        assert by(row) == by(true)
        for column in set(row) - set(groups):
            if column in means:  # a quotient is corrected for the noise of its count
                assert row[column]["low"] <= float(true[column]) <= row[column]["high"]
                continue
            assert math.isclose(row[column], float(true[column]), rel_tol=1e-5), column
