"""Columns of a table as Arrow: of anything that exports itself by Arrow's stream protocol.

``__arrow_c_stream__`` is what pandas, Polars, DuckDB's relations, Ibis, and Arrow's tables, batches
and readers have in common; an Arrow data set has scanners instead.  Only the columns that a
question needs are kept.  The libraries' errors are of classes of their own and quote values, so any
of them is replaced by one without its text.

Two libraries have columns without a type of their own.  A pandas column of objects is text and
nothing else: it has no type but what its values are, and one row would decide how all others are
read (a ``bytes`` among texts makes bytes of all, a ``Decimal`` of 40 digits makes all others none).
So only the columns that are needed are exported.  Polars exports objects as their addresses.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.compute as pc

from dpstream.accounting.errors import UsageError, nearest
from dpstream.dp_transforms.ingest.columns import (
    column_at,
    identity_kind,
    named_columns,
    value_type,
)


def columns_of(data: Any, named: Mapping[str, Sequence[str]]) -> dict[str, pa.ChunkedArray]:
    """Return some columns of a table.

    Args:
        data: a table of pandas (2.2 or newer), Polars, DuckDB or Arrow, or any that has an Arrow
            stream; a stream that can be read once is read.
        named: names of columns by the argument that names them, for error messages; a part of a
            struct has a path, as in files (pandas: no).  A column of pandas that is not named by a
            text goes by the text of its name.

    Raises:
        UsageError: ``data`` is not a table, lacks a column or has one twice, or Arrow has no
            type for one.
    """
    wanted = {name: argument for argument, names in named.items() for name in names}
    stream = None if _of_pandas(data) else _opened(data, list(wanted))
    parts = () if stream is None else named_columns(stream.schema)
    names = list(map(str, data.columns)) if stream is None else [part.name for part in parts]
    try:
        for name, argument in wanted.items():
            _check(argument, name, names)
    except UsageError:
        stream = None  # a connection of DuckDB has one stream at a time
        raise
    columns = _of_frame(data, names, wanted) if stream is None else _read(stream, wanted, "data")
    typed = zip(data.columns, data.dtypes, strict=True) if hasattr(data, "dtypes") else ()
    stored = {str(name): _stored(kind) for name, kind in typed}
    for name, argument in wanted.items():
        kind, of_library = columns[name].type, stored.get(name)
        # Polars gives the addresses of objects that it does not know.
        if of_library == "Object" and pa.types.is_fixed_size_binary(kind):
            raise _unknown(argument)
        if of_library is not None and of_library.startswith("period["):
            raise UsageError(
                argument,
                "is a pandas column of periods, whose values are numbers in Arrow",
                "make it text: .astype(str)",
            )
        if of_library == "object" and identity_kind(kind) != "string":
            raise UsageError(
                argument,
                "is a pandas column of objects that are not text: one row would decide its type",
                "give it a type: .astype('Int64'), .astype('float'), pandas.to_datetime(column), or"
                " .astype(pandas.ArrowDtype(pyarrow.binary())) and the like",
            )
    return columns


def without_rows(data: Any) -> Any:
    """Return an Arrow stream as a table of its columns without rows; return other tables as is."""
    if _of_pandas(data) or not hasattr(data, "__arrow_c_stream__"):
        return data
    try:
        return pa.RecordBatchReader.from_stream(data).schema.empty_table()
    except Exception:
        return data  # what asks about it says why it is no table


def id_kind_of(argument: str, kind: pa.DataType) -> str:
    """Return the kind of ids (``noise.ids.ID_KINDS``) for the Arrow type of a unit or key.

    Raises:
        UsageError: values of this type cannot be ids.
    """
    kind = value_type(kind)
    if pa.types.is_uint64(kind) and argument != "unit":  # a unit is hashed, by its 64 bits
        return "decimal"
    if (name := identity_kind(kind)) is not None:
        return name
    if pa.types.is_floating(kind):
        raise UsageError(
            argument,
            "is a column of floats, two of which can be equal and differ; beyond 2^53 they have "
            "merged already",
            "read it again as whole numbers or text; of whole numbers below 2^53 pandas makes "
            "them by .astype('Int64'), Polars by .cast(pl.Int64)",
        )
    raise UsageError(
        argument,
        f"is a column of type {_plainly(kind)}, which is no identity",
        "make it text, whole numbers, bytes, booleans, dates, times or decimals",
    )


def check_numbers(argument: str, kind: pa.DataType) -> None:
    """Refuse a column whose type is not numeric.

    Raises:
        UsageError: the column is not numeric.
    """
    of, kind = pa.types, value_type(kind)
    if any(test(kind) for test in (of.is_integer, of.is_floating, of.is_decimal, of.is_null)):
        return
    fix = "name a column of numbers"
    if of.is_boolean(kind):
        fix = "make it 0 and 1 (pandas: .astype('Int8'); Polars: .cast(pl.Int8))"
    elif identity_kind(kind) == "string":
        fix += (
            " (of text, pandas: pandas.to_numeric(column, errors='coerce'); Polars: "
            ".cast(pl.String).cast(pl.Float64, strict=False))"
        )
    raise UsageError(argument, f"is a column of type {_plainly(kind)}, not of numbers", fix)


def _plainly(kind: pa.DataType) -> str:
    """Return the type's name alone: names of a struct's fields, or of a dictionary, may be data."""
    return str(kind).partition("<")[0].partition("[")[0]


def _of_pandas(data: Any) -> bool:
    return hasattr(data, "reset_index") and hasattr(data, "columns")


def _of_frame(data: Any, names: list[str], wanted: Mapping[str, str]) -> dict[str, pa.ChunkedArray]:
    """Return columns of a pandas frame; if that fails, try each, to name the one that fails."""

    def exported(columns: Mapping[str, str], argument: str) -> dict[str, pa.ChunkedArray]:
        # The labels of pandas' rows are no column that was asked for.
        frame = data.iloc[:, [names.index(name) for name in columns]].reset_index(drop=True)
        try:
            stream = pa.RecordBatchReader.from_stream(frame.set_axis(list(columns), axis=1))
        except Exception:
            stream = None
        if stream is None:
            raise _unknown(argument)
        return _read(stream, columns, argument)

    try:
        return exported(wanted, "data")
    except UsageError:
        for name, argument in wanted.items():
            exported({name: argument}, argument)
        raise


def _opened(data: Any, names: list[str]) -> pa.RecordBatchReader:
    """Return the stream of a table that is not pandas': where it can, of some columns alone."""
    if not _of_files(data) and not hasattr(data, "__arrow_c_stream__"):
        _refuse(data)
    try:
        parts = named_columns(data.schema) if _of_files(data) else ()
        fields = {part.name: pc.field(*part.path) for part in parts}
        data = (
            data.scanner(columns={name: fields[name] for name in names}).to_reader()
            if _of_files(data)
            else data[names]
        )
    except Exception:  # it lacks one of them, or gives none by name
        data = data.scanner().to_reader() if _of_files(data) else data
    try:
        return pa.RecordBatchReader.from_stream(data)
    except Exception as error:  # a Series has a stream, too, but of no columns
        is_table = hasattr(data, "columns") or not isinstance(error, pa.ArrowInvalid)
    if is_table:
        raise _unknown("data")
    _refuse(data)


