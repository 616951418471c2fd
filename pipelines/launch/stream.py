"""A job on Dataflow: the launcher starts it and does not wait.

A job with its store, account, secret, input or releases on the launcher's disk is refused, because
the disk is deleted afterwards.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.connectors.write import dead_letter_folder
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.pipelines.launch import dataflow
from dpstream.pipelines.stream.run import Result, run_job
from dpstream.state.ledger.open import file_of

_FILES = ("parquet", "csv", "jsonl")


def check_remote(job: Job) -> None:
    """Refuse files on the launcher's disk, and what would be lost with a worker's disk.

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


def launch(job: Job, runner: str, beam_args: Sequence[str]) -> Result:
    """Begin the run, submit the pipeline, and return without waiting."""
    return run_job(job, runner, dataflow.without_runner(beam_args), detach=True)


def describe(job: Job, beam_args: Sequence[str]) -> dict[str, Any]:
    """Describe the job that would be started: public names and options only."""
    return {
        "plan_hash": job.plan.hash,
        "source": job.plan.source,
        "store": job.state.store,
        "shards": job.state.shards,
        "options": dataflow.options_of(beam_args),
    }


def start(project: Path, own: argparse.Namespace, beam_args: list[str]) -> dict[str, Any]:
    """Start the job, or describe it without starting."""
    job = load_job(project, own.name, environment=own.environment)
    check_remote(job)
    beam_flags = dataflow.flags(beam_args, job.source.unbounded)
    if own.dry_run == "true":
        return describe(job, beam_flags)
    result = launch(job, dataflow.RUNNER, beam_flags)
    return {"run_id": result.run_id, "plan_hash": result.plan_hash}
