"""Small public plans, generated streams and runs, shared by the tests of several folders."""

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dpstream.accounting.arrays import Int64
from dpstream.accounting.fields import Aggregate, Field
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.plan.privacy import Privacy
from dpstream.accounting.plan.timeline import Timeline
from dpstream.dp_transforms.batches import OFFSET, PARTITION
from dpstream.dp_transforms.flow import run_in_memory
from dpstream.dp_transforms.ingest.records import canonical_public_keys
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.dp_transforms.run import Performance, Run, begin_run
from dpstream.state import open as stores

#: Distance of public triggers; all test plans count time in these.
STEP = 1_000_000
START = 1_700_000_000 * STEP
KEYS = SecretSource(None, "11" * 32)
RUN_ID = "22" * 16

COUNT = Aggregate("n", "count")
SUM = Aggregate("total", "sum", "value", (-3.0, 7.0), 0.5)
MEAN = Aggregate("level", "mean", "value", (-2.0, 6.0), 0.25)
UNITS = Aggregate("people", "units")
#: A sum of the numbers that MEAN is of: it is made from the mean's sums.
TWIN = Aggregate("sum_of_levels", "sum", "value", (-2.0, 6.0), 0.25)


def make_plan(
    *,
    triggers: int = 12,
    windows: int = 2,
    slide: int | None = None,
    lateness: int = 0,
    skew: int = 0,
    period: int | None = None,
    aggregates: tuple[Aggregate, ...] = (COUNT,),
    stamped: bool = False,
    unit: str = "string",
    key: tuple[str, ...] = ("string",),
    public: str | None = None,
    start: int = START,
    remember: str | int | None = None,
    **privacy: object,
) -> Plan:
    """A plan with lengths in triggers (``skew`` in micros); windows of T - lateness triggers.

    Its small epsilon-delta pair gives thresholds of 10 to 20 units, so that streams of a few
    thousand records select many keys, some of them by noise alone.
    """
    if period is not None:  # where windows meet several periods, thresholds must allow for it
        privacy = {"periods_share_windows": True, **privacy}
    window = (triggers - lateness) * STEP
    hop = window if slide is None else slide * STEP
    settings = {"strategy": "tree", "epsilon": 6.0, "delta": 1e-3, "contributions": 3}
    settings |= {"allow_large_delta": True, **privacy}
    names = ["page", "lang", "zone", "kind"][: len(key)]
    return Plan(
        source="test",
        unit=Field("user", unit),  # type: ignore[arg-type]
        key=tuple(Field(n, t) for n, t in zip(names, key, strict=True)),  # type: ignore[arg-type]
        event_time="time",
        aggregates=aggregates,
        timeline=Timeline(
            start=start,
            end=start + windows * hop,
            window=window,
            slide=hop,
            trigger_every=STEP,
            allowed_lateness=lateness * STEP,
            max_skew=skew,
            period=None if period is None else period * STEP,
        ),
        privacy=Privacy(**settings),  # type: ignore[arg-type]
        stamp="arrived" if stamped else "event_time",
        public_keys=public,
        remember=remember,  # type: ignore[arg-type]
    ).check()


@dataclasses.dataclass(frozen=True)
class Stream:
    """Parallel arrays of raw records; (partition, offset) is a record's position."""

    user: Int64
    key: Int64
    event: Int64
    stamp: Int64
    value: npt.NDArray[np.float64]
    partition: Int64
    offset: Int64

    def __len__(self) -> int:
        return len(self.user)

    def take(self, rows: Int64) -> "Stream":
        """The records of these rows; positions stay what they were."""
        return Stream(*(getattr(self, f.name)[rows] for f in dataclasses.fields(self)))

    def batches(self, rows: int, seed: int | None = None) -> list[pa.RecordBatch]:
        """Source batches of consecutive positions, at most ``rows`` rows each.

        Args:
            seed: shuffles the batches; ``None`` keeps them by position.
        """
        out = []
        order = np.lexsort((self.offset, self.partition))
        jump = np.diff(self.offset[order]) != 1
        jump |= np.diff(self.partition[order]) != 0
        for run in np.split(order, np.flatnonzero(jump) + 1):
            for begin in range(0, len(run), rows):
                out.append(self.batch(run[begin : begin + rows]))
        if seed is not None:
            np.random.default_rng(seed).shuffle(out)  # type: ignore[arg-type]
        return out

    def batch(self, rows: Int64) -> pa.RecordBatch:
        """One source batch of rows with consecutive positions."""
        instant = pa.timestamp("us", "UTC")
        return positioned(
            {
                "user": [user_name(u) for u in self.user[rows]],
                "page": [key_name(k) for k in self.key[rows]],
                "time": pa.array(self.event[rows]).cast(instant),
                "arrived": pa.array(self.stamp[rows]).cast(instant),
                "value": pa.array(self.value[rows]),
            },
            int(self.partition[rows[0]]) if len(rows) else 0,
            int(self.offset[rows[0]]) if len(rows) else 0,
        )