def _of_files(data: Any) -> bool:
    """Return whether it is an Arrow data set, which has no stream but scanners."""
    return hasattr(data, "scanner")


def _read(
    stream: pa.RecordBatchReader, names: Iterable[str], argument: str
) -> dict[str, pa.ChunkedArray]:
    paths = {each.name: each.path for each in named_columns(stream.schema)}
    try:
        tops = dict.fromkeys(paths[name][0] for name in names)
        schema = pa.schema([stream.schema.field(top) for top in tops])
        table = pa.Table.from_batches([batch.select(schema.names) for batch in stream], schema)
    except Exception:
        table = None
    if table is None:
        raise _unknown(argument)
    return {name: column_at(table, name) for name in names}


def _stored(kind: Any) -> str:
    """The library's name of a column's type, or of its categories'."""
    return str(getattr(getattr(kind, "categories", None), "dtype", kind))


def _unknown(argument: str) -> UsageError:
    if argument == "data":
        return UsageError(
            "data",
            "cannot be read",
            "for rows in pyarrow.RecordBatchReader.from_stream(data): pass  # shows its library's "
            "error, which may quote values",
        )
    return UsageError(
        argument,
        "has values of several types, or of one that Arrow does not know",
        "give the column one type (pandas: .astype('string') or .astype('Int64'))",
    )


def _check(argument: str, name: str, names: list[str]) -> None:
    if name not in names:
        # Others are not named: of a pivoted table, or a file without a header, they are values.
        raise UsageError(
            argument,
            f"names no column {name!r} of the table",
            f"{nearest(name, names)}data.columns has their names; pandas: an index becomes a "
            "column by .reset_index()"
            + ", a part of a struct by data['a'].struct.field('b')"
            * ("." in name),
        )
    if names.count(name) > 1:
        raise UsageError(argument, f"names a column that is there twice: {name!r}", "rename one")


def _refuse(data: Any) -> NoReturn:
    for method in ("toArrow", "collect"):
        if hasattr(data, method):
            raise UsageError("data", "is not read yet", f"give its rows: data.{method}()")
    raise UsageError(
        "data",
        "is no table",
        "give a DataFrame of pandas (2.2 or newer) or Polars, a relation of DuckDB, or a "
        "pyarrow.Table: pyarrow.table({...}) makes one of lists, pyarrow.parquet.read_table(path) "
        "of a file",
    )
