"""The catalog's file: TOML that says which tables a data set has and who owns their rows.

A catalog is one data set of the ledger.  Its unit is the ledger's identity without a period, so
that streams and statements share one account::

    [ledger]
    path = "ledger.db"
    data_set = "shop"
    id = "7f3a0c5d9e1b2846"  # as `dpstream account create` prints it

    [unit]
    name = "customer"
    type = "int"

    [privacy]
    key_file = "noise.key"

    [[table]]
    name = "customers"
    path = "customers/*.parquet"
    unit_column = "customer"

    [[table]]
    name = "orders"
    path = "orders.csv"
    columns = { order_id = "INT64", customer_id = "INT64", price = "NUMERIC" }
    unit_via = { table = "customers", on = [["customer_id", "id"]] }

    [[table]]
    name = "countries"
    path = "countries.parquet"
    public = true

A table is public or private, and must say which.
"""

from pathlib import Path
from typing import Any

import msgspec

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.accounting.places import refuse_both
from dpstream.accounting.plan.fields import FieldType
from dpstream.accounting.plan.unit import UnitIdentity
from dpstream.dp_transforms.noise.references import KeyPlace
from dpstream.pipelines.jobs.tables import LedgerConfig
from dpstream.pipelines.project.text import closest, parse_toml, raise_decode_error
from dpstream.pipelines.sql.catalog import (
    RELEASED,
    UNIT_TYPES,
    Catalog,
    Part,
    Table,
    Via,
)
from dpstream.pipelines.sql.columns import file_columns, kind_of
from dpstream.pipelines.sql.inputs import identities
from dpstream.state.disk_errors import unreadable
from dpstream.state.ledger.open import refuse_limit
from dpstream.state.private_log import keep_beside

MAX_BYTES, MAX_TABLES = 1 << 20, 256
#: Two floats can be equal and differ.
_NO_KEY = {"FLOAT64"}


class UnitConfig(Part, frozen=True):
    """``[unit]``: name and type of the ids, as the ledger knows the unit."""

    name: str
    type: FieldType


class TableConfig(Part, frozen=True):
    """``[[table]]``.

    Attributes:
        name: in statements.
        path: a file or glob of Parquet, CSV or JSON Lines (by its ending); or uri: of a SQLite or
            PostgreSQL database (``sqlite:///PATH``, ``postgresql://...``), with remote: the
            table's name there.
        columns: types by name, where the source has none (CSV, JSON Lines, databases).
        unit_column, unit_via, public: exactly one of them.
    """

    name: str
    path: str | None = None
    uri: str | None = None
    remote: str | None = None
    columns: dict[str, str] | None = None
    unit_column: str | None = None
    unit_via: Via | None = None
    public: bool = False


class CatalogFile(Part, frozen=True):
    """The whole file."""

    ledger: LedgerConfig
    unit: UnitConfig
    table: tuple[TableConfig, ...]
    privacy: KeyPlace = KeyPlace()


def load_catalog(path: str | Path) -> Catalog:
    """The catalog of a file; paths in it start from its folder.

    Raises:
        UsageError: unreadable, not TOML, unknown or missing keys, a table or column that is not.
        PolicyError: a table is neither private nor public, or its unit is not the ledger's.
    """
    path = Path(path).absolute()
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise unreadable("catalog", error) from None
    if len(text) > MAX_BYTES:
        raise UsageError("catalog", f"exceeds {MAX_BYTES} bytes", "give a catalog file")
    keep_beside(path)
    catalog = catalog_of(parse_toml(text), path.parent, path)
    keep_beside(catalog.ledger.path, path)
    return catalog


def catalog_of(tables: dict[str, Any], folder: Path, path: Path | None = None) -> Catalog:
    """The catalog of decoded TOML, of a file if it is in one; raises as `load_catalog` does."""
    refuse_limit(tables)
    try:
        file = msgspec.convert(tables, CatalogFile)
    except msgspec.ValidationError as error:
        raise_decode_error(error, CatalogFile)
    _check_ledger(file)
    if not 1 <= len(file.table) <= MAX_TABLES:
        raise UsageError("table", f"must be 1 to {MAX_TABLES} tables", "add [[table]]")
    named_tables: dict[str, Table] = {}
    for number, config in enumerate(file.table):
        table = _table(f"table[{number}]", config, file.unit, folder)
        if table.name in named_tables:
            raise UsageError(f"table[{number}].name", "is there twice", "choose another name")
        named_tables[table.name] = table
    for number, table in enumerate(named_tables.values()):
        _check_path(f"table[{number}]", table, named_tables, file.unit)
    _refuse_both(named_tables)
    named_tables = {name: _with_units(table, named_tables) for name, table in named_tables.items()}
    ledger = msgspec.structs.replace(file.ledger.place(folder, path), unit=file.unit.name)
    unit = UnitIdentity(file.unit.name, file.unit.type)
    return Catalog(unit, named_tables, ledger, file.privacy.below(folder), folder)


