"""Key states a second that a store loads and commits durably, from Arrow, step by step.

    python -m tests.bench.state                         # SQLite, and Spanner's emulator
    python -m tests.bench.state --stores sqlite --keys 1000000 --touched 45000

A step touches some keys of one (window, shard); each gets a new count, a new due trigger and
one new unit.  ``warm``: the states are in memory, the step is one commit.  ``cold``: another
process goes on, the states are loaded first.  Baselines in the same run: for SQLite a table with
a row per key and an index on the due trigger, upserted by executemany; for Spanner the client's
bare reads and upserts of rows of the same size.
"""

import argparse
import contextlib
import secrets
import statistics
import tempfile
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pyarrow as pa
from google.cloud import spanner as google

from dpstream.accounting.arrays import Ids, Int64
from dpstream.state.arrow import id_array
from dpstream.state.spanner import shards as spanner_shards
from dpstream.state.spanner import store as spanner
from dpstream.state.spanner.client import connect
from dpstream.state.spanner.schema import create_identity, create_tables
from dpstream.state.spanner.store import SpannerStore
from dpstream.state.sqlite.database import sqlite3
from dpstream.state.sqlite.file import create_store
from dpstream.state.sqlite.store import SqliteStore
from dpstream.state.store import StepResult, Store
from tests import emulator
from tests.bench.common import emit, machine
from tests.state.conformance import IDENTITY, KEY_SCHEMA, STREAMS

Open = Callable[[], Store]


class Load:
    """Keys in a fixed order and the steps that touch them."""

    def __init__(self, keys: int, touched: int) -> None:
        rng = np.random.default_rng(1)
        self.ids: Ids = rng.integers(0, 2**63, (keys, 2)).astype(np.uint64)
        self.touched, self._rng = touched, rng
        self._pages = pa.array([f"page {n:08d}" for n in range(keys)])

    def rows(self, at: Int64) -> tuple[Ids, pa.RecordBatch]:
        """Ids and key columns of some keys."""
        take = pa.array(at)
        columns = [self._pages.take(take), take, id_array(self.ids[at])]
        return self.ids[at], pa.RecordBatch.from_arrays(columns, ["page", "lang", "_id"])

    def first_steps(self) -> Iterator[Int64]:
        """Every key once."""
        order = np.arange(len(self.ids))
        yield from (order[at : at + self.touched] for at in range(0, len(order), self.touched))

    def drawn_keys(self) -> Int64:
        """Keys of one more step."""
        return self._rng.choice(len(self.ids), self.touched, replace=False)


class Cost(NamedTuple):
    """Seconds of one step: to load, to commit, and the CPU seconds of the commit."""

    load: float
    commit: float
    commit_cpu: float


def step(store: Store, load: Load, trigger: int, at: Int64) -> Cost:
    """One step."""
    ids, keys = load.rows(at)
    begin = time.perf_counter()
    states = store.key_shard(0, 0)
    store.load_keys(0, 0, trigger, states, ids)
    loaded = time.perf_counter()
    slots = states.intern(ids, keys)
    states.units[slots] += 1
    states.values[slots] += [1, 3]
    states.due[slots] = trigger + 1 + at % 40 + 1_000  # on lists that no step here asks for
    units = np.stack([ids[:, 1], np.full(len(ids), trigger, np.uint64)], axis=1)
    states.pairs.add(slots, units)
    releases = keys.select(["page"]).slice(0, 100)
    result = StepResult(slots, slots, slots, units, releases, slots[:100], False)
    computed, used = time.perf_counter(), time.process_time()
    store.commit_step(0, 0, trigger, states, result)
    return Cost(loaded - begin, time.perf_counter() - computed, time.process_time() - used)


def measure(name: str, open_store: Open, load: Load, steps: int) -> dict[str, Any]:
    """Rates of one store: creation, warm steps, a cold start, and calls a step."""
    trigger = 0
    store = open_store()
    created = []
    for trigger, at in enumerate(load.first_steps(), 1):
        created.append(len(at) / step(store, load, trigger, at).commit)
    warm, used, cold_load, cold_commit, calls = [], [], [], [], []
    for _ in range(steps):
        trigger += 1
        cost = step(store, load, trigger, load.drawn_keys())
        warm.append(load.touched / cost.commit)
        used.append(cost.commit_cpu)
    for _ in range(steps):
        trigger += 1
        other = open_store()
        other.key_shard(0, 0)
        with counted() as count:
            cost = step(other, load, trigger, load.drawn_keys())
        cold_load.append(load.touched / max(cost.load, 1e-9))
        cold_commit.append(load.touched / cost.commit)
        calls.append(sum(count))
        other.close()
    begin = time.perf_counter()
    shard = open_store().key_shard(0, 0)
    seconds = time.perf_counter() - begin
    figures = {
        "store": name,
        "keys": len(load.ids),
        "touched_a_step": load.touched,
        "created_per_second": median(created),
        "committed_per_second": median(warm),
        "committed_per_cpu_second": round(load.touched / min(used)),
        "committed_cold_per_second": median(cold_commit),
    }
    if shard.size:  # this store loads a whole (window, shard)
        return figures | {"loaded_per_second": round(shard.size / seconds)}
    return figures | {"loaded_per_second": median(cold_load), "calls_of_a_cold_step": max(calls)}


