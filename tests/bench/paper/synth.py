"""Synthetic records: the generator of the paper's Table 1 (mechanism.md section 1).

Zero-based Zipf-Mandelbrot laws, p(x) proportional to (x - 1 + q)^-s for x = 1, 2, ..., drawn
exactly by inverse CDF.  Every user draws a number of records, every record a key and a time
uniform over one day.  Records are written in time order; memory is eight bytes a record plus
one row group.
"""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.errors import UsageError
from dpstream.state.disk_errors import file_error
from dpstream.state.durable import make_folder, replacing

DAY_MICROS = 86_400_000_000
#: 2^26 users and 2^37 micros of a day share one 63-bit sort key.
MAX_USERS = 1 << 26
MAX_KEYS = 10_000_000
_USER_BITS = 26
_CHUNK = 1 << 20


class Zipf(NamedTuple):
    """A zero-based Zipf-Mandelbrot law on 1 .. ``most``."""

    q: float
    s: float
    most: int

    def cdf(self) -> Float64:
        """P[X <= x] for x = 1 .. most; the last entry is exactly 1."""
        weights = (np.arange(self.most, dtype=np.float64) + self.q) ** -self.s
        # Summed from the small end, so that the tail keeps its digits.
        tail = np.cumsum(weights[::-1])[::-1]
        return np.asarray(1.0 - np.append(tail[1:], 0.0) / tail[0])

    def mean(self) -> float:
        """Expected value."""
        weights = (np.arange(self.most, dtype=np.float64) + self.q) ** -self.s
        return float(np.dot(weights, np.arange(1, self.most + 1)) / weights.sum())


RECORDS_PER_USER = Zipf(q=26, s=6.738, most=100_000)
KEY_Q, KEY_S = 1000, 1.4


class Synth(NamedTuple):
    """Parameters of a generated data set.

    Attributes:
        users, keys: how many users draw records, how many keys there are to draw.
        seed: the same parameters give the same records.
        start: first instant of the day in micros since the epoch.
        row_group_rows: rows of a Parquet row group (what a runner can spread).
        user_type: ``int`` for int64 users, ``string`` for text.
    """

    users: int = 10_000
    keys: int = 1_000_000
    seed: int = 0
    start: int = int(datetime(2024, 1, 1, tzinfo=UTC).timestamp()) * 1_000_000
    row_group_rows: int = 1_000_000
    user_type: Literal["int", "string"] = "int"

    def check(self) -> "Synth":
        """Refuse sizes beyond the limits; returns itself."""
        ranges = [
            ("users", self.users, MAX_USERS),
            ("keys", self.keys, MAX_KEYS),
            ("row_group_rows", self.row_group_rows, 1 << 24),
            ("seed", self.seed + 1, 1 << 63),
        ]
        for field, value, most in ranges:
            if not 1 <= value <= most:
                raise UsageError(field, f"must lie in range, at most {most}", "correct it")
        return self

    @property
    def schema(self) -> pa.Schema:
        """Columns of the file: user, key (string) and time (UTC micros)."""
        user = pa.int64() if self.user_type == "int" else pa.string()
        time = pa.timestamp("us", tz="UTC")
        return pa.schema([("user", user), ("key", pa.string()), ("time", time)])


def draw(law_cdf: Float64, count: int, rng: np.random.Generator) -> Int64:
    """``count`` exact draws (0-based ranks, int64) by inverse CDF."""
    uniforms = rng.random(count)
    return np.minimum(np.searchsorted(law_cdf, uniforms, side="right"), len(law_cdf) - 1)


def batches(params: Synth) -> Iterator[pa.RecordBatch]:
    """The records in time order, ``row_group_rows`` at a time (the last one shorter)."""
    params.check()
    root = np.random.SeedSequence(params.seed)
    count_rng, time_rng, key_rng = (np.random.default_rng(s) for s in root.spawn(3))
    sizes = draw_sizes(RECORDS_PER_USER.cdf(), params.users, count_rng)
    key_cdf = Zipf(KEY_Q, KEY_S, params.keys).cdf()
    names = numbered("k", params.keys)
    return records_of(sizes, (key_cdf, names), (time_rng, key_rng), params)


