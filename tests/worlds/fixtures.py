"""The variants of one day: each writes the same records in a file of its own form.

``VARIANTS`` has each form once and random combinations of them; a new form goes through all doors
(`tests.worlds.test_doors`) when it is added to its list.
"""

import bz2
import gzip
import io
import itertools
import json
import lzma
import random
import uuid
import zipfile
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import feather, orc

SHOPS = ("Läden", "shop; two", 'the "third"')
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Row(NamedTuple):
    """A record: its unit's number, key, instant and amount."""

    user: int
    shop: str
    at: datetime
    amount: Decimal


#: Both changes of European clocks lie between the rows; no local time of them is there twice.
ROWS = [
    Row(
        2**63 + number % 13 if number % 3 == 0 else number % 13,
        SHOPS[number % 3],
        datetime(2024, 3, 30, tzinfo=UTC) + timedelta(hours=6 * number, minutes=7 * number),
        Decimal(number % 7 * 123_456 - 200_000) / 100,
    )
    for number in range(96)
]


class Variant(NamedTuple):
    """A form of the day.

    Attributes:
        name: of the file; its ending tells the format.
        data: content of the file.
        table: lines of the table's section, without path and columns of units.
        unit: type of the unit.
        whole_days: whether only the day of a time is written.
        inside: path of the object that holds all fields, with its point.
    """

    name: str
    data: bytes
    table: str = 'time_column = "at"'
    unit: str = "int"
    whole_days: bool = False
    inside: str = ""


# --- CSV -------------------------------------------------------------------------------------


class Clock(NamedTuple):
    """A way to write times: what the section declares of them, and the text of an instant."""

    declared: str
    text: Callable[[datetime], str]
    whole_days: bool = False


def local(form: str, zone: str = "UTC") -> Callable[[datetime], str]:
    return lambda at: at.astimezone(ZoneInfo(zone)).strftime(form)


def clock(form: str, zone: str | None = None, days: bool = False) -> Clock:
    named = "" if zone is None else f', zone = "{zone}"'
    return Clock(f', format = "{form}"{named}', local(form, zone or "UTC"), days)


CLOCKS = {
    "rfc": Clock("", lambda at: at.isoformat().replace("+00:00", "Z")),
    "space": Clock("", local("%Y-%m-%d %H:%M:%S")),
    "offset": Clock("", local("%Y-%m-%dT%H:%M:%S+05:30", "Asia/Kolkata")),
    "date": Clock("", local("%Y-%m-%d"), whole_days=True),
    "naive": Clock(', zone = "America/New_York"', local("%Y-%m-%d %H:%M:%S", "America/New_York")),
    "german": clock("%d.%m.%Y %H:%M", "Europe/Berlin"),
    "american": clock("%m/%d/%Y %I:%M %p"),
    "apache": clock("%d/%b/%Y:%H:%M:%S %z"),
    "short year": clock("%y%m%d%H%M%S"),
    "full month": clock("%B %d, %Y %H:%M"),
    "micros": clock("%Y-%m-%d %H:%M:%S.%f"),
    "day": clock("%d.%m.%Y", days=True),
    "seconds": Clock(', unit = "s"', lambda at: str(int(at.timestamp()))),
    "fractions": Clock(', unit = "s"', lambda at: f"{at.timestamp():.3f}"),
    "millis": Clock(', unit = "ms"', lambda at: str(int(at.timestamp()) * 1000)),
}
DELIMITERS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "pipe"}
#: (decimal, thousands)
SIGNS = {(".", ""): "", (",", ""): "comma", (",", "."): "german", (".", ","): "american",
         (",", " "): "french", (".", "'"): "swiss"}  # fmt: skip
ENCODINGS = (
    "utf-8",
    "latin-1",
    "cp1252",
    "utf-16-le",
    "utf-16-be",
    "mac-roman",
    "cp850",
    "iso8859-15",
)
HEADS = ("header", "preamble", "no header", "mark")


