"""The catalog of a data set: its tables in the project file, who owns their rows, and the account.

The tables of a data set whose records lie in files or databases can be asked together::

    [data_set.shop]
    unit = { name = "customer", type = "int" }
    account = { path = "shop.account.db", id = "7f3a0c5d9e1b2846" }
    secret = "file:shop.secret"

    [table.customers]
    path = "customers/*.parquet"
    unit_column = "customer"

    [table.orders]
    path = "orders.csv"
    columns = { order_id = "INT64", customer_id = "INT64", price = "NUMERIC" }
    unit_via = { table = "customers", on = [["customer_id", "id"]] }

    [table.countries]
    path = "countries.parquet"
    public = true

A table is public or private, and must say which.  Tables of topics and of growing folders, and
those whose records have budgets of their own, are no part of a catalog.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import sqlglot  # noqa: F401 -- a missing extra is told before anything is read

from dpstream.accounting.errors import UsageError, closest, refuse_first
from dpstream.accounting.places import refuse_both
from dpstream.accounting.plan.unit import UnitIdentity
from dpstream.pipelines.project.dialect import NUMBERS, reading_of
from dpstream.pipelines.project.project import (
    Project,
    account_of,
    is_session_table,
    load_project,
    secret_of,
    unit_of,
)
from dpstream.pipelines.project.sections import TableSection, UnitSection, Via
from dpstream.pipelines.tables.catalog import (
    RELEASED,
    UNIT_TYPES,
    Catalog,
    Table,
    file_columns,
    is_unsigned,
    kind_of,
)
from dpstream.pipelines.tables.files import identities
from dpstream.state.ledger.events import RECORD
from dpstream.state.ledger.open import PROJECT_FILE
from dpstream.state.private_log import keep_beside

MAX_TABLES = 256


def load_catalog(
    project: str | Path | None = None,
    data_set: str | None = None,
    environment: str | None = None,
    settings: Sequence[str] = (),
) -> Catalog:
    """Return the catalog of a data set of a project file.

    Args:
        project: the file or its folder; ``None``: found from the current folder.
        data_set: name of the data set; ``None``: the only one with private tables for statements.
        environment: the value of ``--env``.
        settings: the values of ``--set``.

    Raises:
        UsageError: the file cannot be read, is not TOML, has unknown or missing fields, names a
            table or column that does not exist, a table is neither private nor public, or its
            unit is not the account's.
    """
    return catalog_of(load_project(project, environment, settings), data_set)


def catalog_of(project: Project, data_set: str | None = None) -> Catalog:
    """Return the catalog of a data set of a decoded project file; raises as `load_catalog` does."""
    name, _ = project.data_set(data_set or _only_data_set(project), "--data-set")
    where = f"data_set.{name}"
    unit = unit_of(project, name, "statements")
    place, secret = account_of(project, name), secret_of(project, name)
    sections = _sections(project, name)
    if not 1 <= len(sections) <= MAX_TABLES:
        raise UsageError(
            where, f"must have 1 to {MAX_TABLES} tables in files or databases", "add [table.NAME]"
        )
    named_tables: dict[str, Table] = {}
    for written, config in sections.items():
        table = _table(written, config, unit, project.folder)
        if table.name in named_tables:
            raise UsageError(
                f"table.{written}", "differs from another name in case only", "choose another name"
            )
        named_tables[table.name] = table
    for written, table in zip(sections, named_tables.values(), strict=True):
        _check_path(f"table.{written}", table, named_tables, unit)
    _refuse_both(named_tables)
    named_tables = {
        name: msgspec.structs.replace(table, units=tuple(sorted(_units(table, named_tables))))
        for name, table in named_tables.items()
    }
    identity = UnitIdentity(unit.name, unit.type)
    keep_beside(place.path, project.path)
    views = {view.lower(): text for view, text in project.sections.view.items()}
    for view in views.keys() & named_tables.keys():
        raise UsageError(f"view.{view}", "has the name of a table", "choose another name")
    given = msgspec.to_builtins(project.sections.data_set[name].defaults)
    return Catalog(
        identity,
        named_tables,
        place,
        secret,
        project.folder,
        defaults={option: value for option, value in given.items() if value is not None},
        views=views,
    )


def public_tables(project: Project) -> dict[str, Table]:
    """Return the public tables of a project file; raises as `load_catalog` does."""
    record = UnitSection(name=RECORD, type="string")
    tables = [
        _table(name, section, record, project.folder)
        for name, section in project.sections.table.items()
        if section.public and _is_for_statements(section)
    ]
    return {table.name: table for table in tables}


def _only_data_set(project: Project) -> str | None:
    """Return the only data set with private tables for statements; ``None`` if there is none.

    Raises:
        UsageError: there are several.
    """
    tables = [table for table in project.sections.table.values() if _is_for_statements(table)]
    names = sorted({table.data_set for table in tables if table.data_set and not table.public})
    if len(names) > 1:
        raise UsageError(
            "--data-set",
            f"{PROJECT_FILE} has several data sets with tables for SQL: {', '.join(names)}",
            f"name one of them: `dpstream sql --data-set {names[0]}`",
        )
    return names[0] if names else None


def _sections(project: Project, data_set: str) -> dict[str, TableSection]:
    """Return the tables that statements can name: the data set's, and public ones without one.

    Raises:
        UsageError: a private table names no data set, and there are several.
    """
    sections = dict[str, TableSection]()
    for name, table in project.sections.table.items():
        if _is_for_statements(table):
            shared = table.public and table.data_set is None
            field = f"table.{name}.data_set"
            if shared or project.data_set(table.data_set, field)[0] == data_set:
                sections[name] = table
    return sections


def _is_for_statements(table: TableSection) -> bool:
    """Return whether a table's records lie in files or a database and share a unit's budget."""
    streamed = (table.folder or table.topic or table.subscription) is not None
    return not is_session_table(table) and (bool(table.path or table.uri) or not streamed)


def _refuse_both(tables: dict[str, Table]) -> None:
    """Refuse a file that is private under one name and public under another.

    Raises:
        PolicyError: there is such a file.
    """
    private = {f"table {table.name}": table for table in tables.values() if table.unit is not None}
    public = {f"table {table.name}": table for table in tables.values() if table.unit is None}
    if private and public:
        refuse_both(
            {name: identities(table) for name, table in private.items()},
            {name: identities(table) for name, table in public.items()},
        )


def _table(written: str, config: TableSection, unit: UnitSection, folder: Path) -> Table:
    where, name = f"table.{written}", written.lower()
    choices = [config.unit_column is not None, config.unit_via is not None, config.public]
    refuse_first(
        (
            not name.isidentifier() or not name.isascii() or name == RELEASED,
            UsageError(
                where, "has a name that is not usable", "use letters, digits and _, not 'released'"
            ),
        ),
        (
            sum(choices) != 1,
            UsageError(
                where,
                "must be either private or public: it says neither, or both",
                "give one of unit_column, unit_via and public = true",
            ),
        ),
    )
    kind, place = kind_of(where, config.path, config.uri, folder, config.format)
    if config.remote is not None and config.uri is None:
        raise UsageError(f"{where}.remote", "is for databases", "omit it")
    columns = file_columns(where, kind, place, config.columns)
    owner = config.unit_column.lower() if config.unit_column is not None else None
    if owner is not None:
        if unit.type == "int" and config.columns is None and is_unsigned(place, owner, kind):
            columns |= {owner: "INT64"}  # by its bits
        field, of_unit = f"{where}.unit_column", UNIT_TYPES[unit.type]
        refuse_first(
            (
                owner not in columns,
                UsageError(field, "is no column of it", closest(owner, columns)),
            ),
            (
                columns.get(owner) != of_unit,
                UsageError(
                    field,
                    "has another type than the unit",
                    f"the unit is of type '{unit.type}'; correct that, or name another column",
                ),
            ),
        )
    via = config.unit_via
    if via is not None:
        pairs = tuple((a.lower(), b.lower()) for a, b in via.on)
        via, owner = Via(via.table.lower(), pairs), unit.name.lower()
    remote = (config.remote or written) if config.uri is not None else None
    reading = reading_of(where, config, tuple(n for n in columns if columns[n] in NUMBERS))
    if reading.time is not None:
        if reading.time.column.lower() not in columns:
            raise UsageError(
                f"{where}.time_column",
                "is no column of it",
                closest(reading.time.column.lower(), columns),
            )
        time = msgspec.structs.replace(reading.time, column=reading.time.column.lower())
        reading = msgspec.structs.replace(reading, time=time)
    fields = tuple(config.columns or ())
    return Table(name, kind, place, columns, owner, via, remote, fields=fields, reading=reading)


def _check_path(where: str, table: Table, tables: dict[str, Table], unit: UnitSection) -> None:
    """Check that the path ends at a table with a unit column, and its columns exist and match."""
    if table.via is None:
        return
    field = f"{where}.unit_via"
    if unit.name.lower() in table.columns:
        raise UsageError(
            field, "adds a column of the unit's name, which it has already", "use unit_column"
        )
    seen, at = {table.name}, table
    while at.via is not None:
        if at.via.table not in tables or at.via.table in seen:
            raise UsageError(field, "leads to no table", "name a private table, in no circle")
        at = tables[at.via.table]
        seen.add(at.name)
    on, theirs = table.via.on, tables[table.via.table].columns
    refuse_first(
        (at.unit is None, UsageError(field, "leads to a public table", "name a private table")),
        (
            not on or len({key for _, key in on}) < len(on),
            UsageError(f"{field}.on", "has no columns, or one twice", "write [[column, key]]"),
        ),
    )
    for column, key in on:
        kind = table.columns.get(column)
        refuse_first(
            (
                kind is None or key not in theirs,
                UsageError(f"{field}.on", "names a column that is not there", "correct it"),
            ),
            (
                kind != theirs.get(key) or kind == "FLOAT64",  # two floats can be equal and differ
                UsageError(
                    f"{field}.on", "has columns of two types, or floats", "give both one type"
                ),
            ),
        )


def _units(table: Table, tables: dict[str, Table]) -> set[str]:
    """Return all columns that contain the unit of a table's rows."""
    if table.unit is None:
        return set()
    if table.via is None:
        return {table.unit}
    above = _units(tables[table.via.table], tables)
    return {table.unit} | {column for column, key in table.via.on if key in above}
