"""``dpstream due``: shows whether a release is overdue, for alarms and orchestrators."""

import time
from datetime import timedelta
from pathlib import Path

import click

from dpstream.pipelines.cli.parts import (
    AS_JSON,
    JOB,
    Chosen,
    examples,
    load_job,
    print_figures,
    print_warnings,
)

#: Exit code where a release is overdue.
OVERDUE = 5
#: Overdue releases that are listed.
_LISTED = 10


@click.command(
    short_help="Show which releases should be out and which are.",
    epilog=examples(
        "dpstream due daily",
        "dpstream due daily --as-of 2024-01-08",
        "dpstream due daily --metrics /var/lib/node_exporter/daily.prom",
    ),
)
@JOB
@click.option(
    "--as-of",
    metavar="INSTANT",
    help="Show the state at this instant (a date or an RFC 3339 time).  [default: now]",
)
@click.option(
    "--metrics",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Also write the figures to FILE for a collector, in Prometheus' text format.",
)
@AS_JSON
def due(job: Chosen, as_of: str | None, metrics: Path | None, as_json: bool) -> None:
    """Show which releases of JOB should be out by now, which are, and what is next.

    The output is public: the command reads no record, and only checks which expected files exist.
    The exit code is 5 if a release is overdue.
    """
    from msgspec import to_builtins

    from dpstream.accounting.figures import EPOCH
    from dpstream.pipelines.operate.due import due_at, write_metrics
    from dpstream.pipelines.project.text import instant
    from dpstream.pipelines.render.layout import labelled, page

    loaded = load_job(job)
    at = time.time_ns() // 1_000
    if as_of is not None:
        moment = instant("--as-of", as_of, loaded.plan.timeline.zone)
        at = (moment - EPOCH) // timedelta(microseconds=1)
    state = due_at(loaded, at)
    if metrics is not None:
        write_metrics(state, metrics)
    lines = labelled("Due", f"through {state.due_through}" if state.due_through else "nothing yet")
    lines += labelled("Out", f"through {state.out_through}" if state.out_through else "nothing")
    for release in state.overdue[:_LISTED]:
        lines += labelled("Overdue", f"window {release.window}, due {release.trigger_time}")
    if len(state.overdue) > _LISTED:
        lines += labelled("Overdue", f"{len(state.overdue) - _LISTED:,} more")
    lines += labelled("Missing", ", ".join(state.missing)) if state.missing else []
    for window, names in state.incomplete.items():
        lines += labelled("Incomplete", f"window {window}, without {', '.join(names)}")
    if state.abandoned:
        windows = ", ".join(state.abandoned[:_LISTED])
        more = len(state.abandoned) - _LISTED
        lines += labelled("Abandoned", windows + (f", and {more:,} more" if more > 0 else ""))
    lines += labelled("Next", state.next or "none: the job has ended")
    print_warnings(state.warnings)
    print_figures(as_json, to_builtins(state), page(lines))
    click.get_current_context().exit(OVERDUE if state.overdue else 0)