def median(values: list[float]) -> int:
    """Middle rate."""
    return round(statistics.median(values))


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """Counts Spanner's calls: reads and commits."""
    seen: list[int] = []

    def count(module: Any, name: str) -> Any:
        real = getattr(module, name)

        def call(*args: Any, **options: Any) -> Any:
            seen.append(1)
            return real(*args, **options)

        return mock.patch.object(module, name, call)

    with count(spanner, "commit"), count(spanner_shards, "read_rows"):
        yield seen


def rowwise(load: Load, folder: Path, steps: int) -> dict[str, Any]:
    """SQLite with a row per key, as one would write it first."""
    db = sqlite3.connect(folder / "rows.db", isolation_level=None)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    db.execute(
        "CREATE TABLE keys (id BLOB PRIMARY KEY, page TEXT, units INT, a INT, b INT, due INT)"
        " WITHOUT ROWID"
    )
    db.execute("CREATE INDEX due ON keys (due) WHERE due IS NOT NULL")
    upsert = (
        "INSERT INTO keys VALUES (?, ?, 1, 1, 3, ?) ON CONFLICT (id) DO UPDATE SET"
        " units = units + 1, a = a + 1, b = b + 3, due = excluded.due"
    )
    rates, used = list[float](), list[float]()
    for trigger, at in enumerate([*load.first_steps(), *(load.drawn_keys() for _ in range(steps))]):
        ids, keys = load.rows(at)
        raw, pages = [i.tobytes() for i in ids], keys.column(0).to_pylist()
        begin, begun = time.perf_counter(), time.process_time()
        db.execute("BEGIN IMMEDIATE")
        due = (trigger + 1 + at % 40).tolist()
        db.executemany(upsert, zip(raw, pages, due, strict=True))
        db.execute("COMMIT")
        rates.append(len(at) / (time.perf_counter() - begin))
        used.append(time.process_time() - begun)
    db.close()
    return {
        "store": "sqlite, a row per key",
        "committed_per_second": median(rates[-steps:]),
        "committed_per_cpu_second": round(load.touched / min(used[-steps:])),
    }


def bare_client(url: str, touched: int, steps: int) -> dict[str, Any]:
    """The emulator and its client without the store: bare upserts and reads of key rows."""
    database = connect(url)
    columns = ("Part", "WindowIndex", "KeyId", "State", "UnitIds")
    keys = [b64encode(secrets.token_bytes(16)).decode() for _ in range(touched)]
    state, units = b64encode(bytes(52)).decode(), b64encode(bytes(64)).decode()
    rows = [(9, 9, key, state, units) for key in keys]
    commits, reads = [], []
    for _ in range(steps):
        begin = time.perf_counter()
        with database.batch() as batch:
            batch.insert_or_update("Keys", columns, rows)
        commits.append(touched / (time.perf_counter() - begin))
        begin = time.perf_counter()
        keyset = google.KeySet(keys=[(9, 9, key) for key in keys])
        with database.snapshot() as snapshot:
            list(snapshot.read("Keys", columns, keyset))
        reads.append(touched / (time.perf_counter() - begin))
    return {
        "store": "spanner emulator, bare client",
        "committed_per_second": median(commits),
        "loaded_per_second": median(reads),
    }


def on_sqlite(keys: int, touched: int, steps: int) -> list[dict[str, Any]]:
    """SQLite and its baseline."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.db"
        create_store(path, IDENTITY)
        load = Load(keys, touched)
        mine = measure("sqlite", lambda: SqliteStore(path, KEY_SCHEMA, STREAMS), load, steps)
        return [mine, rowwise(load, Path(folder), steps)]


def on_spanner(keys: int, touched: int, steps: int) -> list[dict[str, Any]]:
    """Spanner's emulator and its baseline."""
    with emulator.running():
        url = emulator.fresh_url()
        create_tables(connect(url))
        create_identity(connect(url), IDENTITY)
        mine = measure(
            "spanner emulator",
            lambda: SpannerStore(url, KEY_SCHEMA, STREAMS),
            Load(keys, touched),
            steps,
        )
        return [mine, bare_client(url, touched, steps)]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stores", nargs="+", default=["sqlite", "spanner"])
    parser.add_argument("--keys", type=int, default=1_000_000, help="SQLite; Spanner a tenth")
    parser.add_argument("--touched", type=int, default=45_000, help="SQLite; Spanner up to 8,000")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path, help="append the JSON result to this file")
    args = parser.parse_args()
    runs: list[dict[str, Any]] = []
    if "sqlite" in args.stores:
        runs += on_sqlite(args.keys, args.touched, args.steps)
    if "spanner" in args.stores:
        runs += on_spanner(args.keys // 10, min(args.touched, 8_000), args.steps)
    emit({"benchmark": "state", **machine(), "runs": runs}, args.out)


if __name__ == "__main__":
    main()
