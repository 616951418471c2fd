"""Every channel is searched, and a product that leaks into one is caught in that one.

Also around the clients of services, Kafka and Pub/Sub as sinks, in runs that end and that fail: the
clients are native or log by themselves, so what the process itself writes is searched too.
"""

import base64
import binascii
import bz2
import contextlib
import io
import logging
import re
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import apache_beam as beam
import pyarrow as pa
import pytest
from apache_beam.metrics import Metrics
from apache_beam.pipeline import PipelineVisitor
from apache_beam.transforms.display import DisplayData

from dpstream.accounting import guarantee
from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.errors import DpstreamError, RunError
from dpstream.accounting.guarantee import describe
from dpstream.dp_transforms import flow, step, telemetry
from dpstream.dp_transforms.beam.workers import SplitByShard
from dpstream.dp_transforms.telemetry import operator_totals, stage_seconds
from dpstream.pipelines.connectors.files import sink as sink_files
from dpstream.pipelines.connectors.kafka.client import KafkaTopic
from dpstream.pipelines.connectors.pubsub.sink import PubsubSink
from dpstream.pipelines.connectors.write import dead_letter_folder
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.pipelines.render.job_plan import details_text
from dpstream.pipelines.stream.run import run_job
from dpstream.state import open as stores
from tests import pubsub_emulator
from tests.audit.leaks import KEY, UNIT, VALUE, Logs, hits, leaked_files, make_job, printed
from tests.audit.test_leaks import ERRORS, PLACES, Forced
from tests.kafka_broker import Broker
from tests.written import read_dead_letters

_PACKED = re.compile(rb"[A-Za-z0-9+/]{40,}={0,2}")


class Seen:
    """The pipelines a block builds and runs, and what Beam tells of them."""

    def __init__(self) -> None:
        self.graphs: list[bytes] = []
        self.display: list[str] = []
        self.metrics: list[str] = []

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Watch ``beam.Pipeline.run``; a failed run was watched until it failed."""
        real = beam.Pipeline.run

        def run(pipeline: beam.Pipeline, *args: Any, **options: Any) -> Any:
            if not self.graphs:
                self.graphs.append(pipeline.to_runner_api().SerializeToString())
                pipeline.visit(_Display(self.display))
            result = real(pipeline, *args, **options)
            self.metrics.append(repr(result.metrics().query()))
            return result

        with mock.patch.object(beam.Pipeline, "run", run):
            yield


class _Display(PipelineVisitor):
    """Display data of every transform and its function."""

    def __init__(self, labels: list[str]) -> None:
        self.labels = labels

    def visit_transform(self, node: Any) -> None:
        self._add(node)

    def enter_composite_transform(self, node: Any) -> None:
        self._add(node)

    def _add(self, node: Any) -> None:
        self.labels.append(node.full_label)
        if node.transform is not None:
            items = DisplayData.create_from(node.transform).items
            self.labels += [f"{item.key} {item.value} {item.label}" for item in items]


def opened(data: bytes) -> bytes:
    """The bytes, and what is packed in them: Beam's pickles are compressed and in base64."""
    out = [data]
    for packed in _PACKED.findall(data):
        with contextlib.suppress(binascii.Error):
            plain = base64.b64decode(packed + b"=" * (-len(packed) % 4))
            out.append(plain)
            for unpack in (bz2.decompress, zlib.decompress):
                with contextlib.suppress(OSError, ValueError, zlib.error):
                    out.append(unpack(plain))
    return b"\n".join(out)


def observe(job: Job, temporary: Path) -> dict[str, bytes | str]:
    """What each channel shows of a run, finished or failed.

    Args:
        temporary: the folder that temporary files go to.
    """
    out, err, seen, messages = io.StringIO(), io.StringIO(), Seen(), list[str]()
    error: BaseException | None = None
    result = None
    operator_totals.clear()
    with (
        Logs() as logs, seen.watched(),
        contextlib.redirect_stdout(out), contextlib.redirect_stderr(err),
    ):  # fmt: skip
        try:
            result = run_job(job, progress=lambda *steps: messages.append(repr(steps)))
        except DpstreamError as failed:
            error = failed
    budget = allocate(job.plan)
    letters = read_dead_letters(dead_letter_folder(job)) if result else None
    return {
        "logs": logs.text,
        "stdout": out.getvalue(),
        "stderr": err.getvalue(),
        "exceptions": "" if error is None else printed(error),
        "metrics": "\n".join([*seen.metrics, repr(dict(operator_totals)), repr([*stage_seconds])]),
        "display data": "\n".join(seen.display),
        "pipeline": b"\n".join(opened(graph) for graph in seen.graphs),
        "plan": details_text(job.plan, budget) + repr(describe(job.plan, budget)) + repr(job.plan),
        "progress": "\n".join(messages),
        "result": repr(result),
        "dead letters": "" if letters is None else repr(letters.to_pylist()) + str(letters.schema),
        "files": "\n".join(f"leaked {name}" for name in leaked_files(job.path.parent)),
        "temporary files": "\n".join(f"leaked {name}" for name in leaked_files(temporary)),
    }


