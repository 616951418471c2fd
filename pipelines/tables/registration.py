"""Registration of a catalog: its files, types and declared keys are checked, and a note is stored.

**Declared keys.**  A table whose rows get their unit by a foreign key is private only among data
sets in which every declared key is unique (`ownership`).  Whether that holds is a fact about the
data, so it is not for an answer to say: the data's owner checks it, by ``dpstream sql --check``,
before anybody asks.  What may be said there, and why:

* The owner sees all rows anyway; the check is part of publishing the tables, not a question.
* A new question only learns whether a note for these very files is there; one that was answered is
  answered again without a look.  Among the data sets that the guarantee is about (all keys unique)
  the check has one outcome, so that neither it nor the note tells two neighbours apart; that files
  changed since is told by their change alone.
* So a question never runs the check itself: its refusal would say, for free and as often as
  somebody asks, whether a key is there twice.

A note is a MAC, under the secret, of the table's contents, types and key columns: it cannot be
made without the secret, fits no other contents, and says nothing of them.  Notes lie in a file
beside the account.  Rows of a server can change without a mark: there a key counts as unique
only if the server itself keeps it so, by a constraint, and the values are unique as the catalog
reads them.

A declared key of a server is unique as statements see it only if no two of its values become one
by the declared type; so a key of decimals has at most as many digits behind the point as those
have.  In the other types below different values of the server stay different.

**Files.**  Before declared keys every file is looked at for lines that are no rows, and for texts
that are not UTF-8.  A question reads such files too, for an error would tell of the rows: the line
is dropped, the text is NULL.  The check is for the owner of the data, before anybody asks: it names
the first such row, and no value.

**Names and types** of columns are as the catalog says, which is looked at before a charge.  A
column that is not there, or is of a type that the declared one has no value of, would fail, or be
NULL in every row, when the question is paid.  Only headers, footers and a server's own description
of its columns are read, no row, so that `sql.explain` does it too; a question also unpacks
compressed files to their end.
"""

import codecs
import contextlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pyarrow as pa

from dpstream.accounting.errors import PolicyError, RunError, UsageError, refuse_first
from dpstream.accounting.places import COLUMNAR, FILE_KINDS, FileKind
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.pipelines.formats.compression import plain_by_name
from dpstream.pipelines.formats.dialect import recoded
from dpstream.pipelines.formats.lines import BrokenFileError
from dpstream.pipelines.formats.parquet import coded_batches, number_of_groups
from dpstream.pipelines.formats.rows import FAULTS, Reason, Refused
from dpstream.pipelines.tables.arrow import parts_of
from dpstream.pipelines.tables.catalog import Catalog, Table, canonical
from dpstream.pipelines.tables.databases import ServerColumn, enforces_unique, server_columns
from dpstream.pipelines.tables.engine import Engine
from dpstream.pipelines.tables.files import (
    check_columns,
    files_of,
    names_of,
    stamps,
    table_parts,
    unreadable,
)
from dpstream.state.disk_errors import file_errors
from dpstream.state.durable import PRIVATE, replacing
from dpstream.state.locks import held

_BLOCK, _ANEW = 1 << 22, "write the file anew"


def check_files(table: Table) -> None:
    """Refuse a table with a malformed file; a database's has none.

    Raises:
        RunError: a file is malformed; says the table and the rule, and no value.
    """
    if table.kind not in FILE_KINDS:
        return
    fault = _columnar(table) if table.kind in COLUMNAR else _text(table)
    if fault is not None:
        problem, fix = fault
        raise RunError(f"table {table.name}", f"has a malformed file: {problem}", fix)


