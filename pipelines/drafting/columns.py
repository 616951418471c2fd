"""The columns of a data file: a Parquet schema, the header of a CSV file; no row is read.

JSON Lines have no schema, and the names in a line are of that row: none are known here.
"""

import codecs
import re
from pathlib import Path
from typing import NamedTuple

import msgspec
import pyarrow as pa

from dpstream.accounting.errors import UsageError
from dpstream.accounting.fields import FieldType
from dpstream.accounting.places import (
    COLUMNAR,
    ENDINGS,
    READ_SUFFIXES,
    FileKind,
    check_path,
    file_kind,
    matching,
)
from dpstream.dp_transforms.ingest.columns import identity_kind, named_columns, value_type
from dpstream.pipelines.formats.columnar import schema_of
from dpstream.pipelines.formats.compression import (
    plain_by_name,
    refuse_packed_parquet,
)
from dpstream.pipelines.formats.lines import BrokenFileError
from dpstream.pipelines.formats.texts import COMMAS, csv_header
from dpstream.pipelines.project.sections import CsvSection
from dpstream.pipelines.tables.catalog import UNIT_TYPES, sql_type
from dpstream.state.disk_errors import file_errors

FIELD = "FILE"
#: Longer "names" are a row's values.
_LONGEST_NAME = 64
#: The marks that texts of UTF-16 begin with.
_UTF_16 = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}
#: What else separates fields.
_SIGN = re.compile(r"[;\t|]")
#: What is no name: a number, a time, an address, a UUID; a file without header begins so.
_VALUE = re.compile(r"[+-]?[0-9][0-9.,:TZ +/-]*|.*@.*|[0-9a-fA-F-]{32,36}|(?i:true|false|null|nan)")


class Column(NamedTuple):
    """One column, as its schema has it.

    Attributes:
        name: name of the column in the input.
        identity: the column's type as unit or key, ``None`` where it can be neither.
        time: whether it can be a time: ``instant``, ``text``, or ``ticks`` for numbers, which need
            a unit; ``None``: it cannot.
        number: whether it can be a value.
        sql: the type that statements read it as; ``None``: they cannot.
        listed: whether an error may list it: in a text file that has no header its name is data.
    """

    name: str
    identity: FieldType | None
    time: str | None
    number: bool
    sql: str | None = "STRING"
    listed: bool = True


class DataFile(NamedTuple):
    """A file, or the first of a pattern.

    Attributes:
        given: the path or pattern, as it was given.
        first: the file whose schema was read.
        kind: of the source.
        columns: in order; ``None``: there is no schema (JSON Lines).
        csv: how it is written, if it is CSV.
    """

    given: str
    first: Path
    kind: FileKind
    columns: tuple[Column, ...] | None
    csv: CsvSection = COMMAS


def data_file(given: str, csv: CsvSection = COMMAS) -> DataFile:
    """Return the columns of a file, or of the first file of a pattern.

    Args:
        csv: how it is written, if it is CSV; another delimiter is seen in its first line, and
            UTF-16 by its mark.

    Raises:
        UsageError: no such file, a kind that is not read, or no schema in it.
        RunError: the operating system cannot read it.
    """
    first = _first(given)
    kind = file_kind(first.name)
    if kind is None:
        raise UsageError(
            FIELD,
            f"must end in {', '.join(ENDINGS)}; text also packed: {', '.join(READ_SUFFIXES)}",
            "rename it, or convert it: in DuckDB COPY (FROM 'FILE') TO 'data.parquet'",
        )
    with file_errors(FIELD, "cannot be read"):
        if kind in COLUMNAR:
            return DataFile(given, first, kind, _of_schema(first, kind))
        if kind == "csv":
            return DataFile(given, first, kind, *_of_csv(first, csv))
        with open(first, "rb"):
            return DataFile(given, first, kind, None)


def is_file(given: str) -> bool:
    """Return whether a text is the path of one file, even if it looks like a pattern."""
    return Path(given).is_file()


def _first(given: str) -> Path:
    check_path(given, FIELD)
    if is_file(given):
        return Path(given)
    if Path(given).is_dir():
        raise UsageError(FIELD, "is a folder", f"name its files: '{Path(given) / '*.parquet'}'")
    with file_errors(FIELD, "has a folder that cannot be listed"):
        paths = [p for p in sorted(matching(given)) if Path(p).is_file()]
    if not paths:
        raise UsageError(
            FIELD, f"matches no file below {Path.cwd()}", "correct the path; quote a pattern"
        )
    return Path(paths[0])


def _of_schema(path: Path, kind: FileKind) -> tuple[Column, ...]:
    try:
        schema = schema_of(str(path), kind)
    except OSError as error:
        if error.errno is not None:
            raise
        schema = None
    except pa.ArrowException:
        schema = None
    if schema is None:
        refuse_packed_parquet(str(path), FIELD, "it")
        rule = f"is no readable {kind.capitalize()} file"
        raise UsageError(FIELD, rule, "make it again, or correct the path")
    leaves = (each for each in named_columns(schema) if not pa.types.is_struct(each.type))
    return tuple(column_of(leaf.name, leaf.type) for leaf in leaves)


def _of_csv(path: Path, csv: CsvSection) -> tuple[tuple[Column, ...], CsvSection]:
    with open(path, "rb") as raw:
        try:
            mark = plain_by_name(raw, str(path), "csv").read(2)
            if mark in _UTF_16 and csv.encoding == "utf-8":
                csv = msgspec.structs.replace(csv, encoding=_UTF_16[mark])
            raw.seek(0)
            names = csv_header(plain_by_name(raw, str(path), "csv"), csv) or []
            if len(names) == 1 and csv.delimiter == "," and (sign := _SIGN.search(names[0])):
                raw.seek(0)
                csv = msgspec.structs.replace(csv, delimiter=sign[0])
                names = csv_header(plain_by_name(raw, str(path), "csv"), csv) or []
        except BrokenFileError:
            raise UsageError(
                FIELD,
                f"cannot be unpacked, as one file, from any of {' '.join(READ_SUFFIXES)}",
                "make it again, or unpack it",
            ) from None
    fix = (
        "write one, such as user,page,time; or give --csv names=user,page,time, and --csv "
        "skip_rows=2 if lines stand before it; or --csv encoding=cp1252 if it is not UTF-8"
    )
    if not names:
        raise UsageError(FIELD, "has no first line with the names of its columns", fix)
    if any(len(n) > _LONGEST_NAME or not n.strip() or _VALUE.fullmatch(n.strip()) for n in names):
        raise UsageError(FIELD, "its first line looks like values, not like names of columns", fix)
    return tuple(text_column(name) for name in names), csv


def text_column(name: str) -> Column:
    """Return a column of a text file: whatever is asked of it, its texts are read as that."""
    return Column(name, "string", "text", True, listed=False)


def column_of(name: str, kind: pa.DataType) -> Column:
    """Return the possible roles in a job of a column of an Arrow type."""
    of, is_real = identity_kind(kind, null=None), pa.types.is_floating(value_type(kind))
    identity = next((each for each in UNIT_TYPES if each == of), None)
    time = "ticks" if is_real else _TIMES.get(of or "")
    return Column(name, identity, time, is_real or of in ("int", "decimal"), sql_type(kind))


#: What a time of each kind of values is.
_TIMES = {"timestamp": "instant", "date": "instant", "string": "text", "int": "ticks"}
