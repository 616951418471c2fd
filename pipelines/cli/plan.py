"""Commands that show beforehand what a run would be; nothing is charged.

* ``dpstream plan``: shows what a job promises and costs; ``--scale``: what a stated load needs.
* ``dpstream check``: shows whether a job's records can be used, before anything is charged.
* ``dpstream doctor``: shows what this machine can run.
"""

import sys
from typing import TYPE_CHECKING, Any

import click

from dpstream.accounting.errors import RunError, UsageError
from dpstream.pipelines.cli.parts import (
    AS_JSON,
    COUNT,
    JOB,
    MOST_ASSUMED,
    Bar,
    Chosen,
    examples,
    load_job,
    options,
    print_json,
)
from dpstream.pipelines.cli.private_counts import LABEL

if TYPE_CHECKING:
    from dpstream.pipelines.jobs.job import Job
    from dpstream.pipelines.operate.check import Checked


POPULATION = options(
    click.option(
        "--units",
        type=COUNT,
        help="Number of units with records in a window, to estimate what appears.  [default "
        "with --scale: any number]",
    ),
    click.option(
        "--records",
        type=COUNT,
        help="Number of the units' records in a window, to estimate what C cuts.",
    ),
)
STATED = options(
    POPULATION,
    click.option(
        "--keys",
        type=COUNT,
        help="Number of keys in a window.  [default: 1000; required with --scale]",
    ),
)
SCALE = options(
    click.option(
        "--scale", is_flag=True, help="Estimate what a stated load needs, and what it costs."
    ),
    click.option("--records-per-day", type=COUNT, help="--scale: records on an average day."),
    click.option(
        "--peak",
        type=float,
        default=2.0,
        show_default=True,
        help="--scale: ratio of the records at the busiest trigger time to the average.",
    ),
    click.option(
        "--published-keys",
        type=click.IntRange(0, MOST_ASSUMED),
        help="--scale: keys published at a trigger time.  [default: the most the threshold allows]",
    ),
    click.option(
        "--within",
        help="--scale: time after a trigger time by which its release is published.  [default:"
        " one interval]",
    ),
    click.option(
        "--worker-vcpus",
        type=COUNT,
        default=2,
        show_default=True,
        help="--scale: vCPUs of a worker.",
    ),
    click.option(
        "--worker-gib",
        type=float,
        default=7.5,
        show_default=True,
        help="--scale: memory of a worker in GiB.",
    ),
    click.option(
        "--price",
        multiple=True,
        metavar="NAME=DOLLARS",
        help="--scale: set another price; the output lists the names.",
    ),
    click.option(
        "--measure", is_flag=True, help="--scale: measure this machine first (takes seconds)."
    ),
)


