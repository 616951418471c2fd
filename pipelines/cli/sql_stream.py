"""``dpstream sql --stream``: a statement as a stream job, run or written down."""

from typing import TYPE_CHECKING

import click

from dpstream.pipelines.cli.parts import Chosen
from dpstream.pipelines.cli.run import run_checked

if TYPE_CHECKING:
    from dpstream.pipelines.runners.bounded import Runner


def stream(job: Chosen, text: str, emit: str | None, where: "Runner | None", as_json: bool) -> None:
    """Run the job that a section and a statement make together, or write it.

    Args:
        job: without key, aggregates and C.
        text: one statement; a semicolon may end it.
        emit: name of the job that is written instead of running it.
        where: runner of the job, ``None``: the DirectRunner.
    """
    from dpstream.pipelines.sql.errors import refusal
    from dpstream.pipelines.sql.stream import stream_job, write_job
    from dpstream.pipelines.sql.texts import split

    statements = split(text)
    if len(statements) != 1:
        raise refusal("one-statement")
    project = job.load()
    compiled = stream_job(project, job.name, statements[0])
    if emit is None:
        name, flags = ("DirectRunner", []) if where is None else (where.name, where.beam_args)
        run_checked(compiled.job, name, flags, quiet=as_json, as_json=as_json)
        return
    write_job(project, compiled, emit)
    click.echo(f"[job.{emit}] is in {project.path.name}: `dpstream run {emit}{job.flags}` runs it")
