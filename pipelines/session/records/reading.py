"""Reader of files of records: rows become coordinates, or dead letters.

What a row becomes is a function of that row and of its file's header alone (see
`pipelines.formats.rows`).  A line that is malformed, or a row without the id that names it, is not
a record.  A record with a value that its dimension refuses cannot be used: its id is stored,
without its coordinates.  Both go to the dead letter: file, number of the row and rule, never a
value.
"""

import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from dpstream.accounting.arrays import Bool, Ids, Int64
from dpstream.accounting.errors import UsageError, required
from dpstream.accounting.places import COLUMNAR, FileKind, matching
from dpstream.accounting.regions.space import (
    Budget,
    Category,
    Coordinates,
    Integer,
    Real,
    Timestamp,
)
from dpstream.accounting.sessions.table import AnyDimension
from dpstream.dp_transforms.ingest import columns
from dpstream.dp_transforms.noise.ids import typed_ids
from dpstream.dp_transforms.noise.prf import Prf
from dpstream.pipelines.formats.compression import (
    checked_codec,
    plain,
    refuse_packed_parquet,
)
from dpstream.pipelines.formats.dialect import parts_as
from dpstream.pipelines.formats.parquet import check_whole, read_row_group, row_groups
from dpstream.pipelines.formats.rows import Part, Reason, Refused, refuse
from dpstream.pipelines.formats.texts import csv_header, csv_positions, read_text
from dpstream.pipelines.project.dialect import Reading
from dpstream.pipelines.project.sections import CsvSection
from dpstream.pipelines.session.config import Config, kind_of
from dpstream.state.disk_errors import file_error, file_errors

#: Why a row is no record; of those that are not usable it is the dimension's name.
MISSING_ID, DUPLICATE_ID, UNKNOWN_ID = "missing_id", "duplicate_id", "unknown_id"


class Letters(NamedTuple):
    """Dead letters of one file: numbers of rows, and one reason for each.

    Attributes:
        file: number of the file.
    """

    file: int
    rows: Int64
    reasons: list[str]


class Records(NamedTuple):
    """Rows of one file.

    Attributes:
        file: the file's number; rows: (n,) int64 their numbers in it.
        at: (n, d) int64 coordinates, 0 where not usable; usable: (n,) bool.
        ids: (n, 2) keyed ids; ``None`` in a table without ids.
    """

    file: int
    rows: Int64
    at: Int64
    usable: Bool
    ids: Ids | None

    def filtered(self, mask: Bool) -> "Records":
        """Return some of the rows."""
        if mask.all():
            return self
        ids = None if self.ids is None else self.ids[mask]
        return Records(self.file, self.rows[mask], self.at[mask], self.usable[mask], ids)


def files_of(pattern: str, field: str) -> list[str]:
    """Return the files of a glob, sorted.

    Raises:
        UsageError: there is none, or a match is not a file.
    """
    with file_errors(field, "has a folder that cannot be listed"):
        paths = sorted(matching(pattern))
    if not paths or not all(os.path.isfile(path) for path in paths):
        raise UsageError(field, "matches no file, or something that is none", "correct its path")
    return paths


def records_of(
    config: Config, files: Sequence[str], prf: Prf | None
) -> Iterator[Records | Letters]:
    """Yield the records of files, in order, and the rows that are not records.

    Args:
        prf: of the table's ids; ``None``: it has none.

    Raises:
        UsageError: a file is of no known kind, or without a needed column.
        RunError: the operating system cannot read a file.
    """
    named = [name for name in config.columns if name is not None]
    needed = sorted({*named, *([config.record_id.column] if config.record_id is not None else [])})
    for number, path in enumerate(files):
        for part in parts_of(path, needed, config.reading):
            if isinstance(part, Refused):
                yield Letters(number, part.offsets, part.reasons)
            else:
                yield from _records(config, number, part.offset, part.batch, prf)


def ids_of(
    config: Config, files: Sequence[str], prf: Prf
) -> Iterator[tuple[int, Int64, Ids, Bool]]:
    """Yield (file, rows, ids, whether a row has one) of files that list ids of records.

    Raises:
        UsageError, RunError: as for `records_of`.
    """
    column = required(config.record_id, "records have ids").column
    for number, path in enumerate(files):
        for part in parts_of(path, [column], config.reading):
            if isinstance(part, Refused):
                rows, none = part.offsets, np.zeros(len(part.offsets), np.bool_)
                yield number, rows, np.zeros((len(rows), 2), np.uint64), none
            else:
                ids, given = _ids(config, part.batch, prf)
                yield number, part.offset + np.arange(part.batch.num_rows), ids, given


