"""Files as relations: the files of a table, and the SELECTs that read them, whole or in pieces.

No row decides how another is read, and a part of a file is read as it is within the whole.  Columns
have the types of the catalog: what does not fit its type is NULL.

**CSV and JSON Lines.**

A line is a row, as for jobs: `formats.texts` reads both, every column as text.  A line that is no
row, or is too long, is lost by itself and changes no other; so is a line break inside quotes,
because one stray quote would take the rows of other units into a field (`registration` tells the
owner).  The header of CSV is public; how a compressed file is recognised: `formats.compression`.

**Parquet.**

How a column is read depends on its file's footer, never on a row.  A failure must not choose
another reader: one text that is not UTF-8 would change what the rows of other units are.  DuckDB
fails at such a text, or changes it: its bytes become question marks, or are left out.  So files
with texts are scanned twice, side by side, and a text is NULL where the two differ.  Such a scan
has one thread; `_lots` divides it.  Files of different types are SELECTs of their own: a type that
they have in common need not hold the values of each (an INT64 in a DOUBLE).

**What tells one state of the files from another.**  A question is known by where its tables lie,
never by their rows.  The content of files is digested only for the notes of declared keys
(`registration`).
"""

import contextlib
import glob
import hashlib
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast
from urllib.parse import parse_qsl, unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq

from dpstream.accounting.errors import DpstreamError, PolicyError, RunError, UsageError
from dpstream.accounting.places import COLUMNAR, FILE_KINDS, FileKind, files_at, matching
from dpstream.dp_transforms.ingest.columns import Named, named_columns
from dpstream.pipelines.formats.columnar import schema_of
from dpstream.pipelines.formats.compression import checked_codec, plain_by_name
from dpstream.pipelines.formats.lines import BrokenFileError
from dpstream.pipelines.formats.parquet import check_whole, refuse_large
from dpstream.pipelines.formats.texts import csv_header
from dpstream.pipelines.tables.catalog import TYPES, Catalog, Table, sqlite_file
from dpstream.state import disk_errors
from dpstream.state.sqlite.database import Subject, has_log, open_file, refused, sqlite3

#: Parameters of a server's address that say how to get in, and nothing of the rows.
_SECRET = ("password", "passfile", "ssl")


def files_of(table: Table) -> list[str]:
    """Return a table's files, sorted; none of a server's.

    Raises:
        UsageError: there is none, or something else of that name.
    """
    if table.kind == "postgresql":
        return []
    if table.kind == "sqlite":
        path = os.path.abspath(sqlite_path(table))
        # What was committed and is not in the file yet.
        return [path, *([f"{path}-wal"] if has_log(path, "wal") else [])]
    with readable(table):
        paths = sorted(matching(table.place))
    paths = [path for path in paths if not os.path.isdir(path)]
    if not paths or not all(map(os.path.isfile, paths)):
        raise no_file(table)
    return [os.path.realpath(path) for path in paths]


def no_file(table: Table) -> UsageError:
    """Return the error for a path that leads to nothing."""
    return UsageError(
        f"table {table.name}", "matches no file, or something that is none", "correct its path"
    )


def errors_of(table: Table) -> list[DpstreamError]:
    """Return everything that is stated about a table's files."""
    kinds = [is_not(table, kind) for kind in ("CSV", "Parquet")]
    missing = [missing_column(table, column) for column in table.columns]
    unread = [unreadable(table, OSError(number, "")) for number in disk_errors.FORESEEN]
    return [no_file(table), *missing, *unread, cut_off(table), *kinds]


def is_not(table: Table, kind: str) -> RunError:
    """Return the error for a file of another kind."""
    return RunError(f"table {table.name}", f"has a file that is not {kind}", "correct it")


def missing_column(table: Table, column: str) -> RunError:
    """Return the error for a file that lacks a column of the catalog.

    It does not quote the file's header, because that line may be a row.
    """
    return RunError(
        f"table {table.name}",
        f"has a file without the column '{column}', or with two of that name",
        f"correct the header of the file, or `columns` of [table.{table.name}]",
    )