def zipped(data: bytes, members: int = 1) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(members):
            archive.writestr(f"day {number}.csv", data)
    return buffer.getvalue()


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zip": zipped,
    ".zst": lambda data: pa.compress(data, "zstd", asbytes=True),
}  # fmt: skip
NAMES = ("user", "shop", "at", "amount")


def amount_text(amount: Decimal, decimal: str, thousands: str) -> str:
    text = f"{amount:,.2f}".replace(",", "T").replace(".", decimal)
    return text.replace("T", thousands)


def csv_of(
    time: str = "rfc",
    delimiter: str = ",",
    signs: tuple[str, str] = (".", ""),
    encoding: str = "utf-8",
    head: str = "header",
    packer: str = "",
    end: str = "\n",
    breaks: bool = False,
) -> Variant:
    def line(*fields: str) -> str:
        special = (delimiter, '"', "\n")
        quoted = (
            '"' + field.replace('"', '""') + '"' if any(s in field for s in special) else field
            for field in fields
        )
        return delimiter.join(quoted) + end

    written = CLOCKS[time]
    text = "".join(
        line(
            str(row.user),
            row.shop,
            written.text(row.at),
            amount_text(row.amount, *signs),
            *[f'no {end}"{end * 2}comma{delimiter}'] * breaks,
        )
        for row in ROWS
    )
    first = {"no header": "", "preamble": f"Report of a day{end}{end}"}.get(head, "")
    if head != "no header":
        first += line(*NAMES, *["note"] * breaks)
    marked = head in ("mark", "no header") and encoding.startswith("utf")
    mark = "\ufeff".encode(encoding) if marked else b""
    fields = {
        "delimiter": delimiter != "," and json.dumps(delimiter),
        "decimal": signs[0] != "." and json.dumps(signs[0]),
        "thousands": signs[1] and json.dumps(signs[1]),
        "encoding": encoding != "utf-8" and json.dumps(encoding),
        "skip_rows": head == "preamble" and "2",
        "names": head == "no header" and json.dumps([*NAMES, *["note"] * breaks]),
        "line_breaks_in_quotes": breaks and "true",
    }
    declared = ", ".join(f"{name} = {value}" for name, value in fields.items() if value)
    form = [DELIMITERS[delimiter], SIGNS[signs], encoding, head, "crlf" * (end != "\n"), time]
    form += ["breaks"] * breaks
    return Variant(
        "-".join(filter(None, form)).replace(" ", "_") + f".csv{packer}",
        PACKERS[packer](mark + (first + text).encode(encoding)),
        f'csv = {{ {declared} }}\ntime_column = {{ column = "at"{written.declared} }}',
        whole_days=written.whole_days,
    )


AXES: dict[str, list[Any]] = {
    "time": list(CLOCKS), "delimiter": list(DELIMITERS), "signs": list(SIGNS),
    "encoding": list(ENCODINGS), "head": list(HEADS), "packer": list(PACKERS),
    "end": ["\n", "\r\n"], "breaks": [False, True],
}  # fmt: skip


def csv_variants() -> list[Variant]:
    alone = [csv_of(**{axis: value}) for axis, values in AXES.items() for value in values]
    drawn = random.Random(52)
    mixed = [
        csv_of(**{axis: drawn.choice(values) for axis, values in AXES.items()}) for _ in range(70)
    ]
    return list({variant.name: variant for variant in [*alone, *mixed]}.values())


# --- JSON Lines ------------------------------------------------------------------------------


def jsonl_of(name: str, declared: str, value: Callable[[datetime], object]) -> Variant:
    objects = (
        {"user": row.user, "shop": row.shop, "at": value(row.at), "amount": float(row.amount)}
        for row in ROWS
    )
    data = "".join(json.dumps(record) + "\n" for record in objects).encode()
    return Variant(f"{name}.jsonl", data, f'time_column = {{ column = "at"{declared} }}')


