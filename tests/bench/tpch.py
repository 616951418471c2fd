"""The benchmark's queries in their private form, on the benchmark's data.

    tpchgen-cli parquet -s 1 --output-dir DIR
    python -m tests.bench.tpch DIR

Customers are protected; orders and lines are theirs through declared keys.  For each query: seconds
and CPU seconds of an answer at epsilon 1, rows, groups of the plain query without bounds, and the
median relative difference of the first figure to it over the groups that both have.  The
difference is that of noise and bounds together.
"""

import argparse
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import duckdb
import sqlglot

from dpstream.accounting.errors import DpstreamError
from dpstream.pipelines.sql.ask import ask
from dpstream.pipelines.sql.load import catalog_of
from dpstream.pipelines.statements.statement import statement_of
from dpstream.pipelines.tables.registration import register
from tests import accounts, projects
from tests.bench.common import emit, machine
from tests.pipelines.sql.asking import KEY
from tests.pipelines.sql.test_tpch import QUERIES, TABLES, table_section

_PRIVATE = re.compile(r" WITH DIFFERENTIAL_PRIVACY OPTIONS\([^)]*\)")
_BOUNDS = re.compile(r", contribution_bounds_per_(?:group|row) => \([^)]*\)")


def _plain(text: str, folder: Path) -> list[dict[str, Any]]:
    connection = duckdb.connect()
    for name, *_ in TABLES:
        connection.execute(f"CREATE VIEW {name} AS SELECT * FROM '{folder}/{name}.parquet'")
    text = _BOUNDS.sub("", _PRIVATE.sub("", text))
    text = re.sub(r" LIMIT \d+$", "", text)
    [query] = sqlglot.transpile(text, read="bigquery", write="duckdb")
    return connection.sql(query).to_arrow_table().to_pylist()


def main() -> None:
    """Ask every query once."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    tables = {table[0]: table_section(*table) for table in TABLES}
    for name, section in tables.items():
        section["path"] = str(args.folder / f"{name}.parquet")
    with tempfile.TemporaryDirectory() as folder:
        project = projects.of_tables(
            Path(folder), ("c_unit", "int"), tables, insecure_test_secret=KEY
        )
        catalog = accounts.of_catalog(catalog_of(project))
        register(catalog)
        for name, text in QUERIES.items():
            groups = [group.name for group in statement_of(text, catalog).groups]
            wall, cpu = time.perf_counter(), time.process_time()
            try:
                rows = ask(catalog, text).table.to_pylist()
            except DpstreamError as error:
                emit({"query": name, "refused": str(error)}, args.out)
                continue
            took = {
                "seconds": round(time.perf_counter() - wall, 2),
                "cpu": round(time.process_time() - cpu, 2),
            }
            true = {tuple(str(row[g]) for g in groups): row for row in _plain(text, args.folder)}
            differences = list[float]()
            for row in rows:
                figure = next(column for column in row if column not in groups)
                truth = true.get(tuple(str(row[g]) for g in groups), {}).get(figure)
                if truth and row[figure] is not None:
                    differences.append(abs(float(row[figure]) / float(truth) - 1))
            median = round(statistics.median(differences), 4) if differences else None
            result = {"rows": len(rows), "groups": len(true), "difference": median}
            emit({"query": name, **took, **result}, args.out)
    emit(machine(), args.out)


if __name__ == "__main__":
    main()
