"""``dpstream sql --stream``: a statement as a stream job, run or written down."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dpstream.pipelines.cli.run import run_checked

if TYPE_CHECKING:
    from dpstream.pipelines.runners.bounded import Runner

STDOUT = "-"


def stream(job: Path, text: str, emit: str | None, where: "Runner | None", as_json: bool) -> None:
    """Run the job that a job file and a statement make together, or write its file.

    Args:
        job: the file without key, aggregates and C.
        text: one statement; a semicolon may end it.
        emit: where to write instead of running, ``-`` for stdout.
        where: runner of the job, ``None``: the DirectRunner.
    """
    from dpstream.pipelines.sql.errors import refusal
    from dpstream.pipelines.sql.stream import stream_job
    from dpstream.pipelines.sql.texts import split

    statements = split(text)
    if len(statements) != 1:
        raise refusal("one-statement")
    compiled = stream_job(job, statements[0])
    if emit is None:
        name, flags = ("DirectRunner", []) if where is None else (where.name, where.beam_args)
        run_checked(compiled.job, name, flags, quiet=as_json, as_json=as_json)
    elif emit == STDOUT:
        click.echo(compiled.text, nl=False)
    else:
        from dpstream.pipelines.tuning.file import check_out, write

        check_out(job, Path(emit), existing=True, field="--emit")
        write(Path(emit), compiled.text, field="--emit")
        click.echo(f"Job file {emit}: `dpstream run` runs it")
