"""``dpstream check``: shows whether a job's records can be used, before anything is charged.

``dpstream doctor``: shows what this machine can run.
"""

import sys
from typing import TYPE_CHECKING, Any

import click

from dpstream.accounting.errors import RunError
from dpstream.pipelines.cli.parts import AS_JSON, JOB, Bar, Chosen, examples, load_job, print_json
from dpstream.pipelines.cli.private_counts import LABEL

if TYPE_CHECKING:
    from dpstream.pipelines.operate.check import Checked


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
@click.option("--quiet", is_flag=True, help="No progress bar.")
@AS_JSON
def check(job: Chosen, limit: int | None, quiet: bool, as_json: bool) -> None:
    """Read the data of JOB and count unusable records by reason, with their first positions.

    It also shows whether a key has enough units to be published.
    Nothing is charged, drawn or stored.  The output depends on private records: it is for the
    operator only, not to be published.  Exit code 2 if no record is usable.  Files that are added
    later and read by a run with --through, whose records may be late, are not considered.
    """
    from msgspec import to_builtins

    from dpstream.pipelines.operate.check import check_source

    loaded = load_job(job)
    with Bar(hidden=quiet or as_json, what="rows") as bar:
        checked = check_source(loaded, limit, bar.update)
    if as_json:
        print_json({"operator_only": to_builtins(checked)})
    else:
        click.echo("\n".join(_lines(checked, loaded.name + job.flags)))
    if checked.usable == 0:
        click.get_current_context().exit(_UNUSABLE)


def _lines(checked: "Checked", job: str) -> list[str]:
    part = "all of the source" if checked.complete else "the first ones only (--limit)"
    lines = [
        f"{LABEL} these counts depend on private records.",
        f"Read        {checked.read:,} rows, {part}",
    ]
    if checked.left_out:
        lines.append(f"Left out    {checked.left_out:,} rows that query does not keep")
    unusable = sum(of.records for of in checked.unusable)
    share = 100 * unusable / max(1, checked.usable + unusable)
    lines.append(f"Usable      {checked.usable:,} records")
    lines.append(f"Unusable    {unusable:,} records ({share:.3g}%)")
    for of in checked.unusable:
        lines.append(f"  {of.records:,} with the reason {of.reason}: {of.problem}")
        where = "; ".join(f"{name}, row {row:,}" for name, row in of.first)
        lines.append(
            f"    first at {where} (rows are counted from 0, without header and blank lines)"
        )
        fix = of.fix
        if of.no_time:
            lines.append(f"    {of.no_time:,} of them hold no time that can be read")
            fix = f"write times as 2024-01-31T13:05:00Z (RFC 3339); or {fix}"
        lines.append(f"    Fix: {fix}.")
    lines += _appears(checked)
    if checked.usable == 0:
        lines.append(
            "No record is usable: `dpstream run` would charge its budget and release nothing."
        )
    else:
        lines.append(f"Nothing was charged or stored. Next: `dpstream plan {job}`.")
    return lines


def _appears(checked: "Checked") -> list[str]:
    """Return whether a key has enough units; nothing if keys are public or no record is usable."""
    needed, most = checked.units_needed, checked.most_units
    if needed is None or not checked.usable:
        return []
    chance = f"{needed:,} units of one window, which give a 50% chance of being published"
    if most is None:
        return [f"Appears     not counted: too many keys to tell whether one has {chance}"]
    if most >= needed:
        return [f"Appears     yes: a key has {chance}"]
    among = "" if checked.complete else ", among the rows read"
    return [
        f"Appears     nothing is likely: no key has {chance}; the most is {most:,}{among}",
        "    Fix: take longer windows, fewer key columns, a larger epsilon, or name the keys in "
        "public_keys.",
    ]


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