def leaks(channels: dict[str, bytes | str]) -> set[str]:
    """Channels that show a canary."""
    files = {name for name in ("files", "temporary files") if channels[name]}
    return files | {name for name, shows in channels.items() if hits(shows)}


Leak = contextlib.AbstractContextManager[Any]


@pytest.fixture(autouse=True)
def clean_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(flow, "COMMIT_STEPS", 2)  # a group that closes its window writes no states
    yield
    stores.close_all()
    logging.disable(logging.NOTSET)


def _first(owner: Any, name: str, leak: Callable[[], Any]) -> Leak:
    """The function leaks before it does its work."""
    real = getattr(owner, name)

    def patch(*args: Any, **options: Any) -> Any:
        leak()
        return real(*args, **options)

    return mock.patch.object(owner, name, patch)


def _write(name: str, content: str) -> None:
    (Path(tempfile.gettempdir()) / name).write_text(content)


@contextlib.contextmanager
def _texts_in_errors() -> Iterator[None]:
    """A stage fails, and the door lets the text of the error out."""

    def outgoing(stage: str, error: Exception) -> RunError:
        return RunError(f"stage.{stage}", f"failed with {error}", "ask")

    with (
        mock.patch.object(telemetry, "_outgoing", outgoing),
        mock.patch.object(step, "aggregate", Forced(ERRORS[1])),
    ):
        yield


def _pickled_hint() -> Leak:
    """A function of the pipeline keeps what it should not."""
    real = SplitByShard.__init__

    def init(self: Any, *args: Any) -> None:
        real(self, *args)
        self._hint = f"{UNIT} is on many keys, {VALUE}"

    return mock.patch.object(SplitByShard, "__init__", init)


def _letters_with_values(real: Any) -> Leak:
    """Reasons that quote what was refused."""

    def read(folder: Any) -> pa.Table:
        table = real(folder)
        return table.append_column("text", pa.array([VALUE] * table.num_rows))

    return mock.patch("tests.audit.test_leak_channels.read_dead_letters", read)


def _named_release() -> Leak:
    return mock.patch.object(
        sink_files, "release_path",
        lambda window, trigger, kind: Path(f"window-{window:06d}/{KEY}-{trigger:06d}.{kind}"),
    )  # fmt: skip


#: What leaks, and the channel that must show it.
LEAKY: dict[str, tuple[Callable[[], Leak], str]] = {
    "a stage logs a unit": (
        lambda: _first(
            flow, "decide_records", lambda: logging.getLogger("beam").info("unit %s", UNIT)
        ),
        "logs",
    ),
    "a stage logs a value": (
        lambda: _first(step, "publish", lambda: logging.getLogger("x").warning(VALUE)), "logs",
    ),
    "a print": (lambda: _first(step, "aggregate", lambda: print(KEY)), "stdout"),
    "a print to stderr": (
        lambda: _first(step, "aggregate", lambda: print(KEY, file=sys.stderr)), "stderr",
    ),
    "errors with their text": (_texts_in_errors, "exceptions"),
    "a counter named by a key": (
        lambda: _first(
            flow, "seal", lambda: Metrics.counter("dpstream", f"records of {KEY}").inc()
        ),
        "metrics",
    ),
    "an operator's counter named by a unit": (
        lambda: _first(flow, "seal", lambda: telemetry.operator_totals.update({UNIT: 3})),
        "metrics",
    ),
    "display data": (
        lambda: mock.patch.object(
            SplitByShard, "display_data", lambda self: {"busiest": KEY}, create=True
        ),
        "display data",
    ),
    "a pickled function": (_pickled_hint, "pipeline"),
    "a plan that looked at data": (
        lambda: mock.patch.object(guarantee, "_unit", lambda plan: f"like {UNIT}"), "plan",
    ),
    "a result": (
        lambda: _first(flow, "seal", lambda: telemetry.operator_totals.update({KEY: 3})), "result",
    ),
    "dead letters that quote": (
        lambda: _letters_with_values(read_dead_letters), "dead letters",
    ),
    "a release named by a key": (_named_release, "files"),
    "a temporary file": (
        lambda: _first(step, "aggregate", lambda: _write("part", VALUE)), "temporary files",
    ),
    "the name of a temporary file": (
        lambda: _first(step, "aggregate", lambda: _write(KEY, "")), "temporary files",
    ),
}  # fmt: skip


