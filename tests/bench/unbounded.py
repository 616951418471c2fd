"""Growth over years: a stream of short windows, one trigger time at a time, on one store.

    python -m tests.bench.unbounded --windows 20000

The streaming form's own callbacks without a runner (`tests.flowing`), a window and a release each
trigger time, new units all the time.  Printed at every tenth of the run:  CPU milliseconds of a
trigger time, resident memory, rows and bytes of the store.  Nothing may grow but the sink.
``--note N`` is the number of complete windows between two notes; a huge one shows what it would be
without.
"""

import argparse
import json
import os
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from dpstream.accounting.plan.plan import Plan
from dpstream.pipelines.connectors.files.sink import FileSink
from dpstream.pipelines.connectors.sink import Name, Sink
from dpstream.state import open as stores
from dpstream.state import retention
from dpstream.state.sqlite.store import SqliteStore
from tests.flowing import Flowing, endless
from tests.streams import START, STEP, begin, make_plan, positioned


class Nowhere(FileSink):
    """Files that are not written: the sink is not what is measured."""

    def _write(self, batches: list[pa.RecordBatch], only_compare: bool) -> list[Name]:  # type: ignore[override]
        metadata = [batch.schema.metadata for batch in batches]
        return [(int(m[b"dpstream.window"]), int(m[b"dpstream.trigger"])) for m in metadata]


def rows(trigger_time: int, size: int) -> pa.RecordBatch:
    """Records of one trigger time, each of a new unit."""
    stamp = START + (trigger_time - 1) * STEP + STEP // 2
    columns = {
        "user": [f"u{trigger_time}-{i}" for i in range(size)],
        "page": [f"k{i % 5}" for i in range(size)],
        "time": pa.array(np.full(size, stamp)).cast(pa.timestamp("us", "UTC")),
    }
    return positioned(columns, 0, trigger_time * size)


def measured(
    plan: Plan, url: str, sink: Sink, windows: int, keep: int | None
) -> Iterator[dict[str, float]]:
    """Figures at every tenth."""
    flowing = Flowing(begin(plan, url, 2), sink, keep)
    if isinstance(flowing.store, SqliteStore):
        flowing.store._db.execute("PRAGMA synchronous = OFF")
    before = time.process_time()
    for trigger_time in range(1, windows + 1):
        flowing.feed([rows(trigger_time, 20)])
        flowing.step(trigger_time)
        flowing.out.clear()
        if trigger_time % (windows // 10) == 0:
            parts = flowing.store.parts()
            spent, before = time.process_time() - before, time.process_time()
            yield {
                "windows": trigger_time,
                "cpu_ms_a_trigger_time": round(1000 * spent / (windows // 10), 2),
                "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
                "rows": sum(part.rows for part in parts),
                "kib": sum(part.bytes for part in parts) // 1024,
            }


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=20_000)
    parser.add_argument("--keep", type=int, default=500, help="windows; 0: all")
    parser.add_argument("--period", type=int, default=100, help="windows; 0: none")
    parser.add_argument("--note", type=int, default=retention._NOTED)
    parser.add_argument("--url", help="a Spanner store (default: a file)")
    args = parser.parse_args()
    retention._NOTED, os.fsync = args.note, lambda fd: None
    plan = endless(make_plan(triggers=1, windows=10, period=args.period or None))
    with tempfile.TemporaryDirectory() as folder:
        url, sink = args.url or f"{folder}/s.db", Nowhere(Path(folder) / "out", "csv")
        for figures in measured(plan, url, sink, args.windows, args.keep * STEP or None):
            print(json.dumps(figures), flush=True)
        stores.close_all()


if __name__ == "__main__":
    main()
