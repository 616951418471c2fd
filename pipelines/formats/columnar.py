"""Files of columns with a schema: what Parquet, Arrow (Feather) and ORC have in common.

A file is read in groups of rows: row groups, record batches, stripes.  Arrow and ORC are read one
group at a time, whose columns are in memory together; offsets that lead out of an array are damage.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import orc

from dpstream.accounting.places import FileKind
from dpstream.dp_transforms.ingest.columns import named_columns, value_type

#: Texts as bytes, which are checked without what they say.
_RAW = {
    pa.string(): pa.binary(),
    pa.large_string(): pa.large_binary(),
    pa.string_view(): pa.binary_view(),
}


def opened(path: Any) -> Any:
    """Return a path as an open file: to look for its file system costs more than to open it."""
    return pa.OSFile(path) if isinstance(path, str) else path


def schema_of(path: Any, kind: FileKind = "parquet") -> pa.Schema:
    """Return the schema of a file.

    Raises:
        OSError, pa.ArrowException: it cannot be read as one of this kind.
    """
    if kind == "parquet":
        with pq.ParquetFile(opened(path), pre_buffer=False) as file:
            return file.schema_arrow
    return groups_of(opened(path), (), kind)[0]


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of values that `parquet.read_row_group` gives for a column of a type."""
    kind = value_type(kind)
    return {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}.get(kind, kind)


def groups_of(
    source: Any, columns: Sequence[str], kind: FileKind
) -> tuple[pa.Schema, int, Callable[[int], pa.RecordBatch]]:
    """Return schema, number of groups, and what reads some columns of one, of Arrow or ORC.

    Structs as a whole, and lists, are left out.

    Raises:
        OSError, pa.ArrowException: it cannot be read.
    """
    schema = orc.ORCFile(source).schema if kind == "orc" else pa.ipc.open_file(source).schema
    named = [each for each in named_columns(schema) if each.name in {*columns}]
    flat = [each for each in named if not pa.types.is_nested(value_type(each.type))]
    if kind == "orc":
        file = orc.ORCFile(source)
        return schema, file.nstripes, lambda n: _sound(file.read_stripe(n, [f.name for f in flat]))
    options = pa.ipc.IpcReadOptions(
        included_fields=sorted({schema.names.index(each.path[0]) for each in flat})
    )
    arrow = pa.ipc.open_file(source, options=options)
    return schema, arrow.num_record_batches, lambda number: _sound(arrow.get_batch(number))


def _sound(batch: pa.RecordBatch) -> pa.RecordBatch:
    batch.validate()
    for column in batch.columns:
        _check(column)
    return batch


def _check(column: pa.Array) -> None:
    """Refuse offsets that lead out of an array, whatever its texts say.

    Raises:
        pa.ArrowInvalid: there is one.
    """
    if isinstance(column, pa.ExtensionArray):
        return _check(column.storage)
    if pa.types.is_dictionary(column.type):  # its codes are checked where they are used
        return _check(column.dictionary)
    if pa.types.is_struct(column.type):
        for number in range(column.type.num_fields):
            _check(column.field(number))
    elif not pa.types.is_nested(column.type):
        raw = _RAW.get(column.type)
        (column if raw is None else column.cast(raw)).validate(full=True)
    return None
