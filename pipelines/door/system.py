"""System tables: what `SELECT ... FROM dpstream.NAME` reads.

They are public and free: they are made of the accounts, and no record is read.  A statement may
read them together, and nothing else.

* ``dpstream.budget``: for each region of each table whose records have budgets of their own, what a
  point in it has spent, and what is left there of the largest initial budget;
* ``dpstream.allotments``: the allotments of the analyst who asks, and what is left of them.
"""

import re
from collections.abc import Callable, Iterable

import pyarrow as pa
from sqlglot import exp

from dpstream.accounting.plan.unit import UnitIdentity
from dpstream.accounting.regions.amounts import CLOSED, MICRO
from dpstream.accounting.regions.space import Budget
from dpstream.pipelines.session import sentences
from dpstream.pipelines.session.open_table import OpenTable
from dpstream.pipelines.statements.allowed import inlined, parsed, qualified, require, tokens_of
from dpstream.pipelines.statements.exact import safe_query
from dpstream.pipelines.statements.ownership import Validator
from dpstream.pipelines.statements.subqueries import joined
from dpstream.pipelines.tables.catalog import Table, Tables
from dpstream.pipelines.tables.engine import Engine

_SCHEMA = "dpstream"


#: Tables that are open, of a project file.
OpenTables = Iterable[OpenTable]
_TEXT, _NUMBER = pa.string(), pa.float64()
_BUDGET = pa.schema(
    [
        ("table_name", _TEXT),
        ("kind", _TEXT),
        ("region", _TEXT),
        ("spent", _NUMBER),
        ("remaining", _NUMBER),
        ("closed", pa.bool_()),
    ]
)
_ALLOTMENTS = pa.schema(
    [
        ("table_name", _TEXT),
        ("allotment", _TEXT),
        ("kind", _TEXT),
        ("amount", _NUMBER),
        ("remaining", _NUMBER),
    ]
)


def _budget(open_tables: OpenTables) -> pa.Table:
    rows = [
        {
            "table_name": open_table.config.name,
            "kind": budget.kind,
            "region": sentences.box(open_table.space, box),
            "spent": None if amount >= CLOSED else amount / MICRO,
            "remaining": max((box[place, 1] - 1) * budget.step - amount, 0) / MICRO,
            "closed": amount >= CLOSED,
        }
        for open_table in open_tables
        for place, budget in enumerate(open_table.space.dimensions)
        if isinstance(budget, Budget)
        for spent in [open_table.account.spent(budget.kind)]
        for box, amount in zip(spent.boxes, spent.amounts.tolist(), strict=True)
    ]
    return pa.Table.from_pylist(rows, _BUDGET)


def _allotments(open_tables: OpenTables) -> pa.Table:
    rows = [
        {
            "table_name": open_table.config.name,
            "allotment": name,
            "kind": paid.budget,
            "amount": paid.amount / MICRO,
            "remaining": open_table.account.left_of(run_id) / MICRO,
        }
        for open_table in open_tables
        for name, (run_id, paid) in open_table.allotments().items()
    ]
    return pa.Table.from_pylist(rows, _ALLOTMENTS)


#: How each table is made of the open tables of a project.
TABLES: dict[str, Callable[[OpenTables], pa.Table]] = {
    "budget": _budget,
    "allotments": _allotments,
}
_KINDS = {pa.string(): "STRING", pa.float64(): "FLOAT64", pa.bool_(): "BOOL", pa.int64(): "INT64"}
_NAMED = re.compile(rf"{_SCHEMA}\s*\.\s*(\w+)", re.IGNORECASE)


def system_tables(text: str) -> list[str]:
    """Return the system tables that a statement names, perhaps ones that are not there."""
    if _NAMED.search(text) is None:
        return []
    return [text[start:end].lower() for start, end in _places(text)]


def _places(text: str) -> list[tuple[int, int]]:
    """Return the places of the names behind ``dpstream.`` in FROM and joins."""
    tokens = tokens_of(text)
    places = list[tuple[int, int]]()
    for before, schema, dot, name in zip(tokens, tokens[1:], tokens[2:], tokens[3:], strict=False):
        first = before.text.upper() in ("FROM", "JOIN", ",")
        if first and schema.text.lower() == _SCHEMA and dot.text == ".":
            places.append((name.start, name.end + 1))
    return places


def answered(text: str, open_tables: OpenTables) -> pa.Table:
    """Return the rows of a statement about system tables.

    Raises:
        DpstreamError: it is not usable, or names another table.
    """
    names = system_tables(text)
    for begin, end in reversed(_places(text)):  # one name, at the same place
        start = text.lower().rindex(_SCHEMA, 0, begin)
        name = f"{_SCHEMA}_{text[begin:end]}"
        text = text[:start] + name + " " * (end - start - len(name)) + text[end:]
    rows = {f"{_SCHEMA}_{n}": TABLES[n](open_tables) for n in names if n in TABLES}
    tables = Tables(
        UnitIdentity("record", "string"),
        {
            name: Table(name, "parquet", "", {f.name: _KINDS[f.type] for f in table.schema})
            for name, table in rows.items()
        },
    )
    tree = qualified(inlined(parsed(text)), tables.schema)
    for select in tree.find_all(exp.Select):
        require(select.args.get("hint") is None, "dp-function-outside", select)
    validator = Validator(tables, {name: columns for name, columns in tables.types.items()})  # type: ignore[misc]
    joined(tree, validator)
    validator.relation(tree, last=True)
    with Engine(tables, rows, ordered=True, rows=rows) as engine:
        return engine.run(safe_query(tree))  # type: ignore[arg-type]