def user_name(number: int) -> str:
    """The unit of a generated record, as text."""
    return f"u{number}"


def key_name(number: int) -> str:
    """The key of a generated record, as text."""
    return f"k{number:03d}"


def positioned(columns: Mapping[str, Any], partition: int = 0, offset: int = 0) -> pa.RecordBatch:
    """A source batch whose first row stands at (partition, offset)."""
    batch = pa.RecordBatch.from_pydict(columns)
    where = {PARTITION: str(partition).encode(), OFFSET: str(offset).encode()}
    return batch.replace_schema_metadata(where)


def zipf(rng: np.random.Generator, size: int, top: int, power: float = 1.0) -> Int64:
    """(size,) draws of 0 .. top-1 with p(x) proportional to (x+2)^-power."""
    weights = (np.arange(top) + 2.0) ** -power
    return rng.choice(top, size, p=weights / weights.sum())


def generate(
    plan: Plan,
    seed: int = 1,
    *,
    records: int = 1500,
    users: int = 700,
    keys: int = 60,
    partitions: int = 3,
    tick: int = STEP // 4,
    heavy: bool = False,
) -> Stream:
    """Records with zipf keys, tied stamps, keys that fall silent early, and (with a stamp
    column) delays around every rule: none, some, beyond the lateness, clocks ahead.

    Args:
        tick: instants are multiples of it, so that many stamps tie.
        heavy: the first user sends a third of all records.
    """
    rng = np.random.default_rng(seed)
    timeline = plan.timeline
    assert timeline.end is not None
    user = rng.integers(0, users, records)
    if heavy:
        user[rng.random(records) < 1 / 3] = 0
    key = zipf(rng, records, keys)
    span = np.where(
        key % 3 == 0, (timeline.end - timeline.start) // 3, timeline.end - timeline.start
    )
    event = timeline.start + (rng.random(records) * span).astype(np.int64) // tick * tick
    stamp = event.copy()
    if plan.stamp != "event_time":
        slack = timeline.allowed_lateness + timeline.window
        delay = rng.choice([0, tick, STEP, slack // 4, slack], records) * rng.random(records)
        delay = np.where(
            rng.random(records) < 0.1, -2 * rng.random(records) * timeline.max_skew, delay
        )
        stamp = np.maximum(timeline.start, event + delay.astype(np.int64) // tick * tick)
    value = np.round(rng.normal(1.0, 5.0, records), 2)
    row = np.arange(records)
    return Stream(user, key, event, stamp, value, row % partitions, row // partitions)


def public_table(plan: Plan, keys: Iterable[int]) -> pa.Table:
    """A canonical public key list of generated keys."""
    table = pa.table({"page": [key_name(k) for k in keys]})
    return canonical_public_keys(plan, table)


def begin(
    plan: Plan,
    path: str | os.PathLike[str],
    shards: int = 3,
    public: pa.Table | None = None,
    look_ahead: int | None = None,
) -> Run:
    """A run with the fixed test secret and run id on a store: a SQLite file, or a URL."""
    url = os.fspath(path)
    if not url.startswith("spanner:"):
        url = f"sqlite:{url}"
    tuned = Performance(look_ahead=look_ahead)
    return begin_run(plan, KEYS, url, shards, run_id=RUN_ID, public=public, performance=tuned)[0]


def fresh_names(folder: str | os.PathLike[str]) -> Iterator[str]:
    """Paths of stores that do not exist yet."""
    number = 0
    while True:
        yield os.path.join(os.fspath(folder), f"store{number}.db")
        number += 1


def released(
    plan: Plan,
    source: Iterable[pa.RecordBatch],
    path: str | os.PathLike[str],
    **options: object,
) -> dict[tuple[int, int], bytes]:
    """(window, trigger) -> bytes of the sealed release, of a whole run in memory."""
    run = begin(plan, path, **options)  # type: ignore[arg-type]
    releases, _ = run_in_memory(run, source)
    stores.close_all()
    return by_name(releases)


def by_name(releases: Iterable[pa.RecordBatch]) -> dict[tuple[int, int], bytes]:
    """(window, trigger) -> bytes of each sealed release; each name occurs once."""
    out: dict[tuple[int, int], bytes] = {}
    for batch in releases:
        metadata = batch.schema.metadata
        name = (int(metadata[b"dpstream.window"]), int(metadata[b"dpstream.trigger"]))
        assert name not in out
        out[name] = sealed_bytes(batch)
    return out


def sealed_bytes(batch: pa.RecordBatch) -> bytes:
    """A batch as bytes that differ when anything in it differs."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def as_rows(sealed: bytes) -> list[dict[str, Any]]:
    """Rows of ``sealed_bytes``."""
    with pa.ipc.open_stream(pa.py_buffer(sealed)) as reader:
        rows: list[dict[str, Any]] = reader.read_next_batch().to_pylist()
    return rows
