"""``dpstream report``: one page about a run."""

from pathlib import Path

import click

from dpstream.pipelines.cli.parts import AS_JSON, JOB, examples, load_job, print_json


@click.command(
    epilog=examples(
        "dpstream report job.toml",
        "dpstream report job.toml --out week.html",
        "dpstream report job.toml --truth 'public/*.parquet'",
    )
)
@JOB
@click.option(
    "--out",
    default="report.html",
    show_default=True,
    type=click.Path(path_type=Path),
    help="The page.",
)
@click.option(
    "--truth",
    type=click.Path(path_type=Path),
    help="Raw records of the job's schema (file or glob): adds true errors. Public data only.",
)
@AS_JSON
def report(job: Path, out: Path, truth: Path | None, as_json: bool) -> None:
    """Write one HTML page about a run, finished or not, from its plan and its releases."""
    from dpstream.pipelines.report.report import TRUTH_LABEL, as_dict, build, write
    from dpstream.pipelines.report.view import render

    found = build(load_job(job), truth)
    write(found, render(found), out)
    if as_json:
        print_json({"page": str(out), **as_dict(found)})
        return
    whole = "" if found.expected is None else f" of {found.expected:,}"
    click.echo(f"Report in {out}: {len(found.found.releases):,}{whole} releases.")
    for stamp in found.stamps:
        click.echo(f"{stamp}: do not publish.")
    if truth is not None:
        click.echo(f"True errors are {TRUTH_LABEL}.")
