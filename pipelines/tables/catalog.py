"""The tables that statements can name: their places, columns and owners, and the account.

**Columns.**  A schema is read without reading a row.  Parquet says its types.  CSV, JSON Lines and
databases have them declared in the catalog: a type that is guessed from rows would tell something
about them, and could change with one row.

**Owners.**  A private table has its unit in a column, or by a path of foreign keys: a row's unit is
that of the one row of the named table whose key it holds.  That a key names one row is part of the
neighbour relation (see `registration.check_keys`): the data sets that protect a unit are those in
which every key is unique.  A table with ``unit_via`` has the unit in a column more, of the unit's
name.  How it is written down: `load`.
"""

import dataclasses
import functools
import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from dpstream.accounting.errors import UsageError, refuse_first, required
from dpstream.accounting.fields import FieldType
from dpstream.accounting.places import (
    COLUMNAR,
    ENDINGS,
    FILE_KINDS,
    FileKind,
    check_path,
    file_kind,
    matching,
)
from dpstream.accounting.plan.unit import UnitIdentity
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.pipelines.project.dialect import PLAIN, Reading
from dpstream.pipelines.project.sections import Via
from dpstream.state.disk_errors import decode_error, file_errors
from dpstream.state.ledger.open import AccountPlace, file_of

if TYPE_CHECKING:
    import pyarrow as pa
    from sqlglot import exp

#: Types of columns, as statements name them, with DuckDB's names of them.
TYPES = {
    "INT64": "BIGINT",
    "FLOAT64": "DOUBLE",
    "NUMERIC": "DECIMAL(38, 9)",
    "BOOL": "BOOLEAN",
    "STRING": "VARCHAR",
    "BYTES": "BLOB",
    "DATE": "DATE",
    "TIMESTAMP": "TIMESTAMPTZ",
    "DATETIME": "TIMESTAMP",
}
#: The SQL type of a unit of each type that can be an account's unit.
UNIT_TYPES: dict[FieldType, str] = {
    "int": "INT64",
    "string": "STRING",
    "bool": "BOOL",
    "bytes": "BYTES",
}
MAX_COLUMNS = 1024
#: The number of a row in its batch, a column of the program in streams: no column of a table is
#: called so.  The digest of a stream's query has the name.
ROW = "row number"
#: Names of columns, which statements write in backticks where they are no plain words; a path into
#: a struct has points.  Quotes and the colon of the program's other columns are in none.
_NAME = re.compile(r"\w[\w. /()#%&+$€°-]*")
_URIS = {"sqlite": "sqlite", "postgresql": "postgresql", "postgres": "postgresql"}


def kind_of(
    where: str, path: str | None, uri: str | None, folder: Path, file_format: str | None = None
) -> tuple[str, str]:
    """Return kind and place of a table: an absolute path or glob, or a database's address.

    A relative path, SQLite's too, starts from the project's folder.

    Args:
        file_format: of the files, where the path's ending does not tell.

    Raises:
        UsageError: neither or both are given, or of no known kind.
    """
    if (path is None) == (uri is None):
        raise UsageError(where, "needs a path or a uri", "give one of them")
    if uri is not None:
        kind = _URIS.get(uri.partition(":")[0].lower())
        if kind is None:
            raise UsageError(
                f"{where}.uri",
                "is of no known kind",
                "write sqlite:///PATH or postgresql://HOST/DATABASE",
            )
        if kind == "sqlite":
            return kind, f"sqlite:///{folder / sqlite_file(uri)}"
        return kind, uri
    path = required(path, "path is there")
    check_path(path, f"{where}.path")
    files = file_format or file_kind(path)
    if files not in FILE_KINDS or "\0" in path:
        raise UsageError(f"{where}.path", "is of no known kind", f"use {', '.join(ENDINGS)}")
    return files, str(folder / path)


def sqlite_file(uri: str) -> str:
    """Return the file of a SQLite address."""
    for prefix in ("sqlite:///", "sqlite:"):
        if uri[: len(prefix)].lower() == prefix:
            return uri[len(prefix) :]
    return uri


