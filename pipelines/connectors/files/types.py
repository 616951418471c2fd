"""Columns and types of files against those that a job declares, before anything is charged.

A schema is public and no row is read.  What is refused is what could give no usable record at all
(the same type fails for every row, see `dp_transforms.ingest.columns`), text in the place of
numbers, and whole numbers as times that nobody has said to be microseconds: their seconds would all
lie in 1970.  CSV and JSON Lines have no types; their rows are judged one by one.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import pyarrow as pa

from dpstream.accounting.errors import UsageError
from dpstream.accounting.fields import Field
from dpstream.accounting.places import COLUMNAR, FileKind
from dpstream.dp_transforms.ingest.columns import identity_kind, named_columns, value_type
from dpstream.pipelines.formats.columnar import schema_of
from dpstream.pipelines.formats.compression import plain_by_name
from dpstream.pipelines.formats.lines import BrokenFileError
from dpstream.pipelines.formats.parquet import check_whole, is_os_error, row_groups
from dpstream.pipelines.formats.texts import csv_header, csv_positions
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.project.sections import CsvSection, TimeColumn
from dpstream.state.disk_errors import file_errors

if TYPE_CHECKING:
    from dpstream.pipelines.connectors.input_files import SourceFile

_types = pa.types


class _Role(NamedTuple):
    """What a job uses a column for.

    Attributes:
        field: of the job, for the error.
        column: name of the column.
        fits: whether a type can be used.
        need: what it needs, in words.
        fix: what to do about a type that cannot.
    """

    field: str
    column: str
    fits: Callable[[pa.DataType], bool]
    need: str
    fix: Callable[[pa.DataType], str]


def check_types(job: Job, files: "Sequence[SourceFile] | None" = None) -> None:
    """Refuse Parquet files whose schema cannot be what the job says, and files that cannot be read.

    The rows of such a file would be missing in what is released.

    Args:
        files: those that are looked at; default: all of the source.

    Raises:
        UsageError: names the field of the job, the column and its type.
    """
    from dpstream.pipelines.connectors.input_files import file_in_words, manifest  # loads Beam

    if job.source.kind == "csv":
        _check_headers(manifest(job) if files is None else files, job.reading.csv)
    kind = cast(FileKind, job.source.kind)
    if kind not in COLUMNAR:
        return
    roles, files = list(_roles(job)), manifest(job) if files is None else files
    for file in files:
        subject = file_in_words(file)
        with file_errors("table.path", "cannot be read"):
            schema = _schema(file.path, kind)
            if schema is None:
                raise UsageError(
                    "table.path",
                    f"{subject} is not readable as {kind.capitalize()}"
                    f"{'' if file.size else ': it has no byte'}",
                    "make it again from its source, take it away, or correct table.format",
                )
            _check_schema(schema, roles, subject)
            row_groups(file.path, job.columns, "table.path", subject, kind)
            check_whole(file.path, job.columns, "table.path", subject, kind)


def _check_schema(schema: pa.Schema, roles: Sequence[_Role], file: str) -> None:
    """Refuse a wrong type of a column; a missing column is refused when the file is read."""
    columns = named_columns(schema)
    for role in roles:
        types = [column.type for column in columns if column.name == role.column]
        if len(types) != 1:
            continue
        kind = value_type(types[0])
        no_text = isinstance(types[0], pa.UuidType) and role.need == _NEED.format("string")
        if no_text or not role.fits(kind):
            raise UsageError(
                role.field,
                f"column '{role.column}' is {_type_name(kind)} in {file}, and {role.need}",
                role.fix(kind),
            )


def check_file(job: Job, path: str) -> None:
    """Refuse a job if a file has other columns, or of other types, than the job reads.

    It opens the file for its schema, or for the first line of CSV, and reads no record.

    Raises:
        UsageError: as a run would before its charge.
    """
    kind, subject = job.source.format or job.source.kind, f"file {Path(path).name!r}"
    with contextlib.suppress(OSError, BrokenFileError):
        if kind in COLUMNAR:
            row_groups(path, job.data_columns, subject=subject, kind=kind)
            schema = _schema(path, kind)
            if schema is not None:
                _check_schema(schema, list(_roles(job)), subject)
        if kind != "csv":
            return
        with open(path, "rb") as raw:
            header = csv_header(plain_by_name(raw, path, "csv"), job.reading.csv)
        if header is not None:
            csv_positions(header, job.data_columns, job.reading.csv, subject)


def _check_headers(files: "Sequence[SourceFile]", csv: CsvSection) -> None:
    """Refuse a CSV file without a first line with names; one without a byte is refused only where
    all are, because no row of it is lost."""
    from dpstream.pipelines.connectors.input_files import file_in_words  # loads Beam

    without = list[str]()
    for file in files:
        header = None
        with open(file.path, "rb") as raw, contextlib.suppress(BrokenFileError):
            header = csv_header(plain_by_name(raw, file.path, "csv"), csv)
        if header is None:
            without.append(file_in_words(file))
        if (header is None and file.size) or len(without) == len(files):
            raise UsageError(
                "table.path",
                f"{without[-1]} has no first line with the names of its columns",
                "write that line; or say how the files are written: csv = { skip_rows = 2 }, or "
                'csv = { names = ["user", "page", "time"] } if they have no header, or csv = { '
                'encoding = "cp1252" } if it is not UTF-8',
            )


def _schema(path: str, kind: FileKind) -> pa.Schema | None:
    try:
        return schema_of(path, kind)
    except MemoryError:
        raise
    except (OSError, pa.ArrowException) as error:
        if is_os_error(error):
            raise
        return None


def _roles(job: Job) -> Iterator[_Role]:
    """The columns that come from the files as they are; others go through the job's query."""
    plan, source = job.plan, job.source
    yield _identity("table.unit_column", None, plan.unit, job)
    if plan.record_id is not None:
        yield _identity("table.record_id", "record_id = %s", plan.record_id, job)
    yield _time("table.time_column", plan.event_time, job.reading.time, job)
    if plan.stamp != "event_time":
        yield _time("table.stamp", plan.stamp, _COUNTED, job)
    if source.query is not None:
        return
    for field in plan.key if job.cells is None else ():
        yield _key(field, job)
    for aggregate in plan.aggregates:
        if aggregate.column is not None:
            yield _number(aggregate.column, job)