def _columnar(table: Table) -> tuple[str, str] | None:
    """Return what is wrong with a file of columns, and the fix: readers take UTF-8 for granted."""
    kind = cast(FileKind, table.kind)
    try:
        for path in files_of(table):
            names = names_of(table, path)
            for group in range(number_of_groups(path, kind)):
                with coded_batches(path, names, group, kind) as (_, batches):
                    for batch in batches:
                        batch.validate(full=True)
    except MemoryError:
        raise
    except (OSError, pa.ArrowException, UnicodeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise unreadable(table, error) from None
        return "a text is not UTF-8, or a page cannot be read", _ANEW
    return None


def _text(table: Table) -> tuple[str, str] | None:
    """Return the first line that a question drops, or the first text that is NULL, and the fix."""
    for path in files_of(table):
        try:
            with open(path, "rb") as raw:
                decoder = codecs.getincrementaldecoder("utf-8")()
                stream = recoded(plain_by_name(raw, path, table.kind), table.reading.csv.encoding)
                while block := stream.read(_BLOCK):
                    decoder.decode(block)
                decoder.decode(b"", final=True)
        except UnicodeError:
            return "a text is not UTF-8", _ANEW
        except BrokenFileError:
            return "it cannot be unpacked", _ANEW
        except OSError as error:
            raise unreadable(table, error) from None
        for part in parts_of(table, path):
            if isinstance(part, Refused):
                problem, fix = FAULTS[Reason(part.reasons[0])]
                where = f"row {part.offsets[0]:,}, from 0 without header and blank lines"
                return f"{where}: {problem}", fix
    return None


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


def require_fitting(catalog: Catalog, names: Iterable[str], unpacked: bool = True) -> None:
    """Refuse a question whose tables are not what the catalog says.

    Args:
        unpacked: see `files.check_columns`.

    Raises:
        DpstreamError: one is not, or cannot be looked at; names the table and the column.
    """
    for name in sorted(names):
        table = catalog.tables[name]
        if table.kind in FILE_KINDS:
            check_columns(table, files_of(table), unpacked)
            continue
        keys = {
            column
            for table_name, columns in catalog.declared_keys
            if table_name == name
            for column in columns
        }
        there = server_columns(table)
        for column in table.columns:
            _check(table, column, there.get(column), column in keys)


def _check(table: Table, column: str, there: ServerColumn | None, key: bool) -> None:
    where = f"table {table.name}, column {column}"
    if there is None:
        raise UsageError(where, "is not there", "correct `remote` and `columns` of the table")
    declared = table.columns[column]
    if table.kind == "sqlite":
        # What SQLite's types make of every value that a column takes.
        never = {"INT64": ("text", "real"), "FLOAT64": ("text",)}.get(declared, ())
        unfit = there.type in never
        fits = "STRING" if there.type == "text" else "FLOAT64"
    else:
        fits = _AS.get(there.type, "STRING")
        unfit = declared not in ("STRING", fits, *_WIDER.get(fits, ()))
    rounds = there.type == "numeric" and (there.digits is None or there.digits > _DIGITS)
    refuse_first(
        (
            unfit,
            UsageError(
                where,
                f"is declared {declared}, but its database has {fits} there",
                f"declare it as {fits}",
            ),
        ),
        (
            table.kind == "postgresql" and key and declared == "NUMERIC" and rounds,
            PolicyError(
                where,
                f"is a key whose values are told apart beyond {_DIGITS} digits behind the point",
                "declare it as STRING",
            ),
        ),
    )


# Declared keys are unique: checked when a catalog is registered.
#
# A row whose unit comes by a foreign key belongs to the unit of *the* row with that key.  Were two
# rows to have one key, of two units, a row would have two owners, and removing one unit would move
# rows of the other.  So uniqueness is part of the neighbour relation: data sets are neighbours if
# keys are unique in both (removing a unit keeps them unique).  The answer, whether a key is
# unique, is a fact about the data; it is told to whoever registers the catalog (`registration`),
# never to an analyst.


def check_keys(catalog: Catalog, read: Callable[[str], Iterable[pa.RecordBatch]]) -> None:
    """Check that no declared key is there twice among the rows of its table.

    Args:
        catalog: the catalog that declares the keys.
        read: the batches of a table, by its name in the catalog; asked once for each key, and
            only the key's columns are used.  Names of columns may differ in case.

    Raises:
        PolicyError: a key is not unique; names the table, never a key.
    """
    for table, columns in catalog.declared_keys:
        batches = [_columns(batch, columns) for batch in read(table)]
        if not batches:
            continue
        rows = pa.Table.from_batches(batches).drop_null()
        if rows.group_by(list(columns)).aggregate([]).num_rows < rows.num_rows:
            raise PolicyError(
                f"table {table}",
                f"has rows that share a key ({', '.join(columns)}), which is declared unique",
                "name a unique key in unit_via, or give the table a unit_column",
            )


def _columns(batch: pa.RecordBatch, columns: tuple[str, ...]) -> pa.RecordBatch:
    places = {name.lower(): place for place, name in enumerate(batch.schema.names)}
    return pa.RecordBatch.from_arrays([batch.column(places[c]) for c in columns], names=columns)


#: Notes that are kept, the newest: of the catalogs of a data set, and of states of their files.
MAX_NOTES = 10_000
Key = tuple[str, tuple[str, ...]]


def register(catalog: Catalog) -> tuple[list[dict[str, Any]], list[Key]]:
    """Check a catalog's files and its declared keys, and note that the keys were.

    Returns:
        Of each table name, kind, and who owns the rows (``public``, a column or a path); and
        (table, key columns), each unique.  All of it is public.

    Raises:
        PolicyError: a key is there twice, or a server does not keep it unique; names the table,
            never a key.
        RunError: a table cannot be read, has a malformed file, or changed meanwhile; the note
            cannot be written.
    """
    keys = catalog.declared_keys
    names = {table for table, _ in keys}
    require_fitting(catalog, catalog.tables)
    for table in catalog.tables.values():
        check_files(table)
    with catalog.secret.ring() as ring:
        before = stamps(catalog, names)
        contents = {name: table_parts(catalog.tables[name]) for name in names}
        notes = {key: _note(ring, catalog.tables[key[0]], key, contents[key[0]]) for key in keys}
    notebook = catalog.notebook
    _change_notes(notebook, set(notes.values()), [])
    for table_name, columns in keys:
        if not _still_unique(catalog.tables[table_name], columns):
            raise PolicyError(
                f"table {table_name}",
                f"has no constraint that keeps its key ({', '.join(columns)}) unique",
                "give it a primary key or a unique constraint there",
            )
    with Engine(catalog, names) as engine:
        check_keys(catalog, lambda name: _batches(engine, catalog, name))
    if stamps(catalog, names) != before:
        raise RunError("table", "has a file that changed while it was read", "check again")
    _change_notes(notebook, set(), list(notes.values()))
    return [_notes(catalog, table) for table in catalog.tables.values()], keys


def require_registered(
    catalog: Catalog, names: Iterable[str], ring: KeyRing, contents: dict[str, list[bytes]]
) -> None:
    """Refuse a question whose tables have keys that were not checked as they are now.

    Args:
        names: the tables it reads, with those that own their rows; contents: their parts.

    Raises:
        PolicyError: they were not.
    """
    keys = [key for key in catalog.declared_keys if key[0] in set(names)]
    if not keys:
        return
    with file_errors("account.path", "has notes of declared keys that cannot be read"):
        notes = set(_read(catalog.notebook))
    for table, columns in keys:
        note = _note(ring, catalog.tables[table], (table, columns), contents[table])
        if note not in notes or not _still_unique(catalog.tables[table], columns):
            raise PolicyError(
                f"table {table}",
                f"has a key ({', '.join(columns)}) that was not checked since its files changed",
                "run `dpstream sql --check`, which the owner of the data does",
            )


def _still_unique(table: Table, columns: tuple[str, ...]) -> bool:
    """Whether a server still keeps a key unique; files are compared by their contents."""
    return table.kind != "postgresql" or enforces_unique(table, columns)


def _note(ring: KeyRing, table: Table, key: Key, contents: list[bytes]) -> str:
    public = msgspec.json.encode(canonical(table), order="sorted")
    return ring.source_fingerprint([b"sql key", public, msgspec.json.encode(key[1]), *contents])


def _batches(engine: Engine, catalog: Catalog, name: str) -> Iterator[pa.RecordBatch]:
    """The rows of a table's key columns, as statements see them."""
    needed = sorted(
        {c for table, columns in catalog.declared_keys if table == name for c in columns}
    )
    items = ", ".join(f'"{column}"' for column in needed)
    yield from engine.run(f'SELECT {items} FROM "{name}"').to_batches()


def _notes(catalog: Catalog, table: Table) -> dict[str, Any]:
    owner: Any = "public" if table.unit is None else {"unit_column": table.unit}
    if table.via is not None:
        owner = {"unit_via": table.via.table, "on": [list(pair) for pair in table.via.on]}
    return {"table": table.name, "kind": table.kind, "rows_of": owner}


def _read(path: Path) -> list[str]:
    """The notes; what is no note fits nothing and is dropped.

    Raises:
        OSError: they cannot be read.
    """
    with contextlib.suppress(FileNotFoundError, ValueError):
        notes = json.loads(path.read_text(encoding="ascii"))
        if isinstance(notes, list):
            return [note for note in notes if isinstance(note, str)]
    return []


def _change_notes(path: Path, removed: set[str], added: list[str]) -> None:
    """Remove and add notes in one file; two checks at once lose none of each other's notes."""
    with (
        file_errors("account.path", "has a folder that cannot be written"),
        held(Path(f"{path}.lock")),
    ):
        notes = [note for note in _read(path) if note not in removed] + added
        with replacing(path, PRIVATE) as draft:
            draft.write_text(json.dumps(notes[-MAX_NOTES:], indent=0), encoding="ascii")
