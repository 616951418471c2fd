"""Start a section of a project file on Dataflow without waiting: the program of the flex template.

The template takes the project file, an environment, the kind of section (``kind``) and its name: a
job, census tables, or a batch that a session has paid.  All else is in the project file.  The
launcher's machine is deleted afterwards, so a path on it is refused.
"""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from apache_beam.io.filesystems import FileSystems

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.launch import dataflow
from dpstream.pipelines.project.project import load_project
from dpstream.pipelines.project.text import MAX_FILE_BYTES
from dpstream.state.ledger.open import PROJECT_FILE

#: What can be started, and the parameters beside the project file that it needs.
KINDS = {"job": (), "census": ("out_folder",), "batch": ("out_folder", "ticket")}
Start = Callable[[Path, argparse.Namespace, list[str]], dict[str, Any]]


def parser() -> argparse.ArgumentParser:
    """Return a parser of the template's parameters; all others are Beam's."""
    arguments = dataflow.parser(
        __doc__.splitlines()[0],
        {
            "name": "of the job, the census section or the table; without it the only one",
            "environment": "whose places are taken",
            "out_folder": "of census tables and batches: a new folder, gs://",
            "ticket": "of a batch: what `dpstream session ask --ticket` wrote, gs://",
        },
        project_file="the project file, local or gs://",
    )
    arguments.add_argument("--kind", choices=tuple(KINDS), default="job", help="what is started")
    return arguments


def fetch(path: str, folder: Path, kind: str = "job", name: str | None = None) -> Path:
    """Copy the project file, and the query of a job, from any of Beam's file systems.

    Returns:
        the path of the local project file.

    Raises:
        UsageError: a file cannot be read, or is too long.
    """
    local = folder / PROJECT_FILE
    local.write_bytes(_text(path, "--project_file"))
    if kind != "job":
        return local
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


def _starter(kind: str) -> Start:
    """Return the function that starts a kind; each imports what it needs."""
    if kind == "census":
        from dpstream.pipelines.launch.census import start
    elif kind == "batch":
        from dpstream.pipelines.launch.batch import start
    else:
        from dpstream.pipelines.launch.stream import start
    return start


def start(own: argparse.Namespace, beam_args: list[str]) -> dict[str, Any]:
    """Start the named section, or describe it without starting.

    Raises:
        UsageError: a parameter is missing, or has no meaning for this kind.
    """
    for parameter in ("out_folder", "ticket"):
        given = getattr(own, parameter) is not None
        if given is not (parameter in KINDS[own.kind]):
            rule = f"has no meaning for a {own.kind}" if given else f"is required for a {own.kind}"
            raise UsageError(f"--{parameter}", rule, "leave it out" if given else "give gs://...")
    with tempfile.TemporaryDirectory(prefix="dpstream-launch-") as folder:
        project = fetch(own.project_file, Path(folder), own.kind, own.name)
        try:
            return _starter(own.kind)(project, own, beam_args)
        except UsageError as error:
            if error.field != "--env":  # what commands call the template's parameter
                raise
            raise UsageError("--environment", error.rule, error.fix) from None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the launcher's command line."""
    return dataflow.launched(parser(), start, argv)