def _identity(where: str, form: str | None, field: Field, job: Job) -> _Role:
    """Return the role of a column of identities.

    Args:
        form: the line of the job that declares the column, with ``%s`` for its table; ``None``: the
            data set's unit has its type.
    """

    def fix(kind: pa.DataType) -> str:
        declared = _DECLARED.get(identity_kind(kind, null=None) or "")
        names_records = where == "table.record_id"  # which a boolean cannot
        if declared is not None and not (names_records and declared == "bool"):
            if form is None:
                return f'write type = "{declared}" in the unit of the data set'
            table = f'{{ column = "{field.column}", type = "{declared}" }}'
            return f"write {form % table}"
        if _types.is_struct(kind) and kind.num_fields:
            return f"name one of its parts, as '{field.column}.{kind.field(0).name}'"
        return f"use a column of text or whole numbers, or {_cast(job, field.column, 'VARCHAR')}"

    def fits(kind: pa.DataType) -> bool:
        return identity_kind(kind, null=None) in _FITS[field.type]

    return _Role(where, field.column, fits, _NEED.format(field.type), fix)


_NEED = "is declared '{}'"
#: Whole numbers of a stamp are microseconds.
_COUNTED = TimeColumn("", unit="us")


def _key(field: Field, job: Job) -> _Role:
    """Return the role of a key, whose values are published: an unsigned number may be none.

    Whole numbers that a library has written as floats, because one is missing, are keys; as ids
    they are not, because beyond 2^53 two people would be one.
    """
    role = _identity("key", "key = [..., %s]", field, job)

    def fits(kind: pa.DataType) -> bool:
        if field.type == "int":
            return not _types.is_uint64(kind) and (role.fits(kind) or _is_numeric(kind))
        return role.fits(kind)

    def fix(kind: pa.DataType) -> str:
        unsigned = field.type == "int" and _types.is_uint64(kind)
        text = f"half of its numbers are beyond INT64: {_cast(job, field.column, 'VARCHAR')}"
        return text if unsigned else role.fix(kind)

    return role._replace(fits=fits, fix=fix)


def _time(where: str, column: str, declared: TimeColumn | None, job: Job) -> _Role:
    def fits(kind: pa.DataType) -> bool:
        if declared is not None and declared.unit is not None and where != "table.stamp":
            return _counts(kind) or _is_text(kind)
        if declared is not None and declared.format is not None:
            return _is_text(kind)
        if _counts(kind):
            return declared is _COUNTED and _types.is_integer(kind)
        return bool(_types.is_timestamp(kind) or _types.is_date(kind) or _is_text(kind))

    def fix(kind: pa.DataType) -> str:
        if _counts(kind):
            written = f'time_column = {{ column = {json.dumps(column)}, unit = "s" }}'
            return f'write {written} if it counts seconds since 1970; or unit = "ms" or "us"'
        return "name a column of timestamps, or correct what is declared of it"

    return _Role(where, column, fits, "is to be a time", fix)


def _number(column: str, job: Job) -> _Role:
    def fix(kind: pa.DataType) -> str:
        if _is_text(kind):
            return _cast(job, column, "DOUBLE")
        return 'name a column of numbers, or count records with kind = "count" and no column'

    return _Role("aggregate.column", column, _is_numeric, "is to be summed", fix)


def _counts(kind: pa.DataType) -> bool:
    return bool(_types.is_integer(kind) or _types.is_floating(kind))


def _is_text(kind: pa.DataType) -> bool:
    return identity_kind(kind, null=None) == "string"


def _is_numeric(kind: pa.DataType) -> bool:
    return bool(_types.is_integer(kind) or _types.is_floating(kind) or _types.is_decimal(kind))


#: Kinds that may give values of each declared type.
_FITS = {
    "string": ("string", "bytes"),
    "bytes": ("string", "bytes"),
    "int": ("int", "decimal", "string"),
    "bool": ("bool", "string"),
}
#: What to declare for each kind.
_DECLARED = {kind: kind for kind in ("string", "int", "bool", "bytes")} | {"decimal": "int"}


def _type_name(kind: pa.DataType) -> str:
    """A type's name; of nested ones no more than what they are."""
    return (
        "a struct" if _types.is_struct(kind) else "nested" if _types.is_nested(kind) else str(kind)
    )


def _cast(job: Job, column: str, kind: str) -> str:
    name = _quoted(column)
    return _rewrite(job, f"* REPLACE (CAST({name} AS {kind}) AS {name})")


def _quoted(name: str) -> str:
    """A column's name in SQL: some are words of its own."""
    doubled = name.replace('"', '""')
    return f'"{doubled}"'


def _rewrite(job: Job, select: str) -> str:
    """Words for new files with another column."""
    path = job.source.path
    folder = f"{job.path.parent}/"
    short_path = path.removeprefix(folder) if path.startswith(folder) else Path(path).name
    return (
        f"write new files, in DuckDB: COPY (SELECT {select} FROM '{short_path}') TO 'data.parquet'"
    )
