"""Streams killed or stopped, with workers here and on Flink: nothing lost, nothing twice."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from dpstream.pipelines.jobs.job import Job, load_job
from tests.faults.flink import Stage, job_at, letters, poisoned, published, staged, undisturbed
from tests.faults.live_jobs import Growing, Live, Recorded, Topic, disturbed
from tests.faults.places import KINDS, places
from tests.kafka_broker import Broker
from tests.runners import flink
from tests.runners.engines import Pool
from tests.runners.flink import cluster, pool
from tests.runners.golden import write_stream
from tests.runners.prism import wait_for
from tests.runners.test_jobs import JOB, WINDOW, Sender, released, text_of

#: Of each source: runs of the longer test, kills in each, seconds of stream.
RUNS, KILLS, SECONDS = 6, 7, 32
SOURCES = ("replay", "folder", "kafka")


def make(
    kind: str,
    folder: Path,
    request: pytest.FixtureRequest,
    seconds: int = 8,
    skips: bool = False,
) -> Live:
    if kind == "kafka":
        broker: Broker = request.getfixturevalue("kafka")
        return Topic(broker, folder, seconds, skips)
    return (Recorded if kind == "replay" else Growing)(folder, seconds, skips=skips)


@pytest.mark.parametrize("skips", [False, True], ids=["listed", "skip"])
@pytest.mark.parametrize("kind", SOURCES)
def test_killed_and_started_again(
    kind: str, skips: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    live = make(kind, tmp_path / "job", request, skips=skips)
    feeder = live.feeding()
    if kind == "replay":
        feeder.join()
    assert disturbed(live, 2, 7) > 0
    feeder.join()
    live.check()


@pytest.mark.slow
@pytest.mark.parametrize("skips", [False, True], ids=["listed", "skip"])
@pytest.mark.parametrize("kind", SOURCES)
def test_killed_many_times(
    kind: str, skips: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    between = kills = 0
    for run in range(RUNS):
        live = make(kind, tmp_path / f"job{run}", request, SECONDS, skips)
        feeder = live.feeding()
        if kind == "replay":
            feeder.join()
        between += disturbed(live, KILLS, run)
        kills += KILLS
        feeder.join()
        live.check()
    print(
        f"\nF3 {kind} on Prism: {kills} kills over {RUNS} runs ({between} after the first release):"
        " every row counted, all files as undisturbed"
    )


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "Ctrl-C"])
def test_a_signal_stops_it(how: str, tmp_path: Path) -> None:
    """A terminal's Ctrl-C goes to the runner's processes, too."""
    live = Growing(tmp_path / "job")
    feeder, process = live.feeding(), live.run()
    wait_for(lambda: live.seen() > 1, 120)
    if how == "Ctrl-C":
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.Signals[how])
    assert process.wait(60) == 0, live.log_tail()
    assert "stopped; run it again to go on" in (live.folder / "live.out").read_text()
    assert "all triggers done" in live.finish()
    feeder.join()
    live.check()


__all__ = ["cluster", "pool"]
pytestmark = pytest.mark.slow
#: A day in 144 s: three kills fall well inside it.
PACE = 600.0


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    write_stream(folder)
    poisoned(folder)
    return folder


@pytest.fixture(scope="module")
def right(stream: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The bounded run that nothing disturbs."""
    return undisturbed(tmp_path_factory.mktemp("right") / "job", stream)


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A store; the emulator must run before the workers that ask it."""
    with places(request.param, tmp_path) as fresh:
        yield ("sqlite:" if request.param == "sqlite" else "") + fresh()


def check(stage: Stage, right: Job, text: str) -> None:
    releases, dead = published(stage.job), letters(stage.job)
    assert releases == published(right) and len(releases) > 100
    assert dead == letters(right) and len(dead) > 20
    print(f"\nF8 {text}: {len(releases) - 1} releases equal, {len(dead)} dead letters")


def restarted(stage: Stage, before: int) -> Callable[[], bool]:
    """Whether the engine has seen a kill: what was under way is released before it does."""
    return lambda: stage.restarts() > before


def test_workers_and_task_managers(
    store: str,
    stream: Path,
    right: Job,
    tmp_path: Path,
    cluster: flink.session.Cluster,
    pool: Pool,
) -> None:
    job, begin = job_at(tmp_path / "job", stream, store), time.monotonic()
    with staged(cluster, pool, job, tmp_path / "job", PACE) as stage:
        stage.launch()
        waits = [stage.until(lambda: stage.count() >= 2)]
        for kill in (stage.kill_worker, stage.kill_task_manager, lambda: stage.kill_worker(-1)):
            before = stage.restarts()
            kill()
            stage.until(restarted(stage, before))
            waits.append(stage.more(6))
        assert stage.count() < 144, "killed while the stream goes on"
        stage.finish()
        times = ", ".join(f"{seconds:.0f}" for seconds in waits)
        text = (
            f"{stage.restarts()} restarts, waits {times} s, {time.monotonic() - begin:.0f} s in all"
        )
        check(stage, right, f"{store.partition(':')[0]}: {text}")


def test_launchers(
    stream: Path,
    right: Job,
    tmp_path: Path,
    cluster: flink.session.Cluster,
    pool: Pool,
) -> None:
    """A killed launcher leaves its job behind; the next one's job shares the store with it."""
    job, begin = job_at(tmp_path / "job", stream), time.monotonic()
    with staged(cluster, pool, job, tmp_path / "job", 300.0) as stage:
        stage.launch()
        stage.until(lambda: stage.count() >= 2)
        stage.kill_launcher()
        alone = stage.more(9)  # without a launcher
        assert len(stage.jobs()) == 1
        stage.launch()
        stage.until(lambda: len(stage.jobs()) == 2)
        stage.more(6)
        stage.kill_worker()  # of either job
        stage.finish()
        assert len(stage.jobs()) == 1, "only its own job was cancelled"
        text = f"launcher: 9 releases in {alone:.0f} s alone, {time.monotonic() - begin:.0f} s"
        check(stage, right, text)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_a_signal_stops_the_job_on_the_cluster(
    number: signal.Signals,
    stream: Path,
    right: Job,
    tmp_path: Path,
    cluster: flink.session.Cluster,
    pool: Pool,
) -> None:
    job = job_at(tmp_path / "job", stream)
    with staged(cluster, pool, job, tmp_path / "job", PACE) as stage:
        stage.launch()
        stage.until(lambda: stage.count() >= 2)
        seconds = stage.stop(number)
        assert "stopped; run it again to go on" in stage.log_path.read_text()
        assert stage.jobs() == [] and stage.jobs("CANCELED") != []
        assert 2 <= stage.count() < 144
    with staged(cluster, pool, job, tmp_path / "job") as stage:
        stage.launch()
        stage.finish()
        check(stage, right, f"{number.name}: stopped in {seconds:.1f} s, then to the end")


