"""``dpstream report``: writes one page about a run.

``dpstream demo``: runs a year of real flights, or writes an invented census.
"""

import sys
from pathlib import Path

import click

from dpstream.accounting.errors import UsageError, refuse_first, required
from dpstream.pipelines.cli.parts import (
    AS_JSON,
    JOB,
    Bar,
    Chosen,
    examples,
    load_job,
    print_json,
    print_warnings,
    stop_signals,
)
from dpstream.pipelines.render.layout import count


@click.command(
    short_help="Write one HTML page about a run.",
    epilog=examples(
        "dpstream report daily",
        "dpstream report daily --out week.html",
        "dpstream report daily --serve",
        "dpstream report daily --truth 'public/*.parquet'",
        "dpstream report daily --publish public",
    ),
)
@JOB
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="The page to write, FILE.html.  [default: JOB.report.html]",
)
@click.option(
    "--serve",
    is_flag=True,
    help="Show the page in a browser on this machine, and update it after each release.",
)
@click.option(
    "--port", type=click.IntRange(0, 65535), help="Port for --serve.  [default: a free one]"
)
@click.option(
    "--truth",
    type=click.Path(path_type=Path),
    help="Raw records with the job's schema (file or glob), to show true errors. Public data only.",
)
@click.option(
    "--publish",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Write the page with its final table, methodology, metadata and registry entry to FOLDER.",
)
@AS_JSON
def report(
    job: Chosen,
    out: Path | None,
    serve: bool,
    port: int | None,
    truth: Path | None,
    publish: Path | None,
    as_json: bool,
) -> None:
    """Write one HTML page about a run, finished or not, from its plan and its releases."""
    files = {"--out": out is not None, "--truth": truth is not None, "--json": as_json}
    fix = "leave one of them out"
    refuse_first(
        *(
            (other and given, UsageError(name, f"does not go with {flag}", fix))
            for flag, other in (("--serve", serve), ("--publish", publish is not None))
            for name, given in files.items()
            if (flag, name) != ("--publish", "--json")
        ),
        (serve and publish is not None, UsageError("--serve", "does not go with --publish", fix)),
        (
            port is not None and not serve,
            UsageError("--port", "is of --serve", "add --serve, or leave it out"),
        ),
    )
    if serve:
        _serve(job, port or 0)
    elif publish is not None:
        _publish(job, publish, as_json)
    else:
        _write(job, out, truth, as_json)


def _write(job: Chosen, out: Path | None, truth: Path | None, as_json: bool) -> None:
    from dpstream.pipelines.cli.run import damage_text
    from dpstream.pipelines.render.page import ending_of
    from dpstream.pipelines.report.report import TRUTH_LABEL, as_dict, build, write
    from dpstream.pipelines.report.view import render
    from dpstream.pipelines.stream.completeness import came_late

    if out is not None:
        ending_of(out, ("html", "htm"))
    page = build(load_job(job), truth)
    out = out or Path(f"{page.job.name}.report.html")
    write(page, render(page), out)
    if as_json:
        print_json({"page": str(out), **as_dict(page)})
        return
    number = len(page.inventory.releases) if page.expected is None else page.expected
    before = "" if page.expected is None else f"{len(page.inventory.releases):,} of "
    print_warnings([*damage_text(page.job, page.damaged), *came_late(page.job)])
    click.echo(f"Report in {out}: {before}{count(number, 'release')}.")
    if not page.findings.all_keys.distinct:
        click.echo("No key was released: the page says why that may be.")
    for stamp in page.stamps:
        click.echo(f"{stamp}: do not publish.")
    if truth is not None:
        click.echo(f"True errors are {TRUTH_LABEL}.")


def _publish(job: Chosen, folder: Path, as_json: bool) -> None:
    from dpstream.pipelines.cli.run import damage_text
    from dpstream.pipelines.report.publication import DEPLOYMENT, publish
    from dpstream.pipelines.report.report import build
    from dpstream.pipelines.report.view import render
    from dpstream.pipelines.stream.completeness import came_late

    page = build(load_job(job))
    print_warnings([*damage_text(page.job, page.damaged), *came_late(page.job)])
    files, lacking = publish(page, lambda names: render(page, downloads=names), folder)
    if as_json:
        print_json({"folder": str(folder), "files": files, "lacking": lacking})
        return
    click.echo(f"Published in {folder}: {', '.join(files)}.")
    for stamp in page.stamps:
        click.echo(f"{stamp}: do not publish; {DEPLOYMENT} was not written.")
    if lacking:
        click.echo(
            f"{DEPLOYMENT} was not written: add {', '.join(lacking)} to "
            f"[job.{page.job.name}.publication] in {page.job.path.name}."
        )


def _serve(job: Chosen, port: int) -> None:
    import threading

    from dpstream.pipelines.report.server import Server

    with Server(load_job(job), port) as server, stop_signals(True) as stop:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        click.echo(f"Report at {server.address}\nFor this machine only; Ctrl-C ends it.")
        required(stop, "stop is there").wait()
        server.shutdown()


@click.command(
    short_help="Run a year of real flights through a stream.",
    epilog=examples(
        "dpstream demo",
        "dpstream demo --folder flights",
        "dpstream demo --data census --folder office",
    ),
)
@click.option(
    "--data",
    type=click.Choice(["flights", "census"]),
    default="flights",
    show_default=True,
    help="What the folder gets; census: an office with records of people who do not exist.",
)
@click.option(
    "--folder",
    default="demo",
    show_default=True,
    type=click.Path(path_type=Path),
    help="Folder for data, project file, secret and releases.",
)
def demo(data: str, folder: Path) -> None:
    """Run a year of real flights through a stream and compare the releases with the truth.

    With --data census it writes the files of an invented office, with project file, secret and
    account, for `dpstream census`.
    """
    if data == "census":
        from dpstream.pipelines.demo import prepare_census

        prepare_census(folder)
        click.echo(f"Next: `dpstream census plan --project {folder / 'dpstream.toml'}`")
        return
    from rich.console import Console

    from dpstream.accounting.budget.allocation import allocate
    from dpstream.pipelines.demo import prepare, show
    from dpstream.pipelines.jobs.committed import committed
    from dpstream.pipelines.render.job_plan import details_text
    from dpstream.pipelines.stream.run import run_job

    job = prepare(folder)
    begun = committed(job)
    plan, budget = begun[1:] if begun else (job.plan, allocate(job.plan))
    with Bar(hidden=False) as bar:
        run_job(job, progress=bar.update)
    show(job, plan, budget, Console(file=sys.stdout))
    click.echo(f"\nWhat is promised:\n{details_text(plan, budget)}")