@click.command(
    short_help="Show whether a job can run, what it publishes and what it costs.",
    epilog=examples(
        "dpstream plan daily",
        "dpstream plan daily --units 5000 --records 40000",
        "dpstream plan daily --details",
        "dpstream plan daily --try job.daily.contributions=20",
        "dpstream plan daily --json",
        "dpstream plan daily --scale --keys 1000000 --records-per-day 100000000",
    ),
)
@JOB
@click.option(
    "--try",
    "tries",
    multiple=True,
    metavar="FIELD=VALUE",
    help="Plan with another value of any field, such as job.daily.contributions=20; repeatable.",
)
@click.option(
    "--changed-keys",
    type=COUNT,
    help="Number of keys with new data at one trigger time, for the number of shards on Spanner.",
)
@STATED
@click.option(
    "--fresh", is_flag=True, help="Plan for `dpstream run --fresh`: a new run at a new charge."
)
@click.option("--details", is_flag=True, help="Also show all figures of the mechanism, in tables.")
@SCALE
@AS_JSON
def plan(
    job: Chosen,
    tries: tuple[str, ...],
    changed_keys: int | None,
    fresh: bool,
    scale: bool,
    details: bool,
    as_json: bool,
    **load: Any,
) -> None:
    """Show whether a job can run, whether anything will appear, how exact it is, what the budget
    covers and what would help; reads no data.

    If `dpstream run` would be refused now, the exit code is that of the refusal.

    The line with a star is the best mechanism for the job as it is, on a public reference shape.
    If a run was begun in the job's store file, the figures are those that this run committed.
    """
    from dpstream.accounting.budget.allocation import allocate
    from dpstream.accounting.guarantee import describe, text
    from dpstream.accounting.tuning.outlook import (
        KEYS,
        coverage,
        coverage_lines,
        outlook,
        outlook_text,
        warnings_of,
    )
    from dpstream.pipelines.ask.acceptance import of_job
    from dpstream.pipelines.jobs.committed import committed, tuned_of
    from dpstream.pipelines.scale.scale import shard_figures, shards_text

    loaded = load_job(job._replace(tries=tries))
    fresh = fresh or bool(tries)  # a trial is not the run that the store holds
    records = load.pop("records")
    if scale:
        _scaled(loaded, load, as_json)
        return
    checked, tuned = loaded.plan, tuned_of(loaded)
    state_figures = shard_figures(loaded, changed_keys)
    accepted = of_job(loaded, fresh)
    begun = None if fresh else committed(loaded)
    planned, budget = begun[1:] if begun else (checked, allocate(checked))
    stated = load["units"], load["keys"]
    covered = coverage(planned, budget, load["units"], records, load["keys"] or KEYS)
    if as_json:
        figures = describe(planned, budget, tuned) | {"plan_hash": checked.hash}
        figures["run_id"] = begun.run_id if begun else None
        figures["warnings"] += [*warnings_of(covered), *accepted.warnings]
        more: dict[str, Any] = {"state": state_figures} if state_figures else {}
        more |= {"acceptance": accepted.as_dict(), "coverage": covered}
        more |= {"outlook": outlook(planned, budget, *stated, checked)}
        print_json(figures | more)
    else:
        first = [*accepted.lines(), *coverage_lines(planned, covered)]
        output = "\n".join(first) + "\n"
        output += outlook_text(planned, budget, tuned, *stated, checked)
        if details:
            output += "\n" + text(planned, budget, tuned)
        if begun:
            output += f"Figures     of run {begun.run_id}, committed when it began\n"
        output += "".join(f"Warning     {warning}\n" for warning in warnings_of(covered))
        output += shards_text(state_figures)
        click.echo(output, nl=False)
    click.get_current_context().exit(accepted.exit_code)


def _scaled(job: "Job", given: dict[str, object], as_json: bool) -> None:
    """Print the estimate for the options of ``--scale``."""
    import msgspec

    from dpstream.pipelines.project.text import duration_micros
    from dpstream.pipelines.scale.rates import RATES, measured_rates, with_prices
    from dpstream.pipelines.scale.scale import Load, as_dict, estimate, text

    stated = {name: value for name, value in given.items() if value is not None}
    prices = with_prices(prices_of(stated.pop("price", ())))
    measure = stated.pop("measure", False)
    within = stated.pop("within", None)
    if within is not None:
        stated["within_seconds"] = duration_micros("--within", str(within)) / 1_000_000
    for name in ("keys", "records_per_day"):
        if name not in stated:
            raise UsageError(
                f"--{name.replace('_', '-')}", "is required by --scale", "say what the load is"
            )
    load = msgspec.convert(stated, Load).check()
    rates = measured_rates() if measure else RATES
    figures = estimate(job, load, rates, prices)
    if as_json:
        print_json({"scale": as_dict(figures, load, rates, prices)})
    else:
        click.echo(text(figures, load, rates, prices), nl=False)


def prices_of(given: object) -> dict[str, float]:
    """Return the prices of NAME=DOLLARS texts."""
    out = {}
    for one in given if isinstance(given, tuple) else ():
        name, _, value = str(one).partition("=")
        try:
            out[name] = float(value)
        except ValueError:
            raise UsageError("--price", "must be NAME=DOLLARS", "correct it") from None
    return out


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
