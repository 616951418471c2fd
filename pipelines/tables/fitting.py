"""Tables are as their catalog says, in names and types of columns: looked at before a charge.

A column that is not there, or is of a type that the declared one has no value of, would fail, or be
NULL in every row, when the question is paid.  Only headers, footers and a server's own description
of its columns are read, no row.

A declared key of a server is unique as statements see it only if no two of its values become one
by the declared type; so a key of decimals has at most as many digits behind the point as those
have.  In the other types below different values of the server stay different.
"""

from collections.abc import Iterable

from dpstream.accounting.errors import DpstreamError, PolicyError, UsageError
from dpstream.pipelines.tables.catalog import Catalog, Table
from dpstream.pipelines.tables.databases import ServerColumn, server_columns
from dpstream.pipelines.tables.files import view
from dpstream.pipelines.tables.inputs import FILES

#: What a column of PostgreSQL is declared as; what is none of these, as STRING.
_AS = {
    "int2": "INT64",
    "int4": "INT64",
    "int8": "INT64",
    "numeric": "NUMERIC",
    "float4": "FLOAT64",
    "float8": "FLOAT64",
    "bool": "BOOL",
    "bytea": "BYTES",
    "date": "DATE",
    "timestamptz": "TIMESTAMP",
    "timestamp": "DATETIME",
}
#: Types whose values others have too.
_WIDER = {"INT64": {"NUMERIC", "FLOAT64"}, "NUMERIC": {"FLOAT64"}}
#: Digits behind the point of a decimal.
_DIGITS = 9


def require_fitting(catalog: Catalog, names: Iterable[str]) -> None:
    """Refuse a question whose tables are not what the catalog says.

    Raises:
        DpstreamError: one is not, or cannot be looked at; names the table and the column.
    """
    for name in sorted(names):
        table = catalog.tables[name]
        if table.kind in FILES:
            view(table, None)  # reads headers and footers
            continue
        keys = {column for of, columns in catalog.declared_keys if of == name for column in columns}
        there = server_columns(table)
        for column in table.columns:
            _check(table, column, there.get(column), column in keys)


def _check(table: Table, column: str, there: ServerColumn | None, key: bool) -> None:
    if there is None:
        raise _unfit(table, "is not there", "correct `remote` and `columns` of the table", column)
    declared = table.columns[column]
    if table.kind == "sqlite":
        # What SQLite's types make of every value that a column takes.
        never = {"INT64": ("text", "real"), "FLOAT64": ("text",)}.get(declared, ())
        if there.type in never:
            other = "STRING" if there.type == "text" else "FLOAT64"
            raise _unfit(table, *_other(declared, other), column)
        return
    fits = _AS.get(there.type, "STRING")
    if declared not in ("STRING", fits, *_WIDER.get(fits, ())):
        raise _unfit(table, *_other(declared, fits), column)
    rounds = there.type == "numeric" and (there.digits is None or there.digits > _DIGITS)
    if key and declared == "NUMERIC" and rounds:
        raise PolicyError(
            f"table {table.name}, column {column}",
            f"is a key whose values are told apart beyond {_DIGITS} digits behind the point",
            "declare it as STRING",
        )


def _other(declared: str, fits: str) -> tuple[str, str]:
    return f"is declared {declared}, but its database has {fits} there", f"declare it as {fits}"


def _unfit(table: Table, rule: str, fix: str, column: str) -> DpstreamError:
    return UsageError(f"table {table.name}, column {column}", rule, fix)
