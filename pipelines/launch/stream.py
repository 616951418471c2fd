"""Start a job on Dataflow and leave it there: what the flex template's launcher runs.

A template's launcher must end once the pipeline is handed over, so nothing waits here.  Its machine
is thrown away afterwards: a job that keeps its store, ledger, key, input or releases on the
launcher's disk is refused.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from apache_beam.io.filesystems import FileSystems

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.connectors.write import dead_letter_folder
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.pipelines.launch import dataflow
from dpstream.pipelines.project.project import load_project
from dpstream.pipelines.project.text import MAX_FILE_BYTES
from dpstream.pipelines.stream.run import Result, run_job
from dpstream.state.ledger.open import PROJECT_FILE, file_of

_FILES = ("parquet", "csv", "jsonl")


def check_remote(job: Job) -> None:
    """Refuse what would lie on the launcher's disk, or be lost with a worker's.

    Dead letters are files beside the project file unless a folder is named, so on Dataflow they are
    lost with the worker that wrote them; their number is not.

    Raises:
        UsageError: names the field.
    """
    source = job.source
    here = not source.unbounded or (source.kind == "folder" and "://" not in source.path)
    local = [
        ("store", job.state.path is not None, "use spanner://project/instance/database"),
        (
            "account.path",
            job.ledger is not None and file_of(job.ledger.path) is not None,
            "use spanner://project/instance/database, or start the job with `dpstream run` on the "
            "machine that has the account",
        ),
        (
            "secret",
            job.privacy.secret.kind != "gcp",
            "use gcp:projects/P/secrets/S/versions/N, which the workers read for themselves",
        ),
        ("table.path", here, "use a topic or a subscription, or a folder that is a gs:// URL"),
        ("sink.path", job.sink.kind in _FILES, "use a sink that is a service"),
    ]
    for field, wrong, fix in local:
        if wrong:
            raise UsageError(field, "is on the launcher's machine, which is thrown away", fix)
    if dead_letter_folder(job) != job.path.parent / "dead_letter" / job.name:
        raise UsageError(
            "dead_letter",
            "is a folder on each worker's disk, which is thrown away",
            "leave it out: on Dataflow dead letters are counted, not kept",
        )


def fetch(path: str, folder: Path, name: str | None = None) -> Path:
    """The project file, from any of Beam's file systems (``gs://...``), as a local one, with the
    query of a job.

    Raises:
        UsageError: one of them cannot be read, or is too long.
    """
    local = folder / PROJECT_FILE
    local.write_bytes(_text(path, "--project_file"))
    _, job = load_project(local).job(name)
    if job.query is not None:
        query = local.parent / job.query
        query.write_bytes(_text(f"{path.rpartition('/')[0]}/{job.query}", "query"))
    return local


def _text(path: str, field: str) -> bytes:
    try:
        with FileSystems.open(path) as file:
            text: bytes = file.read(MAX_FILE_BYTES + 1)
    except Exception as error:
        # A library's message may quote the path's credentials or contents.
        kind = type(error).__name__
        raise UsageError(field, f"cannot be read ({kind})", "check it") from None
    if len(text) > MAX_FILE_BYTES:
        raise UsageError(field, f"exceeds {MAX_FILE_BYTES} bytes", "shorten the file")
    return text


def launch(job: Job, runner: str, beam_args: Sequence[str]) -> Result:
    """Begin the run, hand the pipeline over, and come back."""
    return run_job(job, runner, dataflow.without_runner(beam_args), detach=True)


def describe(job: Job, beam_args: Sequence[str]) -> dict[str, Any]:
    """What would be started: public names and options only."""
    return {
        "plan_hash": job.plan.hash,
        "source": job.plan.source,
        "store": job.state.store,
        "shards": job.state.shards,
        "options": dataflow.options_of(beam_args),
    }


def parser() -> argparse.ArgumentParser:
    """Parameters of the template; all others are Beam's."""
    return dataflow.parser(
        __doc__.splitlines()[0],
        {"job": "its name; without it the only one", "environment": "whose places are taken"},
        project_file="the project file, local or gs://",
    )


def start(own: argparse.Namespace, beam_args: list[str]) -> dict[str, Any]:
    """Start the job, or say what would be started."""
    with tempfile.TemporaryDirectory(prefix="dpstream-launch-") as folder:
        project = fetch(own.project_file, Path(folder), own.job)
        job = load_job(project, own.job, environment=own.environment)
        check_remote(job)
        beam_flags = dataflow.flags(beam_args, job.source.unbounded)
        if own.dry_run == "true":
            return describe(job, beam_flags)
        result = launch(job, dataflow.RUNNER, beam_flags)
        return {"run_id": result.run_id, "plan_hash": result.plan_hash}


def main(argv: Sequence[str] | None = None) -> int:
    """The launcher's command line."""
    return dataflow.launched(parser(), start, argv)
