"""The output of the readers of all file kinds: rows with positions, and refused positions.

The rule behind every reader: what becomes of a row is a function of that row (and of the
file's header) alone, never of another row, of the block it was read in or of batch_rows.
"""

from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from dpstream.accounting.arrays import Int64
from dpstream.accounting.errors import RunError
from dpstream.state.disk_errors import file_error


class Reason(StrEnum):
    """The reason for which the source put a position into the dead letter; fixed and public."""

    MALFORMED = "malformed"
    FIELD_COUNT = "field_count"
    LINE_TOO_LONG = "line_too_long"
    UNREADABLE_FILE = "unreadable_file"
    UNREADABLE_REST = "unreadable_rest"
    NO_LINE_BREAK = "no_line_break"
    UNPACKS_TOO_LARGE = "unpacks_too_large"
    EMPTY = "empty"
    MESSAGE_TOO_LONG = "message_too_long"
    NOT_THE_BROKERS_STAMP = "not_the_brokers_stamp"
    DELETED_BEFORE_READ = "deleted_before_read"
    BAD_NAME = "bad_name"
    LISTED_TWICE = "listed_twice"
    MISSING_COLUMN = "missing_column"
    FILE_CHANGED = "file_changed"
    ROW_COUNT = "row_count"


#: Damage of a file's container, and a wrong schema: no record can bring them about, so the names of
#: such files are public.
DAMAGE = {Reason.UNREADABLE_FILE, Reason.UNREADABLE_REST, Reason.MISSING_COLUMN}
#: Reasons for which the rest of a file is not read.
CUT_OFF = {Reason.UNREADABLE_FILE, Reason.UNREADABLE_REST, Reason.NO_LINE_BREAK}
CORRECT_FILES = "correct or remove these files"
_LINES = "correct or remove these lines"
#: What is wrong with a row of a file, and how to fix it, by reason.
FAULTS = {
    Reason.MALFORMED: (
        "is not a well-formed line, object or row",
        f"{_LINES}; CSV may have no stray quote, no NUL byte, and no line break inside quotes but "
        "with csv = { line_breaks_in_quotes = true }; JSON Lines one object a line",
    ),
    Reason.FIELD_COUNT: ("has another number of fields than the header", _LINES),
    Reason.LINE_TOO_LONG: ("is longer than a line may be", _LINES),
    Reason.UNREADABLE_FILE: ("the file is not of the kind that table.format names", CORRECT_FILES),
    Reason.UNREADABLE_REST: ("the file cannot be read from this row on", CORRECT_FILES),
    Reason.NO_LINE_BREAK: (
        "the text from this row on has no line break, and is not read",
        CORRECT_FILES,
    ),
    Reason.UNPACKS_TOO_LARGE: (
        "the file has a row group that is small in the file and large once unpacked",
        "write the file with smaller row groups",
    ),
    Reason.MISSING_COLUMN: ("the file lacks a column that the job names", CORRECT_FILES),
}


class Rows(NamedTuple):
    """Consecutive good rows; ``offset`` is the first one's number in the file."""

    offset: int
    batch: pa.RecordBatch


class Refused(NamedTuple):
    """Positions that are no rows: int64 offsets, and one reason for each."""

    offsets: Int64
    reasons: list[str]


Part = Rows | Refused


def refuse(offset: int, reason: Reason) -> Refused:
    """Return one refused position."""
    return Refused(np.array([offset], np.int64), [reason.value])


def after(part: Part) -> int:
    """Return the number of the row after a part."""
    if isinstance(part, Refused):
        return int(part.offsets[-1]) + 1
    return int(part.offset + part.batch.num_rows)


def runs(offsets: Int64, batch: pa.RecordBatch) -> Iterator[Rows]:
    """Yield rows at increasing ``offsets`` as runs of consecutive ones (slices, no copy)."""
    if len(offsets) == 0:
        return
    breaks = np.flatnonzero(np.diff(offsets) != 1) + 1
    starts = [0, *breaks.tolist()]
    for begin, end in zip(starts, [*starts[1:], len(offsets)], strict=True):
        yield Rows(int(offsets[begin]), batch.slice(begin, end - begin))


def repair_text(column: pa.Array) -> pa.Array:
    """Return a text column with the values that are not UTF-8 set to null; other types unchanged.

    Raises:
        pa.ArrowInvalid: the array itself is damaged.
    """
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        return column
    try:
        column.validate(full=True)
        return column
    except pa.ArrowInvalid:
        large = pa.types.is_large_string(column.type)
        raw = column.view(pa.large_binary() if large else pa.binary())
        raw.validate(full=True)
        return pa.array(map(_text_or_none, raw.to_pylist()), column.type, size=len(raw))


def _text_or_none(value: bytes | None) -> str | None:
    try:
        return None if value is None else value.decode("utf-8")
    except UnicodeDecodeError:
        return None


def unreadable(partition: int, error: OSError) -> RunError:
    """Return the error for a file of the manifest that cannot be read: the run fails, nothing is
    lost.
    """
    return file_error("table.path", f"file {partition} of the manifest cannot be read", error)