def sqlite_path(table: Table) -> str:
    """Return the file of a SQLite address.

    A journal that a killed program left is rolled back first: who only reads cannot do it, and
    the bytes of the file are not its rows before.

    Raises:
        DpstreamError: that is not possible.
    """
    path = sqlite_file(table.place)
    if has_log(path, "journal"):
        try:
            with contextlib.closing(open_file(path)) as db:
                db.execute("SELECT 1 FROM sqlite_master").fetchone()
        except (sqlite3.Error, OSError) as error:
            where, fix = f"table {table.name}", "restore it from a backup"
            damaged = partial(PolicyError, where, "is a damaged database", fix)
            raise refused(Subject(where, "database", damaged), error, path) from None
    return path


def table_parts(table: Table) -> list[bytes]:
    """Return the parts that identify a table's content; they must be keyed before they are kept.

    Raises:
        RunError: a file cannot be read.
    """
    parts = [f"{table.name}\0{table.kind}".encode()]
    if table.kind == "postgresql":
        parts.append(_address(table).encode())
    for path in files_of(table):
        with readable(table), open(path, "rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
            parts.append(f"{file.tell()}\0{digest.hexdigest()}".encode())
    return parts


def place_of(table: Table, folder: Path) -> bytes:
    """Return the place of a table relative to a folder, as a part of a question's identity.

    It has no password, and nothing of rows.
    """
    if table.kind == "postgresql":
        place = _address(table)
    else:
        place = os.path.relpath(sqlite_file(table.place), folder)
    return f"{table.name}\0{table.kind}\0{place}".encode()


def identities(table: Table) -> set[object]:
    """Return the identities of the read files, or of a database's table, however it is named.

    Names of a server's host and of views, and copies of files, are not seen through.
    """
    remote = table.remote or table.name
    if table.kind == "postgresql":
        address = urlsplit(table.place)
        more = dict(parse_qsl(address.query))
        hosts = address.netloc.rpartition("@")[2] or more.get("host", "")
        port = "" if ":" in hosts else f":{more.get('port', 5432)}"
        database = more.get("dbname", address.path.strip("/"))
        name = remote if "." in remote else f"public.{remote}"
        return {(hosts.lower() + port, database, name)}
    with readable(table):
        if table.kind != "sqlite":
            return set(files_at(table.place))
        name = remote.rpartition(".")[2].lower()
        return {(*file, name) for file in files_at(glob.escape(sqlite_file(table.place)))}


def stamps(catalog: Catalog, names: Iterable[str]) -> list[tuple[str, int, int, int, int]]:
    """Return (path, bytes, times of change, inode) of every file: cheap, to notice a change in a
    run.
    """
    out = []
    for name in sorted(names):
        for path in files_of(catalog.tables[name]):
            with readable(catalog.tables[name]):
                status = os.stat(path)
            own = status.st_ctime_ns, status.st_ino  # of a database also who reads it moves them
            of_file = own if catalog.tables[name].kind in FILE_KINDS else (0, 0)
            out.append((path, status.st_size, status.st_mtime_ns, *of_file))
    return out


def _address(table: Table) -> str:
    """All of a server's address that decides which rows there are: no password."""
    address = urlsplit(table.place)
    try:
        host = f"{address.hostname}\0{address.port}"
    except ValueError:  # several hosts
        host = address.netloc.rpartition("@")[2]
    more = [(k, v) for k, v in parse_qsl(address.query, True) if not k.startswith(_SECRET)]
    role = [] if address.username is None else [("user", unquote(address.username))]
    suffix = "".join(f"\0{key}={value}" for key, value in sorted(role + more))
    return f"{host}\0{address.path}\0{table.remote}{suffix}"


def unreadable(table: Table, error: OSError) -> RunError:
    """Return the error for a file that cannot be read."""
    return disk_errors.file_error(f"table {table.name}", "has a file that cannot be read", error)


def cut_off(table: Table) -> RunError:
    """Return the error for a file that cannot be read to its end."""
    return RunError(
        f"table {table.name}",
        "has a file that cannot be unpacked, or not to its end",
        "write the file again",
    )


#: The first that there are.
_FIRST = {
    "DATE": "5877642-06-25 (BC)",
    "TIMESTAMP": "290309-12-22 (BC) 00:00:00+00",
    "DATETIME": "290309-12-22 (BC) 00:00:00",
}


def casts(
    table: Table,
    encoded: Collection[str] = (),
) -> str:
    """Return a table's columns with its types; texts that are units in one spelling (NFC), and
    NULL where they are empty: no row has such a unit (`ingest.columns.unit_identity`).

    Args:
        encoded: columns that are bytes of texts.
    """
    items = []
    for column in table.columns:
        source = quoted(column)
        if column in encoded:
            source = f"TRY(decode({source}))"
        item = _timely(table, column, f"TRY_CAST({source} AS {typed(table, column)})")
        if column in table.units and table.columns[column] == "INT64" and table.kind in TEXTS:
            digits = (
                f"CASE WHEN regexp_full_match({source}, '[+-]?[0-9]{{1,20}}') THEN {source} END"
            )
            item = f"TRY_CAST({_signed(f'TRY_CAST({digits} AS HUGEINT)')} AS BIGINT)"
        if column in table.units and table.columns[column] == "STRING":
            item = f"NULLIF({_normalized(item)}, '')"
        if column in table.units and table.columns[column] == "BYTES":
            item = f"NULLIF({item}, ''::BLOB)"
        items.append(f"{item} AS {quoted(column)}")
    return ", ".join(items)


def _signed(number: str) -> str:
    """Return the signed number of the same 64 bits, as `ingest.columns.unit_identity` reads it."""
    past = f"{number} > {_MOST} AND {number} < {2 * _MOST + 2}::HUGEINT"
    return f"({number} - CASE WHEN {past} THEN {2 * _MOST + 2}::HUGEINT ELSE 0 END)"


_MOST, TEXTS = 2**63 - 1, ("csv", "jsonl", "json")


def _normalized(text: str) -> str:
    """Return the NFC of a text, also of one with NUL.

    DuckDB's function ends at a NUL, and two units would become one.  NUL composes with nothing, so
    that the parts between are normalized alone.
    """
    parts = f"[nfc_normalize(part) FOR part IN string_split({text}, chr(0))]"
    apart = f"array_to_string({parts}, chr(0))"
    return f"CASE WHEN contains({text}, chr(0)) THEN {apart} ELSE nfc_normalize({text}) END"


def _timely(table: Table, column: str, item: str) -> str:
    """NULL for what is no time: a file may hold any bits, and DuckDB fails where it uses them.

    So a filter by time skips no row groups: 0.06 CPU s more for 5M rows.  The bare predicate beside
    it would be evaluated on those bits.
    """
    first = _FIRST.get(table.columns[column])
    if first is None or table.kind in TEXTS:
        return item
    kind = typed(table, column)
    in_range = f"{item} >= {kind} '{first}' OR {item} = {kind} '-infinity'"
    return f"CASE WHEN {in_range} THEN {item} END"


def typed(table: Table, column: str) -> str:
    """Return DuckDB's type of a column; decimals of Parquet keep their own width."""
    kind = table.columns[column]
    if kind == "NUMERIC" and table.kind in COLUMNAR:
        for field in columns_of(table, files_of(table)[0]):
            if field.name.lower() == column and pa.types.is_decimal(field.type):
                if field.type.precision <= 38:
                    return f"DECIMAL({field.type.precision}, {field.type.scale})"
                break
    return TYPES[kind]


def read_parquet(paths: Sequence[str], options: str = "") -> str:
    """Return DuckDB's call that reads these very files.

    A file's columns are its own: by default DuckDB replaces a column ``user`` by the text in a
    folder's name ``user=u1``, which makes one person's rows in 40 folders 40 units.  A file's name
    is no pattern: by default ``rows[1].parquet`` reads ``rows1.parquet``, which may be private.
    """
    escaped = ", ".join(literal(glob.escape(path)) for path in paths)
    return f"read_parquet([{escaped}], hive_partitioning = false{options})"


def allow_paths(paths: Sequence[str]) -> str:
    """Return the statement after which DuckDB reads these files, and no others."""
    both = dict.fromkeys(name for path in paths for name in (path, glob.escape(path)))
    return f"SET allowed_paths = [{', '.join(map(literal, both))}]"


def literal(value: str) -> str:
    """Return a literal of a text."""
    return "'" + value.replace("'", "''") + "'"


def quoted(value: str) -> str:
    """Return a quoted name."""
    return '"' + value.replace('"', '""') + '"'


def names_in(table: Table, path: str) -> list[str]:
    """Return the names of a table's columns as a file of CSV or JSON Lines writes them.

    Of CSV the first line is read, and no byte of a row.  Objects of JSON have the names
    that the project file writes.

    Raises:
        RunError: a file of CSV has not the columns of the catalog, or cannot be read.
    """
    if table.kind != "csv":
        fields = {field.lower(): field for field in table.fields}
        return [fields.get(column, column) for column in table.columns]
    with text_of(table, path) as stream:
        try:
            header = csv_header(stream, table.reading.csv)
        except BrokenFileError:
            header = None
    if header is None:
        raise is_not(table, "CSV")
    places = [name.lower() for name in header]
    for column in table.columns:
        if places.count(column) != 1:
            raise missing_column(table, column)
    return [header[places.index(column)] for column in table.columns]


@contextlib.contextmanager
def text_of(table: Table, path: str) -> Iterator[BinaryIO]:
    """Return the text of a file, unpacked; a context."""
    with readable(table), open(path, "rb") as raw:
        yield plain_by_name(raw, path, table.kind)


@contextlib.contextmanager
def readable(table: Table) -> Iterator[None]:
    """Replace the system's errors about a table's file by `unreadable`; a context."""
    try:
        yield
    except OSError as error:
        raise unreadable(table, error) from None


#: A column that DuckDB's reader of Parquet adds: the number of a row in its file.
_NUMBER = "file_row_number"


class Piece(NamedTuple):
    """A part of a table's files that is read separately.

    Attributes:
        table: the table's name; path: one of its files.
        first, rows: of a Parquet file; no rows: the whole file.
    """

    table: str
    path: str
    first: int = 0
    rows: int = 0


def rows_of(table: Table) -> int:
    """Return about how many rows a table's files hold."""
    rows = 0
    for path in files_of(table):
        with contextlib.suppress(OSError, pa.ArrowInvalid):
            if table.kind == "parquet":
                rows += pq.read_metadata(path).num_rows
            else:
                rows += os.path.getsize(path) // 24
    return rows


class _Layout(NamedTuple):
    """What a Parquet footer says: columns of the table in DuckDB's words, those with texts, types
    of their parts.
    """

    columns: tuple[tuple[str, str], ...]
    texts: frozenset[str]
    types: tuple[tuple[Any, ...], ...]


def _layout(table: Table, path: str) -> _Layout:
    schema = pq.read_metadata(path).schema
    columns, texts, types = dict[str, str](), set[str](), list[tuple[Any, ...]]()
    for each in named_columns(schema.to_arrow_schema()):
        columns.setdefault(each.name.lower(), ".".join(map(quoted, each.path)))
    for part in map(schema.column, range(len(schema))):
        column = part.path.lower()
        if part.max_repetition_level or column not in columns:
            column = column.split(".")[0]
        if column not in table.columns:
            continue
        kind = (part.physical_type, str(part.logical_type), part.converted_type)
        size = (part.length, part.precision, part.scale, part.max_repetition_level)
        types.append((column, part.path.lower(), *kind, *size))
        if kind[0] == "BYTE_ARRAY" and (part.logical_type.type, kind[2]) != ("NONE", "NONE"):
            texts.add(column)
    present = {column: columns[column] for column, *_ in types}
    return _Layout((*present.items(),), frozenset(texts), (*types,))


def parquet_view(table: Table, piece: Piece | None, lots: int) -> str:
    """Return a SELECT of a table's files of Parquet with the catalog's types.

    Args:
        piece: only this part of them.
        lots: about how many threads scan files with texts.
    """
    alike = dict[_Layout, list[str]]()
    for path in files_of(table) if piece is None else [piece.path]:
        alike.setdefault(_layout(table, path), []).append(path)
    return " UNION ALL ".join(
        f"SELECT {casts(table)} FROM ({_rows_query(table, layout, *lot)})"
        for layout, paths in alike.items()
        for lot in _lots(table, paths, piece, lots if layout.texts else 1)
    )


def _lots(
    table: Table, paths: list[str], piece: Piece | None, lots: int
) -> Iterator[tuple[list[str], str]]:
    """Yield (files, condition on the number of a row), which DuckDB scans side by side."""
    if piece is not None:
        yield paths, _rows_of_piece(piece)
        return
    size = -(-len(paths) // lots)
    if size > 1 or lots == 1:
        yield from ((paths[i : i + size], "") for i in range(0, len(paths), size))
        return
    for path in paths:
        meta = pq.read_metadata(path)
        groups = [meta.row_group(i).num_rows for i in range(meta.num_row_groups)]
        each = max(1, -(-len(groups) * len(paths) // lots))
        if each >= len(groups) or not divisible(table, path):
            yield [path], ""
            continue
        for i in range(0, len(groups), each):
            rows = Piece(table.name, path, sum(groups[:i]), sum(groups[i : i + each]))
            if rows.rows:
                yield [path], _rows_of_piece(rows)


def _rows_of_piece(piece: Piece) -> str:
    if not piece.rows:
        return ""
    return f" WHERE {_NUMBER} >= {piece.first} AND {_NUMBER} < {piece.first + piece.rows}"


def _rows_query(table: Table, layout: _Layout, paths: list[str], condition: str) -> str:
    """A SELECT of files of one layout, a text that is not UTF-8 as NULL."""
    more = f", {_NUMBER} = true" if condition else ""

    def read(mode: str) -> str:
        rows = read_parquet(paths, f", union_by_name = true{more}{mode}")
        return f"(FROM {rows}{condition})" if condition else rows

    forms = {column: {logical.upper(), old} for column, _, _, logical, old, *_ in layout.types}
    items, places = [], dict(layout.columns)
    for column, kind in table.columns.items():
        place, stored = places.get(column), forms.get(column, set[str]())
        item = "NULL" if place is None else f"a.{place}"
        if column in layout.texts:
            item = f"CASE WHEN a.{place} = b.{place} THEN a.{place} END"
        if "UINT_64" in stored and kind == "INT64" and column in table.units:
            item = _signed(f"({item})::HUGEINT")
        if "UUID" in stored:
            item = f"unhex(replace({item}::VARCHAR, '-', ''))"
        items.append(f"{item} AS {quoted(column)}")
    source = f"{read('')} AS a"
    if layout.texts:
        replaced, ignored = (
            read(f", utf8_validation = '{mode}'") for mode in ("replace", "ignore")
        )
        source = f"{replaced} AS a POSITIONAL JOIN {ignored} AS b"
    return f"SELECT {', '.join(items)} FROM {source}"


def check_columns(table: Table, paths: Iterable[str], unpacked: bool = True) -> None:
    """Refuse files that have not the columns of the catalog, by their headers and footers, and
    damaged ones.

    Args:
        unpacked: whether compressed texts and pages are read to their end; otherwise no row is.

    Raises:
        RunError: a file has not the columns of the catalog, or none that can be read.
        UsageError: a compressed text cannot be unpacked to its end, or a page is damaged.
    """
    if table.kind in COLUMNAR:
        # Every column is in one of the files: DuckDB has columns of its own for what no file has,
        # among them a row's number in its file, which depends on the rows of other units.
        columns = set[str]()
        for path in paths:
            names = [each.name.lower() for each in columns_of(table, path)]
            for column in table.columns:
                if names.count(column) > 1:
                    raise missing_column(table, column)
            columns |= {*names}
        missing = table.columns.keys() - columns
        if missing:
            raise missing_column(table, min(missing))
        for path in paths if unpacked else ():
            named, where = names_of(table, path), f"table {table.name}"
            with readable(table):
                check_whole(path, named, where, "a file of it", table.kind)
        return
    for path in paths:
        if unpacked:  # one that is not whole would be read as nothing, or not to its end
            with readable(table), open(path, "rb") as raw:
                checked_codec(raw, path, table.kind, f"table {table.name}", "a file of it")
        names_in(table, path)


def names_of(table: Table, path: str) -> list[str]:
    """Return the table's columns as a file with a schema writes them; raises as `columns_of`."""
    return [each.name for each in columns_of(table, path) if each.name.lower() in table.columns]


def columns_of(table: Table, path: str) -> list[Named]:
    """Return the columns of a file with a schema, whose pages DuckDB may decode as they are.

    Raises:
        RunError: it is no file of the table's kind.
        UnpacksTooLargeError: see `refuse_large`.
    """
    try:
        meta = pq.read_metadata(path) if table.kind == "parquet" else None
        kind = cast(FileKind, table.kind)
        schema = schema_of(path, kind) if meta is None else meta.schema.to_arrow_schema()
    except (OSError, pa.ArrowException) as error:
        other = is_not(table, table.kind.capitalize())
        raise disk_errors.decode_error(other, error, Path(path)) from None
    columns = named_columns(schema)
    if meta is not None:
        needed = [each.name for each in columns if each.name.lower() in table.columns]
        refuse_large(meta, needed, f"table {table.name}", "a file of it")
    return columns


def divisible(table: Table, path: str) -> bool:
    """Return whether a Parquet file can be read in pieces: rows have a number in a column of that
    name.
    """
    return _NUMBER not in {each.name.lower() for each in columns_of(table, path)}