def file_columns(
    where: str, kind: str, place: str, declared: dict[str, str] | None
) -> dict[str, str]:
    """Return the types of a table's columns by name in lower case.

    Raises:
        UsageError: a type is not known, none are known, or two names differ in case only.
    """
    if kind in COLUMNAR and declared is None:
        declared = _of_schema(where, place, kind)
    if not declared or len(declared) > MAX_COLUMNS:
        raise UsageError(
            f"{where}.columns",
            f"must name 1 to {MAX_COLUMNS} columns with their types: {kind} says none",
            f'write columns = {{ NAME = "TYPE", ... }} into [{where}], for each column that a '
            "statement reads: STRING, INT64, FLOAT64, BOOL, DATE, TIMESTAMP",
        )
    types, field = {n.lower(): kind.upper() for n, kind in declared.items()}, f"{where}.columns"
    letters = "use letters, digits, spaces and _ . /()#%&+$€°- (beyond ASCII, lower case only)"
    refuse_first(
        (len(types) < len(declared), UsageError(field, "differ in case only", "rename one")),
        (
            not all(map(_is_usable, declared)),
            UsageError(field, "have unusable names", letters),
        ),
        (
            set(types.values()) - TYPES.keys(),
            UsageError(field, "have an unknown type", f"use {', '.join(sorted(TYPES))}"),
        ),
    )
    return types


def usable_names(names: Iterable[str]) -> list[str]:
    """Return the column names that statements can use; names that differ in case only are not."""
    names = list(names)
    times = Counter(name.lower() for name in names)
    return [name for name in names if times[name.lower()] == 1 and _is_usable(name)]


def _is_usable(name: str) -> bool:
    """Return whether statements can use a column's name; DuckDB ignores the case of ASCII alone."""
    same = all(character.isascii() or character.lower() == character for character in name)
    return same and _NAME.fullmatch(name) is not None and name.lower() != ROW


def _of_schema(where: str, place: str, file_kind: FileKind) -> dict[str, str]:
    """Columns of the first file by name, from its schema.

    Columns of other types, and names that no statement can write, are left out: they are in the
    file for other readers.
    """
    from pyarrow import ArrowException

    from dpstream.dp_transforms.ingest.columns import named_columns
    from dpstream.pipelines.formats.columnar import schema_of

    with file_errors(f"{where}.path", "has a folder that cannot be listed"):
        files = sorted(matching(place))
    if not files:
        raise UsageError(f"{where}.path", "matches no file", "correct it")
    try:
        schema = schema_of(files[0], file_kind)
    except (OSError, ArrowException) as error:
        other = UsageError(f"{where}.path", f"is not {file_kind.capitalize()}", "correct it")
        raise decode_error(other, error, Path(files[0])) from None
    columns = named_columns(schema)
    names = {*usable_names(column.name for column in columns)}
    types = {column.name: sql_type(column.type) for column in columns if column.name in names}
    return {name: kind for name, kind in types.items() if kind is not None}


def is_unsigned(place: str, column: str, kind: str) -> bool:
    """Return whether a column of the first of some files has unsigned 64-bit numbers."""
    import pyarrow as pa

    from dpstream.dp_transforms.ingest.columns import named_columns
    from dpstream.pipelines.formats.columnar import schema_of

    columns = named_columns(schema_of(min(matching(place)), cast(FileKind, kind)))
    return any(each.name.lower() == column and each.type == pa.uint64() for each in columns)


def sql_type(kind: "pa.DataType") -> str | None:
    """Return the SQL type of an Arrow type; ``None`` if it has none here."""
    import pyarrow.types as of

    from dpstream.dp_transforms.ingest.columns import identity_kind, value_type

    kind = value_type(kind)
    names = {
        "int": "NUMERIC" if of.is_uint64(kind) else "INT64",
        "decimal": "NUMERIC",
        "bool": "BOOL",
        "string": "STRING",
        "bytes": "BYTES",
        "date": "DATE",
        "timestamp": "DATETIME" if getattr(kind, "tz", None) is None else "TIMESTAMP",
    }
    return "FLOAT64" if of.is_floating(kind) else names.get(identity_kind(kind, null=None) or "")


#: What a released relation is called where its answer is worked on.
RELEASED = "released"
#: Names of sqlglot's types.
_KINDS = {
    "INT64": "BIGINT",
    "FLOAT64": "DOUBLE",
    "NUMERIC": "DECIMAL",
    "BOOL": "BOOLEAN",
    "STRING": "TEXT",
    "BYTES": "VARBINARY",
    "DATE": "DATE",
    "TIMESTAMP": "TIMESTAMPTZ",
    "DATETIME": "TIMESTAMP",
}


#: Offsets of time zones until then are part of a question: 2100.
_ALL_TIME = 4_102_444_800_000_000