def json_variants() -> list[Variant]:
    """The objects of lines in an array, and in other objects."""
    [plain] = [variant for variant in JSON_LINES if variant.name == "rfc.jsonl"]
    records = [json.loads(line) for line in plain.data.splitlines()]
    spiked = [record | {"more": '\\"}], [{"', "list": [[], {}]} for record in records]
    arrays = {
        "array": json.dumps(spiked),
        "lines": json.dumps(spiked, indent=1, ensure_ascii=False),
    }
    texts = {f"{name}.json": text.encode() for name, text in arrays.items()}
    texts["array.json.xz"] = lzma.compress(texts["array.json"])
    inner = [json.dumps({"event": {"deep": record}}) for record in spiked]
    return [
        *(plain._replace(name=name, data=text) for name, text in texts.items()),
        within(plain._replace(name="nested.jsonl", data="\n".join(inner).encode()), "event.deep."),
    ]


def within(variant: Variant, inside: str) -> Variant:
    table = variant.table.replace('column = "', f'column = "{inside}')
    return variant._replace(table=table, inside=inside)


JSON_LINES = [
    jsonl_of("rfc", "", CLOCKS["rfc"].text),
    jsonl_of("german", CLOCKS["german"].declared, CLOCKS["german"].text),
    jsonl_of("seconds", ', unit = "s"', lambda at: int(at.timestamp())),
    jsonl_of("seconds as text", ', unit = "s"', lambda at: str(int(at.timestamp()))),
    jsonl_of("fractions", ', unit = "s"', lambda at: at.timestamp() + 0.5),
    jsonl_of("millis", ', unit = "ms"', lambda at: int(at.timestamp()) * 1000),
]

# --- Parquet ---------------------------------------------------------------------------------


def seconds(kind: pa.DataType, per_second: int = 1) -> pa.Array:
    return pa.array([int(row.at.timestamp()) * per_second for row in ROWS], pa.int64()).cast(kind)


def instants(unit: str, zone: str | None = None) -> pa.Array:
    """Of local clocks where there is no zone: UTC."""
    ticks = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit]
    return seconds(pa.int64(), ticks).cast(pa.timestamp(unit, zone))


USERS = [str(row.user) for row in ROWS]
RAW = [uuid.UUID(int=row.user).bytes for row in ROWS]
UNITS = {
    "uint64": ("int", pa.array([row.user for row in ROWS], pa.uint64())),
    "int64": ("int", pa.array([row.user % 2**63 for row in ROWS], pa.int64())),
    "int16": ("int", pa.array([row.user % 2**63 for row in ROWS], pa.int16())),
    "string": ("string", pa.array(USERS)),
    "large_string": ("string", pa.array(USERS, pa.large_string())),
    "string_view": ("string", pa.array(USERS, pa.string_view())),
    "dictionary": ("string", pa.array(USERS).dictionary_encode()),
    "binary": ("bytes", pa.array(RAW)),
    "fixed": ("bytes", pa.array(RAW, pa.binary(16))),
    "uuid": ("bytes", pa.ExtensionArray.from_storage(pa.uuid(), pa.array(RAW, pa.binary(16)))),
}
BERLIN = [row.at.astimezone(ZoneInfo("Europe/Berlin")).replace(tzinfo=None) for row in ROWS]
TIMES: dict[str, tuple[str, pa.Array]] = {
    **{f"timestamp {unit}": ("", instants(unit, "UTC")) for unit in ("s", "ms", "us", "ns")},
    "naive": ("", instants("us")),
    "zone": ("", instants("us", "Europe/Berlin")),
    "local": (', zone = "Europe/Berlin"', pa.array(BERLIN, pa.timestamp("us"))),
    "text": ("", pa.array([row.at.isoformat() for row in ROWS])),
    "int32 seconds": (', unit = "s"', seconds(pa.int32())),
    "double seconds": (', unit = "s"', seconds(pa.float64())),
    "uint64 millis": (', unit = "ms"', seconds(pa.uint64(), 1000)),
    "int64 micros": (', unit = "us"', seconds(pa.int64(), 10**6)),
    "date": ("", pa.array([row.at.date() for row in ROWS])),
}
AMOUNTS = {
    "double": pa.array([float(row.amount) for row in ROWS]),
    "decimal": pa.array([row.amount for row in ROWS], pa.decimal128(20, 2)),
    "small decimal": pa.array([row.amount for row in ROWS], pa.decimal128(9, 2)),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {}, "groups": {"row_group_size": 7}, "v2": {"data_page_version": "2.0"},
    "gzip": {"compression": "gzip"}, "zstd": {"compression": "zstd"},
    "checksums": {"write_page_checksum": True}, "no dictionary": {"use_dictionary": False},
}  # fmt: skip


