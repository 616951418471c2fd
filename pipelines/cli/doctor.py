"""``dpstream doctor``: shows what this machine can run."""

import sys
from typing import Any

import click

from dpstream.accounting.errors import RunError
from dpstream.pipelines.cli.parts import AS_JSON, examples, print_json


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
        _print_report(report)
    if not report["ready"]:
        raise SystemExit(RunError.exit_code)


def _print_report(report: dict[str, Any]) -> None:
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