def draw_sizes(cdf: Float64, users: int, rng: np.random.Generator) -> Int64:
    """(users,) records of each user, >= 1, from the law whose CDF is given."""
    return np.concatenate(
        [draw(cdf, min(_CHUNK, users - b), rng) + 1 for b in range(0, users, _CHUNK)]
    )


def records_of(
    sizes: Int64,
    keys: tuple[Float64, pa.StringArray],
    rngs: tuple[np.random.Generator, np.random.Generator],
    params: Synth,
) -> Iterator[pa.RecordBatch]:
    """Records of users 1, 2, ... with ``sizes`` records each, uniform over the day, in time order.

    Args:
        sizes: (users,) records of each user; at most `MAX_USERS` users.
        keys: CDF over the keys and their names; every record draws its key independently.
        rngs: generators of the times and of the keys.
        params: row group size, start, user type and schema; its counts are not used.
    """
    names = keys[1]
    order = _times_and_users(sizes, rngs[0])
    for begin in range(0, len(order), params.row_group_rows):
        chunk = order[begin : begin + params.row_group_rows]
        users = pa.array(chunk & ((1 << _USER_BITS) - 1))
        times = (chunk >> _USER_BITS) + params.start
        columns = [
            users if params.user_type == "int" else _texts("u", users),
            names.take(pa.array(draw(keys[0], len(chunk), rngs[1]))),
            pa.array(times).view(pa.timestamp("us", tz="UTC")),
        ]
        yield pa.RecordBatch.from_arrays(columns, schema=params.schema)


def _times_and_users(sizes: Int64, rng: np.random.Generator) -> Int64:
    """Sorted ``time << 26 | user`` of every record (time in micros of the day, user from 1)."""
    ends = np.cumsum(sizes)
    order = np.empty(int(ends[-1]), np.int64)
    done = 0
    for begin in range(0, len(sizes), _CHUNK):
        chunk = sizes[begin : begin + _CHUNK]
        ids = np.repeat(np.arange(begin + 1, begin + 1 + len(chunk)), chunk)
        times = rng.integers(0, DAY_MICROS, len(ids))
        order[done : done + len(ids)] = times << _USER_BITS | ids
        done += len(ids)
    order.sort()
    return order


def numbered(prefix: str, count: int) -> pa.StringArray:
    """``prefix`` and the numbers 1 .. count, padded to seven digits."""
    return _texts(prefix, pa.array(np.arange(1, count + 1)))


def _texts(prefix: str, numbers: pa.Array) -> pa.StringArray:
    padded = pc.utf8_lpad(numbers.cast(pa.string()), 7, "0")
    return pc.binary_join_element_wise(prefix, padded, "")


def generate(params: Synth, path: str | Path, overwrite: bool = False) -> int:
    """Write the records to one Parquet file; see `write_batches`. Returns their number."""
    return write_batches(batches(params), params, path, overwrite)


def write_batches(
    source: Iterator[pa.RecordBatch], params: Synth, path: str | Path, overwrite: bool = False
) -> int:
    """Write record batches to one Parquet file; it appears complete or not at all.

    Returns:
        The number of records.

    Raises:
        UsageError: the file exists (unless ``overwrite``), or a size is beyond its limit.
        RunError: the file cannot be written.
    """
    path = Path(path)
    if path.exists() and not overwrite:
        raise UsageError("output file", "exists", "choose another name, or --overwrite")
    rows = 0
    try:
        make_folder(path.parent)
        with (
            replacing(path) as draft,
            pq.ParquetWriter(draft, params.schema, compression="snappy") as writer,
        ):
            for batch in source:
                writer.write_batch(batch, row_group_size=params.row_group_rows)
                rows += batch.num_rows
    except OSError as error:
        raise file_error("output file", "cannot be written", error) from None
    return rows