def parts_of(path: str, needed: Sequence[str], reading: Reading) -> Iterator[Part]:
    """Return rows and refused positions of one file; see `pipelines.connectors.files.source`."""
    return parts_as(_parts_of(path, needed, reading.csv), reading)


def _parts_of(path: str, needed: Sequence[str], csv: CsvSection) -> Iterator[Part]:
    kind, field = kind_of(path, "records"), "records"
    name = os.path.basename(path)
    try:
        if kind in COLUMNAR:
            yield from _columnar(path, needed, name, kind)
            return
        with open(path, "rb") as raw:
            codec = checked_codec(raw, path, kind, field, name)
            text = plain(raw, codec)
            if kind == "csv" and (header := csv_header(text, csv)) is not None:
                csv_positions(header, needed, csv)
            raw.seek(0)
            yield from read_text(kind, plain(raw, codec), needed, csv=csv)
    except UsageError as error:
        if not error.field.startswith("column '"):
            raise
        raise UsageError(
            error.field,
            "is not, or not just once, in a file of records",
            "correct table.record_id, the column of a dimension, or the file",
        ) from None
    except OSError as error:
        raise file_error("records", "cannot be read", error) from None


def _columnar(path: str, needed: Sequence[str], name: str, kind: FileKind) -> Iterator[Part]:
    starts = row_groups(path, needed, "records", name, kind)
    if starts is None:
        refuse_packed_parquet(path, "records", name)
        yield refuse(0, Reason.UNREADABLE_FILE)
    else:
        check_whole(path, needed, "records", name, kind)
    for group, first in enumerate(starts or ()):
        yield from read_row_group(path, needed, group, first, kind)


def _records(
    config: Config, number: int, first: int, batch: pa.RecordBatch, prf: Prf | None
) -> Iterator[Records | Letters]:
    rows = first + np.arange(batch.num_rows)
    parts = [
        coordinates(dimension, None if name is None else batch.column(name), fixed, len(rows))
        for dimension, name, fixed in zip(
            config.table.dimensions, config.columns, config.fixed, strict=True
        )
    ]
    usable = np.logical_and.reduce([part.usable for part in parts])
    at = np.stack([part.at for part in parts], axis=1)
    at[~usable] = 0
    ids, given = (None, np.ones(len(rows), np.bool_)) if prf is None else _ids(config, batch, prf)
    if not given.all():
        yield Letters(number, rows[~given], [MISSING_ID] * int((~given).sum()))
    refused = given & ~usable
    if refused.any():
        reasons = np.full(len(rows), "", object)
        for dimension, part in zip(config.table.dimensions, parts, strict=True):
            reasons[~part.usable & (reasons == "")] = dimension.name
        yield Letters(number, rows[refused], reasons[refused].tolist())
    yield Records(number, rows, at, usable, ids).filtered(given)


def _ids(config: Config, batch: pa.RecordBatch, prf: Prf) -> tuple[Ids, Bool]:
    named = required(config.record_id, "records have ids")
    column = batch.column(named.column)
    if named.type == "string" and pa.types.is_integer(column.type):
        column = column.cast(pa.string())
    ids, given = columns.identity(column, named.type, hashed=True)
    return typed_ids(prf, [(named.type, ids)]), given


def coordinates(
    dimension: AnyDimension, column: pa.Array | None, fixed: float | None, size: int
) -> Coordinates:
    """Return the coordinates of a column's values, of any Arrow type, in a dimension.

    Args:
        column: of ``size`` values; ``None``: all of them are ``fixed``.
    """
    if column is None:
        return dimension.coordinates(np.full(size, fixed, np.float64))
    match dimension:
        case Integer():
            integers, given = columns.identity(column, "int")
            return dimension.coordinates(integers.to_numpy(zero_copy_only=False), ~given)
        case Real() | Budget():
            numbers, given = columns.measure(column)
            return dimension.coordinates(numbers, ~given)
        case Timestamp():
            micros, given = columns.instant(column)
            return dimension.coordinates(micros, ~given)
        case Category():
            return _codes(dimension, column)


def _codes(dimension: Category, column: pa.Array) -> Coordinates:
    """Look up each distinct text once."""
    if pa.types.is_integer(column.type) or pa.types.is_boolean(column.type):
        column = column.cast(pa.string())
    texts, given = columns.identity(column, "string")
    coded = texts.dictionary_encode()
    words = np.array(coded.dictionary.to_pylist(), object)
    word_places = (
        dimension.coordinates(words)
        if len(words)
        else Coordinates(np.zeros(1, np.int64), np.zeros(1, np.bool_))
    )
    index = coded.indices.to_numpy(zero_copy_only=False)
    point = dimension.missing == "point"
    there = dimension.values if point else 0
    at = np.where(given, word_places.at[index], there)
    return Coordinates(at, (given & word_places.usable[index]) | (point & ~given))