class Table(msgspec.Struct, frozen=True):
    """One table, checked.

    Attributes:
        name: in statements, lower case; kind: of `places.FILE_KINDS`, ``sqlite`` or
            ``postgresql``; place: absolute path or glob, or the database's address.
        remote: the table's name in a database.
        columns: SQL types by name in lower case, as the source has them.
        unit: the column of the unit, also where it comes by a path; ``None`` if public.
        via: the path, if the unit comes by one.
        units: all columns that are the unit: of a path that ends in the unit column too.
        fields: names of the columns as the project file writes them; objects of JSON have them.
        reading: how files of text are read; its columns are in lower case.
    """

    name: str
    kind: str
    place: str
    columns: dict[str, str]
    unit: str | None = None
    via: Via | None = None
    remote: str | None = None
    units: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    reading: Reading = PLAIN


@dataclasses.dataclass(frozen=True)
class Tables:
    """The tables that statements can name.

    Attributes:
        unit: the ledger's identity of the unit, without a period.
        tables: by name.
        defaults: of options of privacy, by name.
        views: texts of queries by the names that stand for them.
    """

    unit: UnitIdentity
    tables: dict[str, Table]
    defaults: Mapping[str, float] = dataclasses.field(default_factory=dict, kw_only=True)
    views: Mapping[str, str] = dataclasses.field(default_factory=dict, kw_only=True)

    @property
    def schema(self) -> dict[str, dict[str, str]]:
        """Columns with types that statements can name, by table."""
        unit = {self.unit.name.lower(): UNIT_TYPES[self.unit.type]}
        return {
            name: table.columns | (unit if table.via is not None else {})
            for name, table in self.tables.items()
        }

    @functools.cached_property
    def types(self) -> "dict[str, dict[str, exp.DType]]":
        """The same as types of the dialect."""
        from sqlglot import exp  # an extra, which a job's columns do without

        return {
            name: {column: exp.DType[_KINDS[kind]] for column, kind in columns.items()}
            for name, columns in self.schema.items()
        }

    @property
    def declared_keys(self) -> list[tuple[str, tuple[str, ...]]]:
        """(table, key columns) that are declared to be unique, each once."""
        vias = [table.via for table in self.tables.values() if table.via is not None]
        return sorted({(via.table, tuple(sorted(key for _, key in via.on))) for via in vias})


@dataclasses.dataclass(frozen=True)
class Catalog(Tables):
    """A checked catalog: its tables, its account and its secret.

    Attributes:
        ledger: the data set's account.
        secret: where the secret is, a file by its absolute path.
        folder: of the catalog's file.
    """

    ledger: AccountPlace
    secret: SecretSource = dataclasses.field(default_factory=SecretSource)
    folder: Path = Path()

    @property
    def beside(self) -> Path:
        """Folder of what this machine keeps of the data set: the ledger's, or where that is a
        database the catalog's."""
        file = file_of(self.ledger.path)
        return self.folder if file is None else file.parent

    @property
    def notebook(self) -> Path:
        """File of the notes on keys that were checked (`registration`)."""
        file = file_of(self.ledger.path)
        name = self.ledger.path.rpartition("/")[2] if file is None else file.name
        return self.beside / f"{name}.keys"

    def digest(self, names: Iterable[str]) -> str:
        """Return a 128-bit hex digest of the unit and some of the tables, wherever they lie."""
        tables = [canonical(self.tables[name]) for name in sorted(names)]
        encoded = msgspec.json.encode([self.unit.text, tables], order="sorted")
        return hashlib.blake2b(encoded, digest_size=16, person=b"dpstream-sql-cat").hexdigest()


def canonical(table: Table) -> dict[str, Any]:
    """Return a table by frozen names, as JSON-able values, for digests and notes.

    Its place is no part of it: the same tables may lie elsewhere, a public table of a database
    also under another name.
    """
    via = table.via
    written = table.kind in ("json", "jsonl") and any(
        field not in table.columns for field in table.fields
    )
    spelled: dict[str, Any] = {"fields": list(table.fields)} if written else {}  # other rows
    spelled |= {} if table.reading == PLAIN else {"reading": table.reading.text(_ALL_TIME)}
    return spelled | {
        "name": table.name,
        "kind": table.kind,
        "remote": None if table.unit is None else table.remote,
        "columns": table.columns,
        "unit": table.unit,
        "units": list(table.units),
        "via": None if via is None else {"table": via.table, "on": [list(p) for p in via.on]},
    }
