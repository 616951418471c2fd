"""Jobs without end in processes of their own: what feeds them, and what they have published.

Each project file has two jobs on the same source, ``live`` and ``calm``, each with a store and a
sink of its own: run to its end when everything is there, the second is the undisturbed run.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dpstream.pipelines.connectors.folder.store import close_files
from tests.faults.processes import files as files_of
from tests.kafka_broker import Broker
from tests.runners.prism import binary

ROOT = Path(__file__).parents[2]
WINDOW, LATENESS = 4, 2
#: No job needs this long after its end.
LONGEST = 180
PROJECT = """
version = 1

[data_set.shop]
unit = {{ name = "user" }}
insecure_test_secret = "{secret}"

[table.visits]
{source}
unit_column = "user"
time_column = "time"
"""
JOB = """
[job.{name}]
table = "visits"
key = ["key"]
aggregate.n = {{ kind = "count" }}
start = "{start}"
end = "{end}"
window = "{window}s"
release_every = "1s"
allowed_lateness = "{lateness}s"
{more}
budget = {{ epsilon = 1000.0, delta = 0.1, covers = "lifetime" }}
mechanism.allow_large_delta = true
store = "{store}"
shards = 2
sink = {{ kind = "parquet", path = "{sink}" }}
"""
KEYS = ("a", "b", "c")
#: Keys that a list names; and keys that are selected, whose pairs are skipped from then on.
LISTED = 'public_keys = "keys.csv"\ncontributions = 1'
SKIPPED = """contributions = 2
mechanism.skip = true
mechanism.tests = 3
mechanism.weights = { offset = 1, power = 2 }"""
Counts = dict[tuple[datetime, str], int]


def text_of(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")


class Live(ABC):
    """A job and what feeds it.

    Args:
        folder: for the job; store: URL, a SQLite file below the folder by default.
        seconds: how long the stream is.
        skips: the job selects its keys and skips what is published.
    """

    lateness = LATENESS

    def __init__(
        self, folder: Path, seconds: int = 8, store: str = "s.db", skips: bool = False
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.number = folder, 0
        self.sent: Counter[tuple[datetime, str]] = Counter()
        self.start = float(self.begins())
        self.end = self.start + seconds
        (folder / "keys.csv").write_text("key\n" + "\n".join(KEYS) + "\n")
        text = PROJECT.format(source=self.source(), secret="11" * 32)
        for name, url, sink in (("live", store, "out"), ("calm", "calm.db", "calm")):
            text += JOB.format(
                name=name, start=text_of(self.start), end=text_of(self.end),
                window=WINDOW, lateness=self.lateness,
                store=url, sink=sink, more=SKIPPED if skips else LISTED,
            )  # fmt: skip
        (folder / "dpstream.toml").write_text(text)

    def begins(self) -> float:
        """The first instant of the plan."""
        return time.time() // WINDOW * WINDOW + WINDOW

    @abstractmethod
    def source(self) -> str:
        """Where the table comes from, as lines of its section."""

    @abstractmethod
    def send(self, rows: list[dict[str, Any]]) -> None:
        """Rows become visible to the job."""

    def feed(self) -> None:
        """Rows of unlike users, a few times a second, until the stream ends."""
        time.sleep(max(0.0, self.start - time.time()))
        while time.time() < self.end - 0.3:
            # Whole milliseconds: brokers stamp in them, and no event may lie after its stamp.
            now, rows = time.time_ns() // 1_000_000 / 1_000, list[dict[str, Any]]()
            for key in (*KEYS, "a"):
                rows.append({"user": f"u{self.number}", "key": key, "time": text_of(now)})
                window = (now - self.start) // WINDOW * WINDOW + self.start
                self.sent[datetime.fromtimestamp(window, UTC), key] += 1
                self.number += 1
            self.send(rows)
            time.sleep(0.05)

    def feeding(self) -> threading.Thread:
        """``feed`` beside the test."""
        thread = threading.Thread(target=self.feed, daemon=True)
        thread.start()
        return thread

    # The command.

    def run(
        self, job: str = "live", *more: str, speed: float | None = None
    ) -> subprocess.Popen[bytes]:
        """``dpstream run`` on Prism, in a process group of its own."""
        program = ["tests.fixed_runs"] if speed is None else ["tests.paced", str(speed)]
        command = [sys.executable, "-m", *program, "run"]
        flags = ["--runner=PrismRunner", f"--prism_location={binary()}", "--quiet", *more]
        out = open(self.folder / f"{job}.out", "ab")  # noqa: SIM115 - the child's
        with out, open(self.folder / f"{job}.errors", "ab") as errors:
            return subprocess.Popen(
                [*command, job, *flags],
                cwd=self.folder, stdout=out, stderr=errors, start_new_session=True,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
            )  # fmt: skip

    def finish(self, job: str = "live", process: subprocess.Popen[bytes] | None = None) -> str:
        """Run to the end; what it printed."""
        process = process or self.run(job)
        try:
            code = process.wait(LONGEST + max(0.0, self.end - time.time()))
        except subprocess.TimeoutExpired:
            kill(process)
            raise AssertionError("a job did not end: " + self.log_tail(job)) from None
        assert code == 0, self.log_tail(job)
        return (self.folder / f"{job}.out").read_text()

    def log_tail(self, job: str = "live") -> str:
        return (self.folder / f"{job}.errors").read_text()[-2000:]

    def published(self, job: str = "live") -> dict[str, bytes]:
        """Releases by name; the manifest beside them names each begin."""
        sink = self.folder / ("out" if job == "live" else job)
        return {n: data for n, data in files_of(sink).items() if "/" in n and "dead" not in n}

    def dead(self) -> set[tuple[int, int, str]]:
        """Dead letters, each once however often it was written."""
        paths = (self.folder / "dead_letter").rglob("*.parquet")
        rows = [row for path in paths for row in pq.read_table(path).to_pylist()]
        return {(row["partition"], row["offset"], row["reason"]) for row in rows}

    def seen(self) -> int:
        return len(list((self.folder / "out").glob("window-*/trigger-*")))

    def counted(self) -> Counts:
        """The last published count of every window and key."""
        last: dict[tuple[datetime, str], tuple[int, float]] = {}
        for path in (self.folder / "out").glob("window-*/*.parquet"):
            for row in pq.read_table(path).to_pylist():
                at = row["window_start"], row["key"]
                last[at] = max(last.get(at, (0, 0.0)), (row["trigger"], row["n"]))
        return {at: round(n) for at, (_, n) in last.items() if round(n)}

    def check(self) -> None:
        """Every row is counted, and every release is that of the undisturbed run."""
        counts, sent = self.counted(), dict(self.sent)
        wrong = {at: (n, counts.get(at)) for at, n in sent.items() if n != counts.get(at)}
        assert not wrong and counts == sent, wrong
        self.finish("calm")
        files, expected = self.published(), self.published("calm")
        assert files.keys() == expected.keys()
        assert [name for name in expected if files[name] != expected[name]] == []
        assert len(expected) == (self.end - self.start) // WINDOW * (WINDOW + self.lateness)


def kill(process: subprocess.Popen[bytes], number: int = signal.SIGKILL) -> bool:
    """Kill the whole group of a job, its runner included; whether it was still at work."""
    if process.poll() is None:
        os.killpg(process.pid, number)
    return process.wait(LONGEST) == -number


class Recorded(Live):
    """Files that are all there, replayed at the stream's own speed times ten."""

    lateness = 0

    def begins(self) -> float:
        return 1_700_000_000.0 // WINDOW * WINDOW

    def source(self) -> str:
        return 'path = "in/*.parquet"'

    def send(self, rows: list[dict[str, Any]]) -> None:
        raise AssertionError("a recording is written at once")

    def feed(self) -> None:
        """Write all of them."""
        (self.folder / "in").mkdir()
        rng, many = np.random.default_rng(3), 6_000
        at = np.sort(rng.uniform(self.start, self.end, many))
        key = rng.choice(np.array(KEYS), many)
        for instant, name in zip(at.tolist(), key.tolist(), strict=True):
            window = (instant - self.start) // WINDOW * WINDOW + self.start
            self.sent[datetime.fromtimestamp(window, UTC), name] += 1
        table = pa.table(
            {
                "user": [f"u{n}" for n in range(many)],
                "key": pa.array(key),
                "time": pa.array((at * 1e6).astype(np.int64)).cast(pa.timestamp("us", "UTC")),
            }
        )
        for part in range(3):
            pq.write_table(
                table.slice(part * many // 3, many // 3), self.folder / f"in/{part}.parquet"
            )

    def run(
        self, job: str = "live", *more: str, speed: float | None = 4.0
    ) -> subprocess.Popen[bytes]:
        return super().run(job, *more, speed=None if job == "calm" else speed)


class Growing(Live):
    """A folder of files that are closed by markers."""

    def source(self) -> str:
        (self.folder / "in").mkdir(exist_ok=True)
        return 'folder = "in"\nformat = "jsonl"'

    def send(self, rows: list[dict[str, Any]]) -> None:
        """Now and then with a file that cannot be read."""
        root, names = self.folder / "in", [f"{self.number}.jsonl"]
        (root / names[0]).write_text("".join(json.dumps(r) + "\n" for r in rows))
        if self.number % 40 == 0:
            names.append(f"bad{self.number}.jsonl")
            (root / names[1]).write_bytes(b"\xff\xfe{\n")
        close_files(root, names)

    def feed(self) -> None:
        super().feed()
        for _ in range(3):  # until the last window is closed
            close_files(self.folder / "in", at=round((self.end + LATENESS + 1) * 1e6) + self.number)
            self.number += 1


class Topic(Live):
    """A topic of a broker."""

    def __init__(self, broker: Broker, folder: Path, seconds: int = 8, skips: bool = False) -> None:
        self.broker, self.topic = broker, broker.topic(2)
        super().__init__(folder, seconds, skips=skips)

    def source(self) -> str:
        return (
            f'servers = "{self.broker.servers}"\ntopic = "{self.topic}"\n'
            'settle = "4s"'  # a broker on a busy machine stalls for seconds
        )

    def send(self, rows: list[dict[str, Any]]) -> None:
        values: list[Any] = [*rows, b"{"]
        self.broker.produce(self.topic, values, self.number % 2)


def disturbed(live: Live, kills: int, seed: int, start_seconds: float = 3.0) -> int:
    """Kill the job that many times at random instants, then let it run; kills among releases.

    Between a start and a kill lie up to twice the time that a start takes, and a bit.
    """
    rng, between, done = np.random.default_rng(seed), 0, 0
    while done < kills:
        process, until = live.run(), time.monotonic() + rng.uniform(0.5, 2) * start_seconds
        goal = live.seen() + int(rng.integers(1, 4))
        by_time = bool(rng.random() < 0.4)
        while process.poll() is None and not (
            time.monotonic() > until if by_time else live.seen() >= goal
        ):
            time.sleep(0.005)
        if not kill(process):
            break
        done += 1
        between += live.seen() > 0
    live.finish()
    return between


Make = Callable[[Path], Live]
