"""Columns of a table in memory as Arrow: from pandas, Polars, Arrow, or any Arrow stream.

The module does not import pandas or Polars: a table lists its ``columns``, returns some of them by
``table[names]``, and exports itself by ``__arrow_c_stream__`` (Arrow's protocol of capsules).  Only
the columns that a question needs are read: other columns may have values without an Arrow type.
The libraries' errors quote values, so their texts are not passed on.

A pandas column of objects is text and nothing else: it has no type but what its values are, and one
row would decide how all others are read (a ``bytes`` among texts makes bytes of all, a ``Decimal``
of 40 digits makes all others none).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import pyarrow as pa

from dpstream.accounting.errors import UsageError, nearest
from dpstream.dp_transforms.ingest.columns import value_type

#: What reading a table may raise, of Arrow, of pandas and of Polars.
_UNREADABLE = (
    pa.ArrowException,
    TypeError,
    ValueError,
    OverflowError,
    UnicodeError,
    KeyError,
    NotImplementedError,
    AttributeError,
)


def columns_of(data: Any, named: Mapping[str, Sequence[str]]) -> dict[str, pa.ChunkedArray]:
    """Return some columns of a table.

    Args:
        data: a table of pandas (2.2 or newer), Polars or Arrow, or any that has an Arrow stream.
        named: names of columns by the argument that names them, for error messages.

    Raises:
        UsageError: ``data`` is not a table, lacks a column or has one twice, or Arrow has no
            type for one.
    """
    if isinstance(data, pa.RecordBatch):
        data = pa.Table.from_batches([data])
    if not isinstance(data, pa.Table) and not hasattr(data, "__arrow_c_stream__"):
        _refuse(data)
    table = data if isinstance(data, pa.Table) or _by_name(data) else _read(data)
    is_arrow = isinstance(table, pa.Table)
    column_names = list(table.column_names if is_arrow else table.columns)
    for argument, names in named.items():
        for name in names:
            _check(argument, name, column_names)
    wanted = {name: argument for argument, names in named.items() for name in names}
    if is_arrow:
        return {name: table.column(name) for name in wanted}
    return _given(table, wanted)


def without_rows(data: Any) -> Any:
    """Return an Arrow stream as a table of its columns without rows; return other tables as is."""
    is_read = isinstance(data, pa.Table | pa.RecordBatch) or _by_name(data)
    if is_read or not hasattr(data, "__arrow_c_stream__"):
        return data
    try:
        return pa.RecordBatchReader.from_stream(data).schema.empty_table()
    except _UNREADABLE:
        return data  # what asks about it says why it is no table


def id_kind_of(argument: str, kind: pa.DataType) -> str:
    """Return the kind of ids (``noise.ids.ID_KINDS``) for the Arrow type of a unit or key.

    Raises:
        UsageError: values of this type cannot be ids.
    """
    types, kind = pa.types, value_type(kind)
    if types.is_uint64(kind) and argument != "unit":  # a unit is hashed, by its 64 bits
        return "decimal"
    tests = {
        "string": (types.is_string, types.is_large_string, types.is_string_view, types.is_null),
        "bytes": (
            types.is_binary,
            types.is_large_binary,
            types.is_binary_view,
            types.is_fixed_size_binary,
        ),
        "int": (types.is_integer,),
        "bool": (types.is_boolean,),
        "date": (types.is_date,),
        "timestamp": (types.is_timestamp,),
        "decimal": (types.is_decimal,),
    }
    for name, fits in tests.items():
        if any(test(kind) for test in fits):
            return name
    if types.is_floating(kind):
        raise UsageError(
            argument,
            "is a column of floats, two of which can be equal and differ",
            "make it whole numbers (pandas: .astype('Int64'); Polars: .cast(pl.Int64)) or text",
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
    types = pa.types
    fits = types.is_integer, types.is_floating, types.is_decimal, types.is_null
    if not any(test(kind) for test in fits):
        raise UsageError(
            argument,
            f"is a column of type {_plainly(kind)}, not of numbers",
            "name a column of numbers (pandas: pandas.to_numeric(column, errors='coerce'); Polars: "
            ".cast(pl.Float64, strict=False))",
        )


def _plainly(kind: pa.DataType) -> str:
    """Return the type's name alone: names of a struct's fields, or of a dictionary, may be data."""
    return str(kind).partition("<")[0].partition("[")[0]


def _by_name(data: Any) -> bool:
    return hasattr(data, "columns") and hasattr(type(data), "__getitem__")


def _given(data: Any, wanted: Mapping[str, str]) -> dict[str, pa.ChunkedArray]:
    """Return columns of a DataFrame; if that fails, try each, to name the one that fails."""
    try:
        stream = _stream(_narrowed(data, list(wanted)), "data")
    except UsageError:
        for name, argument in wanted.items():
            _stream(_narrowed(data, [name]), argument)
        raise
    for name, argument in wanted.items():
        kind, stored = stream.column(name).type, _stored(data[name])
        # Polars gives the addresses of objects that it does not know.
        if stored == "Object" and pa.types.is_fixed_size_binary(kind):
            raise _unknown(argument)
        if stored == "object" and not _is_text(kind):
            raise UsageError(
                argument,
                "is a pandas column of objects that are not text: one row would decide its type",
                "give it a type: .astype('Int64'), .astype('float'), pandas.to_datetime(column), or"
                " .astype(pandas.ArrowDtype(pyarrow.binary())) and the like",
            )
    return {name: stream.column(name) for name in wanted}


def _stored(column: Any) -> str:
    """The library's name of a column's type, or of its categories'."""
    kind = getattr(column, "dtype", "")
    return str(getattr(getattr(kind, "categories", None), "dtype", kind))


def _is_text(kind: pa.DataType) -> bool:
    types = pa.types
    if types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_null(kind))


def _narrowed(data: Any, names: list[str]) -> Any:
    narrowed = data[names]
    # The labels of pandas' rows are no column that was asked for.
    return narrowed.reset_index(drop=True) if hasattr(narrowed, "reset_index") else narrowed


def _stream(data: Any, argument: str) -> pa.Table:
    try:
        return pa.RecordBatchReader.from_stream(data).read_all()
    except _UNREADABLE:
        pass
    raise _unknown(argument)


def _unknown(argument: str) -> UsageError:
    return UsageError(
        argument,
        "has values of several types, or of one that Arrow does not know",
        "give the column one type (pandas: .astype('string') or .astype('Int64'))",
    )


def _read(data: Any) -> pa.Table:
    """Return the table of a stream that does not list its columns before it is read."""
    try:
        return _stream(data, "data")
    except UsageError:  # a Series has a stream, too
        _refuse(data)


def _check(argument: str, name: str, names: list[Any]) -> None:
    if name not in names:
        # Others are not named: of a pivoted table, or a file without a header, they are values.
        hint = nearest(name, (one for one in names if isinstance(one, str)))
        raise UsageError(
            argument,
            f"names no column {name!r} of the table",
            f"{hint}data.columns has their names; pandas: an index becomes a column by "
            ".reset_index()",
        )
    if names.count(name) > 1:
        raise UsageError(argument, f"names a column that is there twice: {name!r}", "rename one")


def _refuse(data: Any) -> NoReturn:
    if hasattr(data, "collect"):
        raise UsageError("data", "is not read yet", "give its rows: data.collect()")
    raise UsageError(
        "data",
        "is no table in memory",
        "give a DataFrame of pandas (2.2 or newer) or Polars, or a pyarrow.Table: "
        "pyarrow.table({...}) makes one of lists, pyarrow.parquet.read_table(path) of a file",
    )