def test_a_topic_is_counted_exactly(
    kafka: Broker, tmp_path: Path, cluster: flink.session.Cluster, pool: Pool
) -> None:
    """A stream without end: a worker, a task manager, then the launcher, which begins again."""
    topic, start = kafka.topic(2), time.time() // WINDOW * WINDOW
    (tmp_path / "keys.csv").write_text("key\na\nb\n")
    path = tmp_path / "dpstream.toml"
    path.write_text(
        JOB.format(servers=kafka.servers, topic=topic, start=text_of(start), secret="0f" * 32)
    )
    sender = Sender(kafka, topic)
    with staged(cluster, pool, load_job(path), tmp_path) as stage:

        def published_so_far() -> bool:
            sender.send(0.5)
            return released(tmp_path / "releases").keys() >= wanted

        stage.launch()
        for kill in (stage.kill_worker, stage.kill_task_manager, stage.kill_launcher):
            sender.send(1)
            wanted = set(sender.sent)
            stage.until(published_so_far)
            kill()
        for job in stage.jobs():  # that of the killed launcher
            stage.cancel(job)
        stage.launch()
        sender.send(3)
        closes = sender.last // WINDOW * WINDOW + WINDOW + 2
        last = datetime.fromtimestamp(sender.last // WINDOW * WINDOW, UTC)
        stage.until(lambda: closes_of(tmp_path / "releases", last))
        assert time.time() > closes
        stage.stop(signal.SIGINT)
        assert stage.jobs() == []
    counts = {at: round(count) for at, count in released(tmp_path / "releases").items()}
    missing = {at: count - counts.get(at, 0) for at, count in sender.sent.items()}
    # A broker that has no time for seconds appends after the lateness that is allowed.
    late = sum(row["reason"] == "late" for row in letters(stage.job))
    assert min(missing.values()) >= 0 and sum(missing.values()) == late
    assert late < sender.number / 100 and sender.number > 1000
    print(f"\nF8 kafka: {sender.number} records in {len(sender.sent)} counts, {late} were late")


def closes_of(folder: Path, window: datetime) -> bool:
    """Whether the last release of a window is there."""
    triggers = WINDOW + 2
    tables = [pq.read_table(p).to_pylist() for p in folder.rglob(f"*-{triggers:06d}.parquet")]
    return any(row["window_start"] == window for rows in tables for row in rows)