def _refuse_both(tables: dict[str, Table]) -> None:
    """Refuse what is private under one name and public under another.

    Raises:
        PolicyError: see above.
    """
    private = {f"table {table.name}": table for table in tables.values() if table.unit is not None}
    public = {f"table {table.name}": table for table in tables.values() if table.unit is None}
    if private and public:
        refuse_both(
            {name: identities(table) for name, table in private.items()},
            {name: identities(table) for name, table in public.items()},
        )


def _check_ledger(file: CatalogFile) -> None:
    if not file.unit.name or "\0" in file.unit.name:
        raise UsageError("unit.name", "must not be empty", "write a name")
    if file.ledger.unit not in (None, file.unit.name):
        raise UsageError("unit.name", "differs from unit.name", "omit it")


def _table(where: str, config: TableConfig, unit: UnitConfig, folder: Path) -> Table:
    name = config.name.lower()
    if not name.isidentifier() or not name.isascii() or name == RELEASED:
        raise UsageError(
            f"{where}.name", "is not a usable name", "use letters, digits and _, not 'released'"
        )
    choices = [config.unit_column is not None, config.unit_via is not None, config.public]
    if sum(choices) != 1:
        raise PolicyError(
            where,
            "must be either private or public: it says neither, or both",
            "give one of unit_column, unit_via and public = true",
        )
    kind, place = kind_of(where, config.path, config.uri, folder)
    if config.remote is not None and config.uri is None:
        raise UsageError(f"{where}.remote", "is for databases", "omit it")
    columns = file_columns(where, kind, place, config.columns)
    owner = config.unit_column.lower() if config.unit_column is not None else None
    if owner is not None and owner not in columns:
        raise UsageError(f"{where}.unit_column", "is no column of it", closest(owner, columns))
    if owner is not None and columns[owner] != UNIT_TYPES[unit.type]:
        raise PolicyError(
            f"{where}.unit_column",
            "has another type than the unit",
            f"the unit is of type '{unit.type}'; correct unit.type or name another column",
        )
    via = config.unit_via
    if via is not None:
        pairs = tuple((a.lower(), b.lower()) for a, b in via.on)
        via, owner = Via(via.table.lower(), pairs), unit.name.lower()
    remote = (config.remote or config.name) if config.uri is not None else None
    return Table(name, kind, place, columns, owner, via, remote)


def _check_path(where: str, table: Table, tables: dict[str, Table], unit: UnitConfig) -> None:
    """The path ends at a table with a unit column, its columns exist and have one type."""
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
    if at.unit is None:
        raise PolicyError(field, "leads to a public table", "name a private table")
    parent = tables[table.via.table]
    if not table.via.on or len({key for _, key in table.via.on}) < len(table.via.on):
        raise UsageError(f"{field}.on", "has no columns, or one twice", "write [[column, key]]")
    for column, key in table.via.on:
        if column not in table.columns or key not in parent.columns:
            raise UsageError(f"{field}.on", "names a column that is not there", "correct it")
        if table.columns[column] != parent.columns[key] or table.columns[column] in _NO_KEY:
            raise UsageError(
                f"{field}.on", "has columns of two types, or floats", "give both one type"
            )


def _with_units(table: Table, tables: dict[str, Table]) -> Table:
    """The table with all columns that are its rows' unit."""
    return msgspec.structs.replace(table, units=tuple(sorted(_units(table, tables))))


def _units(table: Table, tables: dict[str, Table]) -> set[str]:
    if table.unit is None:
        return set()
    if table.via is None:
        return {table.unit}
    above = _units(tables[table.via.table], tables)
    return {table.unit} | {column for column, key in table.via.on if key in above}
