"""The tables that statements can name: those of a data set, their owners, and the account.

A private table has its unit in a column, or by a path of foreign keys: a row's unit is that of the
one row of the named table whose key it holds.  That a key names one row is part of the neighbour
relation (see `keys.check_keys`): the data sets that protect a unit are those in which every key is
unique.  A table with ``unit_via`` has the unit in a column more, of the unit's name.  How it is
written down: `load`.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from sqlglot import exp

from dpstream.accounting.plan.unit import UnitIdentity
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.pipelines.project.sections import Via
from dpstream.pipelines.tables.columns import UNIT_TYPES
from dpstream.state.ledger.open import AccountPlace, file_of

#: What a released relation is called where its answer is worked on.
RELEASED = "released"
_KINDS = {
    "INT64": exp.DType.BIGINT,
    "FLOAT64": exp.DType.DOUBLE,
    "NUMERIC": exp.DType.DECIMAL,
    "BOOL": exp.DType.BOOLEAN,
    "STRING": exp.DType.TEXT,
    "BYTES": exp.DType.VARBINARY,
    "DATE": exp.DType.DATE,
    "TIMESTAMP": exp.DType.TIMESTAMPTZ,
    "DATETIME": exp.DType.TIMESTAMP,
}


class Table(msgspec.Struct, frozen=True):
    """One table, checked.

    Attributes:
        name: in statements, lower case; kind: ``parquet``, ``csv``, ``jsonl``, ``sqlite`` or
            ``postgresql``; place: absolute path or glob, or the database's address.
        remote: the table's name in a database.
        columns: SQL types by name in lower case, as the source has them.
        unit: the column of the unit, also where it comes by a path; ``None`` if public.
        via: the path, if the unit comes by one.
        units: all columns that are the unit: of a path that ends in the unit column too.
        fields: names of the columns as the project file writes them; objects of JSON have them.
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


@dataclasses.dataclass(frozen=True)
class Tables:
    """The tables that statements can name.

    Attributes:
        unit: the ledger's identity of the unit, without a period.
        tables: by name.
    """

    unit: UnitIdentity
    tables: dict[str, Table]

    @property
    def schema(self) -> dict[str, dict[str, str]]:
        """Columns with types that statements can name, by table."""
        unit = {self.unit.name.lower(): UNIT_TYPES[self.unit.type]}
        return {
            name: table.columns | (unit if table.via is not None else {})
            for name, table in self.tables.items()
        }

    @functools.cached_property
    def types(self) -> dict[str, dict[str, exp.DType]]:
        """The same as types of the dialect."""
        return {
            name: {column: _KINDS[kind] for column, kind in columns.items()}
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
    written = table.kind == "jsonl" and any(field not in table.columns for field in table.fields)
    spelled = {"fields": list(table.fields)} if written else {}  # other fields are other rows
    return spelled | {
        "name": table.name,
        "kind": table.kind,
        "remote": None if table.unit is None else table.remote,
        "columns": table.columns,
        "unit": table.unit,
        "units": list(table.units),
        "via": None if via is None else {"table": via.table, "on": [list(p) for p in via.on]},
    }
