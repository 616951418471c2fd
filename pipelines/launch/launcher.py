"""Start a job of a project file on Dataflow without waiting: the program of the flex template.

The template takes the project file, an environment and the job's name.  All else is in the project
file.  The launcher's machine is deleted afterwards, so a path on it is refused (`check_remote`):
of the job's store, account, secret, input or releases.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from apache_beam.io.filesystems import FileSystems
from apache_beam.options.pipeline_options import PipelineOptions

from dpstream.accounting.errors import DpstreamError, UsageError
from dpstream.pipelines.connectors.write import dead_letter_folder
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.pipelines.project.project import load_project
from dpstream.pipelines.project.text import MAX_FILE_BYTES
from dpstream.pipelines.runners.table import (
    RUNNERS,
    refuse_at_least_once,
    refuse_unknown,
)
from dpstream.pipelines.stream.run import run_job
from dpstream.state.ledger.open import PROJECT_FILE, file_of
from dpstream.state.private_log import unexpected

RUNNER = "DataflowRunner"


def flags(given: Sequence[str], streaming: bool) -> list[str]:
    """Return Beam's flags for Dataflow: the given ones, and those that the pipeline needs.

    Args:
        streaming: whether the input has no end.

    Raises:
        UsageError: a flag that breaks exactly-once processing, one that neither the template nor
            Beam knows, or another runner.
    """
    refuse_unknown(given, RUNNERS[RUNNER].flags)
    parsed = PipelineOptions(list(given))
    refuse_at_least_once(parsed)
    options = parsed.get_all_options()
    if options["runner"] not in (None, RUNNER):
        raise UsageError("--runner", f"must be {RUNNER} here", "leave it out")
    if options["streaming"] and not streaming:
        raise UsageError("--streaming", "is for jobs without an end", "leave it out")
    added = [f"--runner={RUNNER}"] if options["runner"] is None else []
    if streaming and not options["streaming"]:
        added.append("--streaming")
    if options["sdk_container_image"] and options["sdk_location"] == "default":
        added.append("--sdk_location=container")  # the image has the SDK: nothing is staged
    return [*given, *added]


def options_of(beam_args: Sequence[str]) -> dict[str, Any]:
    """Return Beam's options by name, for a dry run."""
    options = PipelineOptions(list(beam_args)).get_all_options(drop_default=True)
    return {name: value for name, value in sorted(options.items()) if value is not None}


def without_runner(beam_args: Sequence[str]) -> list[str]:
    """Return Beam's flags without that of the runner."""
    return [flag for flag in beam_args if not flag.startswith("--runner=")]


def parser() -> argparse.ArgumentParser:
    """Return a parser of the template's parameters; all others are Beam's."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    texts = {
        "project_file": "the project file, local or gs://",
        "name": "of the job; without it the only one",
        "environment": "whose places are taken",
    }
    for name, text in texts.items():
        arguments.add_argument(f"--{name}", required=name == "project_file", help=text)
    arguments.add_argument(
        "--dry_run",
        nargs="?",
        const="true",
        default="false",
        choices=("true", "false"),
        help="check the parameters and print the options, start nothing",
    )
    return arguments


def fetch(path: str, folder: Path, name: str | None = None) -> Path:
    """Copy the project file, and the query of a job, from any of Beam's file systems.

    Returns:
        the path of the local project file.

    Raises:
        UsageError: a file cannot be read, or is too long.
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
            job.secret.kind != "gcp",
            "use gcp:projects/P/secrets/S/versions/N, which the workers read for themselves",
        ),
        ("table.path", here, "use a topic or a subscription, or a folder that is a gs:// URL"),
        ("sink.path", job.sink.folder is not None, "use a sink that is a service"),
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


def start_job(project: Path, own: argparse.Namespace, beam_args: list[str]) -> dict[str, Any]:
    """Start the job and do not wait; a dry run describes it by public names and options."""
    job = load_job(project, own.name, environment=own.environment)
    check_remote(job)
    beam_flags = flags(beam_args, job.source.unbounded)
    if own.dry_run == "true":
        return {
            "plan_hash": job.plan.hash,
            "source": job.plan.source,
            "store": job.state.store,
            "shards": job.state.shards,
            "options": options_of(beam_flags),
        }
    result = run_job(job, RUNNER, without_runner(beam_flags), detach=True)
    return {"run_id": result.run_id, "plan_hash": result.plan_hash}


def start(own: argparse.Namespace, beam_args: list[str]) -> dict[str, Any]:
    """Start the job of the project file, or describe it without starting."""
    with tempfile.TemporaryDirectory(prefix="dpstream-launch-") as folder:
        project = fetch(own.project_file, Path(folder), own.name)
        try:
            return start_job(project, own, beam_args)
        except UsageError as error:
            if error.field != "--env":  # what commands call the template's parameter
                raise
            raise UsageError("--environment", error.rule, error.fix) from None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the launcher's command line; exit codes as of ``dpstream``."""
    own, beam_args = parser().parse_known_args(argv)
    try:
        print(json.dumps(start(own, beam_args)))
        return 0
    except DpstreamError as error:
        coded = error
    except Exception as error:
        coded = unexpected("launch", error)
    print(f"{coded.kind}: {coded}")
    return coded.exit_code
