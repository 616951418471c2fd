"""What the values of a file say, where they are public: names in JSON Lines, times and amounts.

Only where `dpstream init --public-sample` says so, and of the first ``SAMPLE_ROWS`` rows.  What is
found here is written into the project file, so it must not come from private records.
"""

import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dpstream.accounting.arrays import Float64
from dpstream.accounting.errors import UsageError
from dpstream.dp_transforms.ingest.columns import identity, instant, measure
from dpstream.pipelines.drafting.columns import FIELD, DataFile, text_column
from dpstream.pipelines.formats.compression import BrokenFileError, plain_by_name
from dpstream.pipelines.formats.lines import MAX_LINE_BYTES
from dpstream.pipelines.formats.parquet import refuse_large
from dpstream.pipelines.formats.rows import Rows
from dpstream.pipelines.formats.texts import read_text
from dpstream.state.disk_errors import file_error

SAMPLE_ROWS = 1_000_000
#: Lines of JSON whose names are gathered.
_NAMED_LINES = 100
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def with_names(file: DataFile) -> DataFile:
    """The same with the names of the first lines, where the file is of JSON Lines.

    Raises:
        UsageError: none of them is an object.
        RunError: the operating system cannot read it.
    """
    if file.columns is not None:
        return file
    names = dict[str, None]()
    try:
        with open(file.first, "rb") as raw:
            text = plain_by_name(raw, str(file.first), "jsonl")
            head = text.read(MAX_LINE_BYTES).split(b"\n")[:_NAMED_LINES]
    except BrokenFileError:
        head = []
    except OSError as error:
        raise file_error(FIELD, "cannot be read", error) from None
    for line in head:
        try:
            names |= dict.fromkeys(msgspec.json.decode(line, type=dict[str, object]))
        except (msgspec.DecodeError, UnicodeError):
            continue
    if not names:
        raise UsageError(
            FIELD, "does not begin with JSON objects, one a line", "write one object a line"
        )
    return file._replace(columns=tuple(map(text_column, names)))


def stretch(file: DataFile, unit: tuple[str, str], time: str) -> tuple[datetime, datetime]:
    """The days that the times lie on: the first, and the one after the last (UTC).

    Raises:
        UsageError: no row has a unit of its type (column, type), or none a time.
    """
    low, high, units = math.inf, -math.inf, False
    for batch in _batches(file, (unit[0], time)):
        micros, good = instant(batch.column(1))
        units = units or bool(identity(batch.column(0), unit[1])[1].any())
        if good.any():
            low, high = min(low, int(micros[good].min())), max(high, int(micros[good].max()))
    if not units:
        raise UsageError(
            "--unit", "has no value that can be read", "name the column of the user, or fill it"
        )
    if high < low:
        raise UsageError(
            "--time",
            "has no value that can be read as a time",
            "write times like 2024-01-31T12:00:00Z, or as timestamps of Parquet",
        )
    day = timedelta(days=1)
    try:
        first, last = (_EPOCH + timedelta(microseconds=int(t)) for t in (low, high))
        midnight = [t.replace(hour=0, minute=0, second=0, microsecond=0) for t in (first, last)]
        return midnight[0], midnight[1] + day
    except OverflowError:
        raise UsageError(
            "--time", "has times beyond the calendar", "give --start and --end"
        ) from None


def bounds(file: DataFile, column: str) -> tuple[float, float]:
    """Round bounds that hold about 98% of the amounts of a column.

    Raises:
        UsageError: it has none.
    """
    samples = list[Float64]()
    for batch in _batches(file, (column,)):
        amounts, good = measure(batch.column(0))
        samples.append(amounts[good])
    amounts = np.concatenate([np.zeros(0), *samples])
    if not len(amounts):
        raise UsageError("--value", "has no value that is a number", "name a column of numbers")
    low, high = (float(q) for q in np.quantile(amounts, (0.01, 0.99)))
    least = 0.0 if low >= 0 else -_rounded(-low)
    most = _rounded(high) if high > 0 else 0.0
    return least, most if least < most else 1.0


def _rounded(amount: float) -> float:
    """The least of 1, 2, 5, 10, 20 ... (and 0.5, 0.2 ...) that is not below a positive amount."""
    power = math.floor(math.log10(amount))
    exact = (float(f"{digit}e{p}") for p in (power, power + 1) for digit in (1, 2, 5))
    return next(x for x in exact if x >= amount)


def _batches(file: DataFile, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The first rows as the readers of a job give them; positions of columns as in ``columns``."""
    left = SAMPLE_ROWS
    try:
        for batch in _read(file.first, file.kind, list(dict.fromkeys(columns))):
            yield batch.slice(0, left).select(list(columns))
            left -= batch.num_rows
            if left <= 0:
                return
    except (pa.ArrowException, BrokenFileError):
        return
    except OSError as error:
        raise file_error(FIELD, "cannot be read", error) from None


def _read(path: Path, kind: str, columns: list[str]) -> Iterator[pa.RecordBatch]:
    if kind == "parquet":
        with pq.ParquetFile(str(path)) as file:
            refuse_large(file.metadata, columns, FIELD, "the file")
            yield from file.iter_batches(columns=columns, use_threads=False)
        return
    with open(path, "rb") as raw:
        for part in read_text(kind, plain_by_name(raw, str(path), kind), columns):
            if isinstance(part, Rows):
                yield part.batch
