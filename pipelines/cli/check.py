"""Commands that show whether a run could go well; nothing is charged.

* ``dpstream check``: shows whether a job's records can be used.
* ``dpstream doctor``: shows what this machine can run.
"""

import sys

import click

from dpstream.accounting.errors import RunError
from dpstream.pipelines.cli.parts import (
    AS_JSON,
    JOB,
    QUIET,
    Bar,
    Chosen,
    examples,
    load_job,
    print_json,
)
from dpstream.pipelines.cli.private_counts import LABEL

#: Exit code of a source without a usable record, as of every unusable input.
_UNUSABLE = 2


@click.command(
    short_help="Read a job's data and count unusable records by reason.",
    epilog=examples(
        "dpstream check daily",
        "dpstream check daily --limit 100000",
        "dpstream check daily --json",
    ),
)
@JOB
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    metavar="ROWS",
    help="Stop after about this number of rows.  [default: all; of a topic, up to its present end]",
)
@QUIET
@AS_JSON
def check(job: Chosen, limit: int | None, quiet: bool, as_json: bool) -> None:
    """Read the data of JOB and count unusable records by reason, with their first positions.

    It also shows whether a key has enough units to be published, and how many contributions their
    bound leaves out.
    Nothing is charged, drawn or stored.  The output depends on private records: it is for the
    operator only, not to be published.  Exit code 2 if no record is usable.  Files that are added
    later and read by a run with --through, whose records may be late, are not considered.
    """
    from msgspec import to_builtins

    from dpstream.pipelines.operate.check import check_source
    from dpstream.pipelines.render.source_check import check_text

    loaded = load_job(job)
    with Bar(hidden=quiet or as_json, what="rows") as bar:
        checked = check_source(loaded, limit, bar.update)
    counts = to_builtins(checked)
    if as_json:
        print_json({"operator_only": counts})
    else:
        click.echo(f"{LABEL} these counts depend on private records.")
        click.echo(check_text(counts, loaded.name + job.flags), nl=False)
    if checked.usable == 0:
        click.get_current_context().exit(_UNUSABLE)


@click.command(
    short_help="Show what this machine can run.",
    epilog=examples("dpstream doctor", "dpstream doctor --fix", "dpstream doctor --json"),
)
@click.option(
    "--fix", is_flag=True, help="Build Prism, Beam's streaming engine, with Go (takes a minute)."
)
@AS_JSON
def doctor(fix: bool, as_json: bool) -> None:
    """Show what this machine can run."""
    from dpstream.pipelines.operate.doctor import examine, fix_prism

    if fix:
        made = fix_prism()
        click.echo("Prism is there." if made is None else f"Prism is built: {made}", err=True)
    report = examine()
    if as_json:
        print_json(report)
    else:
        from rich.console import Console
        from rich.table import Table

        table = Table("part", "state", title=f"Python {report['python']}")
        for name, version in report["packages"].items():
            table.add_row(name, version or "missing")
        for name, extra in report["extras"].items():
            table.add_row(f"extra {name}", "missing" if extra["missing"] else "installed")
        for name, status in {**report["runners"], **report["emulators"]}.items():
            table.add_row(
                name, (status if isinstance(status, str) else "found") if status else "missing"
            )
        disk = report["disk"]
        table.add_row("SQLite", report["sqlite"])
        table.add_row("fsync", f"{disk['milliseconds']} ms" if disk["fsync"] else "refused")
        Console(file=sys.stdout).print(table)
        for line in report["verdict"]:
            click.echo(line)
    if not report["ready"]:
        raise SystemExit(RunError.exit_code)
