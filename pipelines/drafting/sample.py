"""What a public sample says of a file: the forms of its times and numbers, its days and bounds.

Nothing of it is read unless the operator says that the values are public (``--public-sample``).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from datetime import date, timedelta
from typing import Literal, TypeVar
from zoneinfo import ZoneInfo

import msgspec
import numpy as np
import pyarrow as pa

from dpstream.accounting.arrays import Float64
from dpstream.accounting.errors import UsageError
from dpstream.accounting.figures import moment_of
from dpstream.accounting.places import COLUMNAR
from dpstream.dp_transforms.ingest import columns as ingest
from dpstream.pipelines.drafting.columns import FIELD, DataFile, text_column
from dpstream.pipelines.formats.compression import LIST_INSIDE, plain_by_name
from dpstream.pipelines.formats.dialect import read_as
from dpstream.pipelines.formats.lines import MAX_LINE_BYTES, BrokenFileError
from dpstream.pipelines.formats.parquet import read_row_group, row_groups
from dpstream.pipelines.formats.rows import Rows
from dpstream.pipelines.formats.texts import read_text
from dpstream.pipelines.project.dialect import Reading
from dpstream.pipelines.project.sections import CsvSection, TimeColumn
from dpstream.state.disk_errors import file_error

SAMPLE_ROWS = 1_000_000
#: Rows that forms of times and numbers are tried with.
_TRIED_ROWS = 10_000
#: Lines of JSON whose names are gathered.
_NAMED_LINES = 100


#: Forms of times that a sample is tried with.
_DAYS = ("%d.%m.%Y", "%d.%m.%y", "%Y/%m/%d", "%d-%m-%Y", "%d %b %Y", "%Y%m%d")
_FORMATS = (
    *(f"{day}{hour}" for day in _DAYS for hour in ("", " %H:%M", " %H:%M:%S")),
    "%d/%b/%Y:%H:%M:%S %z",
    *(f"{day}{hour}" for day in ("%d/%m/%Y", "%m/%d/%Y")
      for hour in ("", " %H:%M", " %H:%M:%S", " %I:%M %p", " %I:%M:%S %p")),
)  # fmt: skip
_UNITS: tuple[Literal["s", "ms", "us"], ...] = ("s", "ms", "us")
#: Times that numbers may stand for, in micros: 1980 to 2080.
_LIKELY = (315_532_800_000_000, 3_471_292_800_000_000)
#: Decimal and thousands signs that a sample is tried with.
_SIGNS = ((",", ""), (",", "."), (",", " "), (".", ","), (".", "'"))
_Form = TypeVar("_Form")


def sampled_time(file: DataFile, time: TimeColumn) -> TimeColumn:
    """Return the time column with the form that its values have in the first rows of a sample.

    Raises:
        UsageError: the values fit two forms, or another unit than the declared one.
    """
    forms = [msgspec.structs.replace(time, format=form) for form in _FORMATS if not time.unit]
    if time.zone is None:
        forms += [msgspec.structs.replace(time, unit=unit) for unit in _UNITS]

    def share(form: TimeColumn) -> float:
        plain = form == TimeColumn(form.column)
        reading = Reading(file.csv, None if plain else form)
        for batch in _batches(file, (form.column,), reading, _TRIED_ROWS):
            micros, good = ingest.instant(batch.column(0))
            if not plain:
                good &= (micros >= _LIKELY[0]) & (micros < _LIKELY[1])
            return float(good.mean())
        return 0.0

    if time.format is not None:
        return time
    form = _fitting(time, forms, share, "--time", lambda form: f"--time-format '{form.format}'")
    if time.unit not in (None, form.unit):
        raise UsageError(
            "--time-unit",
            f"{time.unit} gives fewer times between 1980 and 2080 than {form.unit}",
            f"give --time-unit {form.unit}; or omit --public-sample and give --start and --end",
        )
    return form


def sampled_numbers(file: DataFile, columns: Sequence[str]) -> DataFile:
    """Return the file with the signs that the numbers of columns have in its first rows.

    Raises:
        UsageError: the numbers fit two pairs of signs.
    """

    def share(csv: CsvSection) -> float:
        reading = Reading(csv, numbers=tuple(columns))
        for batch in _batches(file._replace(csv=csv), columns, reading, _TRIED_ROWS):
            return float(min(ingest.measure(column)[1].mean() for column in batch.columns))
        return 0.0

    def flags(csv: CsvSection) -> str:
        return "--csv decimal=," if csv.decimal == "," else f"--csv thousands={csv.thousands}"

    csv = file.csv
    is_declared = csv.decimal != "." or csv.thousands
    if not columns or file.kind != "csv" or is_declared:
        return file
    forms = [msgspec.structs.replace(csv, decimal=one, thousands=other) for one, other in _SIGNS]
    return file._replace(csv=_fitting(csv, forms, share, "--value", flags))


def _fitting(
    plain: _Form,
    forms: Sequence[_Form],
    share: Callable[[_Form], float],
    flag: str,
    written: Callable[[_Form], str],
) -> _Form:
    """Return the first form that most of the values fit; the plain one where it fits as many.

    Args:
        written: the flag that declares a form: two flags are two ways to read.
    """
    least = share(plain)
    shares = [share(form) for form in forms] if least < 1 else []
    most = max(shares, default=0.0)
    if most <= least:
        return plain
    best = [form for form, fits in zip(forms, shares, strict=True) if fits == most]
    ways = {written(form) for form in best}
    if len(ways) > 1:
        options = " or ".join(sorted(ways))
        raise UsageError(flag, "has values that may be read in two ways", f"add {options}")
    return best[0]


def with_names(file: DataFile) -> DataFile:
    """Return the same with the names of the first lines, where the file is of JSON Lines.

    Raises:
        UsageError: none of them is an object.
        RunError: the operating system cannot read it.
    """
    if file.columns is not None:
        return file
    names = dict[str, None]()
    try:
        with open(file.first, "rb") as raw:
            text = plain_by_name(raw, str(file.first), file.kind)
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
            FIELD,
            "does not begin with JSON objects, one a line",
            f"write one object a line{LIST_INSIDE}",
        )
    return file._replace(columns=tuple(map(text_column, names)))


def stretch(file: DataFile, unit: tuple[str, str], time: TimeColumn) -> tuple[date, date]:
    """Return the days that the times lie on, of the time's zone or UTC: the first, and the one
    after the last.

    Raises:
        UsageError: no row has a unit of its type (column, type), or none a time.
    """
    low, high, units = math.inf, -math.inf, False
    reading = Reading(file.csv, None if time == TimeColumn(time.column) else time)
    for batch in _batches(file, (unit[0], time.column), reading):
        micros, good = ingest.instant(batch.column(1))
        units = units or bool(ingest.unit_identity(batch.column(0), unit[1])[1].any())
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
            "write times like 2024-01-31T12:00:00Z, or say how they are written: --time-format "
            "'%d.%m.%Y %H:%M', or --time-unit s",
        )
    zone = ZoneInfo(time.zone or "UTC")
    try:
        first, last = (moment_of(int(t)).astimezone(zone).date() for t in (low, high))
        return first, last + timedelta(days=1)
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
    for batch in _batches(file, (column,), Reading(file.csv, numbers=(column,))):
        amounts, good = ingest.measure(batch.column(0))
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


def _batches(
    file: DataFile, columns: Sequence[str], reading: Reading, rows: int | None = None
) -> Iterator[pa.RecordBatch]:
    """The first rows as the readers of a job give them; positions of columns as in ``columns``."""
    left = rows or SAMPLE_ROWS
    try:
        for batch in _read(file, list(dict.fromkeys(columns))):
            yield read_as(batch.slice(0, left), reading).select(list(columns))
            left -= batch.num_rows
            if left <= 0:
                return
    except (pa.ArrowException, BrokenFileError):
        return
    except OSError as error:
        raise file_error(FIELD, "cannot be read", error) from None


def _read(file: DataFile, columns: list[str]) -> Iterator[pa.RecordBatch]:
    path, kind = str(file.first), file.kind
    if kind in COLUMNAR:
        for group, first in enumerate(row_groups(path, columns, FIELD, "the file", kind) or ()):
            parts = read_row_group(path, columns, group, first, kind)
            yield from (part.batch for part in parts if isinstance(part, Rows))
        return
    with open(path, "rb") as raw:
        for part in read_text(kind, plain_by_name(raw, path, kind), columns, csv=file.csv):
            if isinstance(part, Rows):
                yield part.batch
