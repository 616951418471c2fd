"""What an expression of GoogleSQL is in one row, as DuckDB has it."""

from typing import Any

import duckdb
from sqlglot import exp, parse_one

from dpstream.pipelines.statements.allowed import qualified
from dpstream.pipelines.statements.dialect import DpSql
from dpstream.pipelines.statements.exact import tried
from dpstream.pipelines.statements.ownership import type_of

_TYPES = {"x": "INT64", "f": "FLOAT64", "nan": "FLOAT64", "s": "STRING", "p": "STRING",
          "n": "INT64", "no": "FLOAT64", "d": "DATE", "long": "STRING"}  # fmt: skip
_SQL = {"INT64": "BIGINT", "FLOAT64": "DOUBLE", "STRING": "TEXT", "DATE": "DATE"}


def value(text: str, **columns: Any) -> Any:
    """What an expression is in one row."""
    tree = parse_one(f"SELECT {text} AS v FROM t", dialect=DpSql())
    schema = {"t": {name: _TYPES[name] for name in columns or {"x": 0}}}
    tree = qualified(tree, schema)  # type: ignore[arg-type]
    item = tree.expressions[0].unalias()
    safe = tried(item, type_of(item) or exp.DType.UNKNOWN).sql("duckdb")
    base = duckdb.connect()
    names = ", ".join(f"{name} {_SQL[_TYPES[name]]}" for name in columns or {"x": 0})
    base.execute(f"CREATE TABLE t ({names})")
    base.execute(f"INSERT INTO t VALUES ({', '.join('?' for _ in columns or [0])})",
                 list(columns.values()) or [0])  # fmt: skip
    return base.sql(f"SELECT {safe} FROM t").fetchall()[0][0]