def test_a_good_run_leaks_nowhere(tmp_path: Path) -> None:
    channels = observe(make_job(tmp_path / "job"), tmp_path / "tmp")
    assert leaks(channels) == set()
    # The channels were there to be searched.
    for name in ("metrics", "display data", "pipeline", "plan", "dead letters"):
        assert len(channels[name]) > 10, name
    # A run that ends within the first interval reports once: at its end.
    progress = channels["progress"]
    assert isinstance(progress, str) and progress.splitlines()[-1] == "(8, 8)"
    packed = channels["pipeline"]
    assert isinstance(packed, bytes) and b"SplitByShard" in packed and b"_schema" in packed


@pytest.mark.parametrize("name", LEAKY)
def test_a_leak_is_caught(tmp_path: Path, name: str) -> None:
    patch, channel = LEAKY[name]
    job = make_job(tmp_path / "job")
    with patch():
        channels = observe(job, tmp_path / "tmp")
    assert channel in leaks(channels)


@pytest.mark.parametrize("number", range(0, len(PLACES), 4))
def test_failed_runs_leak_nowhere(tmp_path: Path, number: int) -> None:
    """All channels of runs that fail (test_leaks searches the streams of every place)."""
    forced = Forced(ERRORS[number % len(ERRORS)])
    job = make_job(tmp_path / "job")
    with mock.patch.object(*PLACES[number], forced):
        channels = observe(job, tmp_path / "tmp")
    assert forced.calls and channels["exceptions"]
    assert leaks(channels) == set()


def test_packed_bytes_are_opened() -> None:
    import base64
    import bz2

    packed = base64.b64encode(bz2.compress(f"a rather long text on {UNIT}".encode() * 3))
    assert UNIT.encode() in opened(b"\x00\x01" + packed + b"\x02")


#: What goes wrong just before the first release is written (the manifest is sent before).
Fault = Callable[[Broker, str], Any]
FAULTS: dict[str, Fault] = {
    "nothing": lambda broker, topic: None,
    "topic gone": lambda broker, topic: broker.admin_do("delete_topics", [topic]),
    "broker gone": lambda broker, topic: broker.stop(),
}


def job_to(folder: Path, sink: str) -> Job:
    """The job with canaries, publishing elsewhere."""
    path = make_job(folder).path
    files = '{ kind = "parquet", path = "releases" }'
    text = path.read_text(encoding="utf-8")
    assert files in text
    path.write_text(text.replace(files, f"{{ {sink} }}"), encoding="utf-8")
    return load_job(path)


def before(nth: int, owner: Any, name: str, does: Callable[[], Any]) -> Any:
    """Something happens before a method is called for the nth time."""
    real, calls = getattr(owner, name), list[int]()

    def call(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == nth:
            does()
        return real(*args, **options)

    return mock.patch.object(owner, name, call)


def nowhere(job: Job, folder: Path, capfd: pytest.CaptureFixture[str], failed: bool) -> None:
    """A run of which no channel shows a canary."""
    channels = observe(job, folder / "tmp")
    assert bool(channels["exceptions"]) == failed
    assert leaks(channels) == set()
    assert hits("".join(capfd.readouterr())) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_kafka(
    kafka: Broker, tmp_path: Path, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, fault: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("NAME_OF_CLIENT", UNIT)  # a setting that is a secret
    topic = kafka.topic(1, cleanup_policy="compact")
    options = '{ "client.id" = "env:NAME_OF_CLIENT", "message.timeout.ms" = "3000" }'
    job = job_to(
        tmp_path / "job",
        f'kind = "kafka", topic = "{topic}", servers = "{kafka.servers}", options = {options}',
    )
    try:
        with before(2, KafkaTopic, "send", lambda: FAULTS[fault](kafka, topic)):
            nowhere(job, tmp_path, capfd, failed=fault != "nothing")
    finally:
        if fault == "broker gone":
            kafka.start()


@pytest.mark.parametrize("gone", [False, True])
def test_pubsub(tmp_path: Path, capfd: pytest.CaptureFixture[str], gone: bool) -> None:
    with pubsub_emulator.running() as started:
        topic, _ = started.subscription(enable_message_ordering=True)
        job = job_to(tmp_path / "job", f'kind = "pubsub", topic = "{topic}"')

        def fault() -> None:
            if gone:
                from google.cloud.pubsub_v1 import PublisherClient

                PublisherClient().delete_topic(topic=topic)

        with before(1, PubsubSink, "_put_rows", fault):
            nowhere(job, tmp_path, capfd, failed=gone)


def test_a_client_that_says_what_it_sends_is_caught(
    kafka: Broker, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    topic = kafka.topic(1, cleanup_policy="compact")
    job = job_to(
        tmp_path / "job", f'kind = "kafka", topic = "{topic}", servers = "{kafka.servers}"'
    )
    with (
        before(2, KafkaTopic, "send", lambda: print(f"sends {KEY}")),
        pytest.raises(AssertionError, match="stdout"),
    ):
        nowhere(job, tmp_path, capfd, failed=False)
