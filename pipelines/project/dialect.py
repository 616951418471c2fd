"""What a table declares of its files: the CSV dialect, and the format, unit and zone of its time.

`pipelines.formats.dialect` reads files by it.  It is part of a plan: other readings of the same
files are other data.
"""

import codecs
import re
import zoneinfo

import msgspec

from dpstream.accounting.errors import UsageError, refuse_first
from dpstream.accounting.places import file_kind
from dpstream.pipelines.project.sections import CsvSection, TableSection, TimeColumn

#: The patterns of the directives of a time's format.
DIRECTIVES = {
    "Y": "[0-9]{4}",
    "y": "[0-9]{2}",
    "m": "[0-9]{1,2}",
    "b": "[A-Za-z]{3}",
    "B": "[A-Za-z]{3,9}",
    "d": "[0-9]{1,2}",
    "H": "[0-9]{1,2}",
    "I": "[0-9]{1,2}",
    "M": "[0-9]{1,2}",
    "S": "[0-9]{1,2}",
    "f": "[0-9]{1,9}",
    "p": "[AaPp][Mm]",
    "z": "Z|[+-][0-9]{2}:?[0-9]{2}",
}
#: Encodings in which each character stands for itself, and no other one holds a line end's byte.
#: ``utf-16`` is none: its first bytes, which may be a row's, would decide how all others are read.
_NAMED = (
    "ascii utf-8 utf-16-le utf-16-be koi8-r koi8-u mac-roman shift_jis cp932 euc_jp gb2312",
    "gbk gb18030 big5 cp949 cp950 euc_kr cp437 cp850 cp852 cp855 cp858 cp866 cp874",
)
ENCODINGS = frozenset(
    [name for names in _NAMED for name in names.split()]
    + [f"iso8859-{number}" for number in range(1, 17) if number != 12]
    + [f"cp{number}" for number in range(1250, 1259)]
)
#: SQL types of numbers.
NUMBERS = ("INT64", "FLOAT64", "NUMERIC")
_THOUSANDS = (*".,' _", "\u2019", "\u00a0", "\u202f")


class Reading(msgspec.Struct, frozen=True):
    """How a table's files are read.

    Attributes:
        csv: how CSV files are written.
        time: the time column, if its format, unit or zone is declared.
        numbers: columns whose texts are numbers.
    """

    csv: CsvSection = CsvSection()
    time: TimeColumn | None = None
    numbers: tuple[str, ...] = ()

    @property
    def converts(self) -> bool:
        """Return whether columns have values that are read in another way than usual."""
        return self.time is not None or bool(self.numbers)

    def text(self, end: int) -> str | None:
        """Return what is declared, for a plan; ``None``: nothing.

        Args:
            end: micros; offsets of the zone until then are part of it.
        """
        from dpstream.accounting.plan.plan import declared  # loads the mechanisms

        form = declared(self)
        if self.time is not None and self.time.zone is not None:
            from dpstream.accounting.zones import zone_of

            form["zone"] = zone_of(self.time.zone).digest(end)
        return msgspec.json.encode(form, order="sorted").decode() if form else None


PLAIN = Reading()


def reading_of(where: str, table: TableSection, numbers: tuple[str, ...]) -> Reading:
    """Return how a table's files are read.

    Args:
        where: the table's section, for errors.
        numbers: columns whose texts are numbers; they matter where signs are declared.

    Raises:
        UsageError: names the field whose value cannot be used.
    """
    csv, time = table.csv or CsvSection(), table.time_column
    if table.csv is not None and (table.format or file_kind(table.path or "")) != "csv":
        raise UsageError(f"{where}.csv", "is for CSV, which this table is not", "remove it")
    check_csv(f"{where}.csv", csv)
    if not isinstance(time, TimeColumn) or time == TimeColumn(time.column):
        time = None
    else:
        _check_time(f"{where}.time_column", time)
    return Reading(csv, time, numbers if csv.signed else ())


def check_csv(where: str, csv: CsvSection) -> None:
    """Refuse what is declared of CSV files if it cannot be used.

    Raises:
        UsageError: names the field below ``where``.
    """
    sign = csv.delimiter
    refuse_first(
        (
            len(sign) != 1 or not sign.isascii() or sign.isalnum() or sign in '"\r\n\0',
            UsageError(f"{where}.delimiter", "is not one sign of ASCII", 'write e.g. ";" or "\\t"'),
        ),
        (
            csv.thousands and (csv.thousands not in _THOUSANDS or csv.thousands == csv.decimal),
            UsageError(
                f"{where}.thousands",
                "is none of . , ' _ and spaces, or is the decimal sign",
                f"write thousands = '{',' if csv.decimal == '.' else '.'}'",
            ),
        ),
        (
            encoding_of(csv.encoding) is None,
            UsageError(
                f"{where}.encoding",
                "is not read: it is unknown, or a byte could change the rows after it",
                'write e.g. "latin-1", "cp1252" or "utf-16-le", or convert the file to UTF-8',
            ),
        ),
        (
            csv.names is not None and (not csv.names or len({*csv.names}) < len(csv.names)),
            UsageError(
                f"{where}.names", "are none, or not all different", 'write e.g. ["user", "at"]'
            ),
        ),
    )


def encoding_of(name: str) -> str | None:
    """Return the usual name of an encoding that can be read."""
    try:
        usual = codecs.lookup(name).name
    except (LookupError, ValueError):
        return None
    return usual if usual in ENCODINGS else None


def check_zone(field: str, zone: str) -> None:
    """Refuse a zone that the tz database of this machine lacks."""
    try:
        zoneinfo.ZoneInfo(zone)
    except (ValueError, OSError, zoneinfo.ZoneInfoNotFoundError):
        raise UsageError(
            field,
            "is no zone of the tz database here",
            'write e.g. "Europe/Berlin"; without a database of zones: pip install tzdata',
        ) from None


def _check_time(where: str, time: TimeColumn) -> None:
    if time.unit is not None and (time.format or time.zone):
        raise UsageError(f"{where}.unit", "counts from 1970 in UTC", "omit format and zone")
    if time.zone is not None:
        check_zone(f"{where}.zone", time.zone)
    if time.format is None:
        return
    names = re.findall("%(.?)", time.format)
    unknown = [name for name in names if name not in DIRECTIVES and name != "%"]
    dated = {"Y", "y"} & {*names} and {"m", "b", "B"} & {*names} and "d" in names
    twice = len({*names}) < len(names) or any(
        len(both & {*names}) > 1 for both in ({"Y", "y"}, {"m", "b", "B"}, {"H", "I"})
    )
    halves = ("I" in names) != ("p" in names)
    if unknown or not dated or twice or halves:
        raise UsageError(
            f"{where}.format",
            "must have year, month and day, each directive once (%I with %p), and no others than"
            f" {' '.join('%' + name for name in DIRECTIVES)}",
            'write e.g. "%d.%m.%Y %H:%M"',
        )
