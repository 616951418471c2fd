"""Everything that comes out of a run besides releases and dead letters, one text per channel."""

import base64
import binascii
import bz2
import contextlib
import io
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import apache_beam as beam
from apache_beam.pipeline import PipelineVisitor
from apache_beam.transforms.display import DisplayData

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.errors import DpstreamError
from dpstream.accounting.guarantee import describe
from dpstream.dp_transforms.telemetry import operator_totals, stage_seconds
from dpstream.pipelines.connectors.write import dead_letter_folder
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.render.job_plan import details_text
from dpstream.pipelines.stream.run import run_job
from tests.audit.leaks import Logs, hits, leaked_files, printed
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
