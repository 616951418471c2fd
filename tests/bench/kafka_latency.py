"""A Kafka topic without end on an engine: how long after a trigger its release is there.

    python -m tests.bench.kafka_latency
    python -m tests.bench.kafka_latency --engines prism flink_threads --rate 20000 --seconds 60

A real broker stamps the messages when it appends them; a process of its own appends them at a paced
rate.  Latency: the wall time from the instant of a trigger until the release's file is there.
It holds the job's ``settle``, for which the watermark stays behind the broker's clock.  The first
triggers are left out, because the job catches up with them after its start.
"""

import argparse
import datetime
import json
import multiprocessing
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from confluent_kafka import Producer

from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.stream.run import run_job
from dpstream.state import open as stores
from tests.bench.common import emit, machine
from tests.bench.stream import FLINK_THREADS, NAMES, counting_job
from tests.kafka_broker import Broker

#: Seconds until the plan starts: the engine is up by then.
STARTS = 20
#: Triggers that are left out at the start.
CATCHING_UP = 5


def job_of(folder: Path, servers: str, topic: str, start: int, args: argparse.Namespace) -> Job:
    """A job on the topic with a release every second."""
    job = {
        "start": _text(start),
        "end": _text(start + args.seconds),
        "window": f"{args.seconds}s",
        "release_every": "1s",
        "shards": args.shards,
        "sink": {"kind": "parquet", "path": "releases"},
    }
    folder.mkdir()
    source = {"servers": servers, "topic": topic, "settle": args.settle}
    return counting_job(folder, source, "string", job)


def _text(seconds: int) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def feed(servers: str, topic: str, partitions: int, rate: int, start: int, end: int) -> None:
    """Append messages of Zipf users and keys at a paced rate, from before the start to the end."""
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 5, "log_level": 0})
    rng, part = np.random.default_rng(1), max(1, rate // 100)
    at, number = start - 2.0, 0
    while at < end + 2:
        time.sleep(max(0.0, at - time.time()))
        users, keys = rng.zipf(1.6, part) % 200_000, rng.zipf(1.3, part) % 100_000
        stamp = _text(int(at))
        for user, key in zip(users.tolist(), keys.tolist(), strict=True):
            value = json.dumps({"user": f"u{user}", "key": f"k{key}", "time": stamp})
            producer.produce(topic, value.encode(), partition=number % partitions)
            number += 1
        producer.poll(0)
        at += part / rate
    assert producer.flush(60) == 0


def latency(broker: Broker, engine: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds from a trigger's instant until its release is there."""
    topic, start = broker.topic(args.partitions), int(time.time()) + STARTS
    job = job_of(folder, broker.servers, topic, start, args)
    feeder = multiprocessing.get_context("spawn").Process(
        target=feed,
        args=(broker.servers, topic, args.partitions, args.rate, start, start + args.seconds),
    )
    feeder.start()
    flags = ["--parallelism=2"] if engine == FLINK_THREADS else []
    run_job(job, NAMES[engine], flags)
    feeder.join()
    stores.close_all()
    assert feeder.exitcode == 0
    releases = Path(job.sink.path) / "window-000000"
    triggers = range(1 + CATCHING_UP, args.seconds + 1)
    waited = [
        os.stat(releases / f"trigger-{trigger:06d}.parquet").st_ctime - (start + trigger)
        for trigger in triggers
    ]
    return {
        "engine": engine,
        "records_per_second": args.rate,
        "partitions": args.partitions,
        "shards": args.shards,
        "triggers": len(triggers),
        "settle": args.settle,
        "latency_median": round(float(np.median(waited)), 3),
        "latency_p99": round(float(np.quantile(waited, 0.99)), 3),
        "latency_max": round(max(waited), 3),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", choices=["prism", FLINK_THREADS], nargs="+", default=["prism"])
    parser.add_argument("--rate", type=int, default=20_000, help="messages a second")
    parser.add_argument("--seconds", type=int, default=60, help="and as many triggers")
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--settle", default="100ms")
    parser.add_argument("--out", type=Path, help="append the JSON results to this file")
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="dpstream-bench-") as name,
        Broker(Path(name) / "broker") as broker,
    ):
        for engine in args.engines:
            result = latency(broker, engine, Path(name) / engine, args)
            emit({"benchmark": "kafka latency", **machine(), **result}, args.out)


if __name__ == "__main__":
    main()