Writer = Callable[..., object]


def parquet_of(
    unit: str = "string",
    time: str = "naive",
    amount: str = "double",
    layout: str = "plain",
    ending: str = "parquet",
    write: Writer = pq.write_table,
    inside: str = "",
) -> Variant:
    kind, users = UNITS[unit]
    declared, times = TIMES[time]
    shops = pa.array([row.shop for row in ROWS])
    table = pa.table({"user": users, "shop": shops, "at": times, "amount": AMOUNTS[amount]})
    for name in filter(None, reversed(inside.split("."))):
        table = pa.table({name: pa.chunked_array([table.to_struct_array().combine_chunks()])})
    sink = pa.BufferOutputStream()
    write(table, sink, **LAYOUTS[layout])
    name = f"{inside}{unit}-{time}-{amount}-{layout}.{ending}".replace(" ", "_")
    column = f'time_column = {{ column = "at"{declared} }}'
    data = sink.getvalue().to_pybytes()
    return within(Variant(name, data, column, kind, whole_days=time == "date"), inside)


#: Forms that ORC has not; `orc` writes no dictionaries.
NOT_ORC = {"dictionary", "string_view", "uuid", "uint64", "uint64 millis"}


def columnar_variants() -> list[Variant]:
    """Arrow and ORC by type, and all formats with all columns in a struct."""
    writers: dict[str, Writer] = {"arrow": feather.write_feather, "orc": orc.write_table}
    forms: list[dict[str, Any]] = [{"unit": unit} for unit in UNITS]
    forms += [{"time": time} for time in TIMES]
    forms += [{"amount": amount} for amount in AMOUNTS] + [{"inside": "event."}]
    plain = [
        parquet_of(**form, ending=ending, write=write)
        for ending, write in writers.items()
        for form in forms
        if ending != "orc" or not NOT_ORC & {*form.values()}
    ]
    units = ("uint64", "string", "large_string", "dictionary", "binary", "uuid")
    nested = [parquet_of(unit, inside="event.") for unit in units]
    return [*plain, *nested, parquet_of("int64", "zone", "decimal", "groups", inside="a.b.")]


def parquet_variants() -> list[Variant]:
    forms = {"unit": UNITS, "time": TIMES, "amount": AMOUNTS, "layout": LAYOUTS}
    axes: dict[str, list[Any]] = {axis: list(values) for axis, values in forms.items()}
    alone = [parquet_of(**{axis: value}) for axis, values in axes.items() for value in values]
    drawn = random.Random(53)
    mixed = (
        parquet_of(**{axis: drawn.choice(values) for axis, values in axes.items()})
        for _ in range(25)
    )
    return list({v.name: v for v in itertools.chain(alone, mixed)}.values())


VARIANTS = {
    v.name: v
    for v in [
        *csv_variants(),
        *JSON_LINES,
        *json_variants(),
        *parquet_variants(),
        *columnar_variants(),
    ]
}


def instant_of(row: Row, variant: Variant) -> int:
    """The microseconds that a variant's time means."""
    at = row.at
    if variant.whole_days:
        at = datetime.combine(date(at.year, at.month, at.day), datetime.min.time(), UTC)
    half = timedelta(milliseconds=500 if variant.name == "fractions.jsonl" else 0)
    return (at + half - EPOCH) // timedelta(microseconds=1)


def write(folder: Path, variant: Variant) -> Path:
    path = folder / variant.name
    path.write_bytes(variant.data)
    return path
