"""Parquet: a damaged file gives rows, refusals or a public error; a whole one gives its own rows.

An input is a file of the corpus with bytes changed.  Its footer says, read by `pyarrow`, how many
rows there are; each is read or, from one position on, refused.  `round_trip` writes tables of drawn
types, encodings and sizes: what was written is what must be read.
"""

import io
import random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.formats.parquet import read_row_group, row_groups
from dpstream.pipelines.formats.rows import Refused
from tests.fuzz.texts import WrongError

COLUMNS = ("user", "page", "n")
TOKENS = {"parquet": [b"PAR1", b"\x15\x00", b"\x19\x1c", b"\x00" * 8, b"\xff" * 8, b"\x7f" * 4,
                      b"\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01", b"user", b"schema"]}  # fmt: skip


def target(_: str) -> Any:
    """How a file is checked: most are damaged; one that begins with "seed" draws a table."""
    return _check


def _check(data: bytes) -> None:
    if data.startswith(b"seed"):
        round_trip(int.from_bytes(data[4:12], "little"))
    else:
        damaged(data)


def damaged(data: bytes) -> None:
    """Read what may be no Parquet."""
    try:
        starts = row_groups(io.BytesIO(data), COLUMNS)
    except UsageError:
        return
    sizes = [] if starts is None else _sizes(data)
    for group, start in enumerate(starts or ()):
        if sum(sizes[:group]) != start:
            raise WrongError("another first row: of a group")
        if sizes[group] < 1 << 20:
            rows, end = _rows(data, group, start)
            if end is None and rows != sizes[group]:
                raise WrongError(f"lost rows: {rows} of {sizes[group]} are read, none refused")


def _sizes(data: bytes) -> list[int]:
    meta = pq.read_metadata(io.BytesIO(data))
    return [meta.row_group(group).num_rows for group in range(meta.num_row_groups)]


def _rows(data: bytes, group: int, start: int) -> tuple[int, int | None]:
    """How many rows are read, and which is the first that is refused."""
    rows = 0
    for part in read_row_group(io.BytesIO(data), COLUMNS, group, start):
        if isinstance(part, Refused):
            if part.offsets.tolist() != [start + rows]:
                raise WrongError("another position: of the refused rest")
            return rows, start + rows
        part.batch.validate(full=True)
        if part.offset != start + rows:
            raise WrongError("another position: of rows")
        rows += part.batch.num_rows
    return rows, None


def round_trip(seed: int) -> None:
    """Write a table and read it."""
    rng = random.Random(seed)
    rows = int(3000 ** rng.random())
    table = pa.table({name: _column(rng, rows) for name in (*COLUMNS, "more")})
    file = io.BytesIO()
    pq.write_table(
        table, file, row_group_size=rng.randint(1, 2 * rows),
        compression=rng.choice(("none", "snappy", "gzip", "zstd", "lz4")),
        use_dictionary=rng.random() < 0.5, data_page_size=rng.choice((10, 1000, 1 << 20)),
        data_page_version=rng.choice(("1.0", "2.0")), write_page_checksum=rng.random() < 0.5,
        write_statistics=rng.random() < 0.5, store_schema=rng.random() < 0.5,
    )  # fmt: skip
    written, read = file.getvalue(), list[dict[str, Any]]()
    for group, start in enumerate(row_groups(io.BytesIO(written), COLUMNS) or ()):
        for part in read_row_group(io.BytesIO(written), COLUMNS, group, start):
            if isinstance(part, Refused):
                raise WrongError(f"lost rows: {part.reasons} of a whole file")
            read += part.batch.to_pylist()
    if read != table.select(COLUMNS).to_pylist():
        raise WrongError("other rows: than were written")


def _column(rng: random.Random, rows: int) -> pa.Array:
    kind, missing = rng.choice(list(_VALUES)), rng.choice((0, 0.1, 1))
    values = [None if rng.random() < missing else _VALUES[kind](rng) for _ in range(rows)]
    return pa.array(values, kind)


def _word(rng: random.Random) -> str:
    return rng.choice('aé€😀\0" ,') * rng.randint(0, 9)


_VALUES: dict[pa.DataType, Any] = {
    pa.string(): _word,
    pa.large_string(): _word,
    pa.binary(): lambda rng: rng.randbytes(rng.randint(0, 9)),
    pa.int64(): lambda rng: rng.randint(-(1 << 63), (1 << 63) - 1),
    pa.uint8(): lambda rng: rng.randrange(256),
    pa.float64(): lambda rng: rng.gauss(0, 1e9),
    pa.bool_(): lambda rng: rng.random() < 0.5,
    pa.timestamp("us", "UTC"): lambda rng: rng.randrange(1 << 50),
    pa.timestamp("ms"): lambda rng: rng.randrange(1 << 40),
    pa.date32(): lambda rng: rng.randrange(20_000),
    pa.decimal128(9, 2): lambda rng: rng.randrange(1000),
}
