"""``dpstream run``: runs a job, or continues it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dpstream.accounting.errors import RunError
from dpstream.accounting.figures import guarantee_pair
from dpstream.pipelines.cli.parts import (
    AS_JSON,
    JOB,
    QUIET,
    Bar,
    Chosen,
    beam_flags,
    examples,
    load_job,
    print_account,
    print_charge,
    print_json,
    print_warnings,
    stop_signals,
)
from dpstream.pipelines.cli.private_counts import OPERATOR, echo_private, with_private
from dpstream.pipelines.render.layout import count

if TYPE_CHECKING:
    from dpstream.pipelines.jobs.job import Job
    from dpstream.pipelines.stream.completeness import Terms
    from dpstream.pipelines.stream.run import Result
    from dpstream.pipelines.stream.summary import Released

#: Share of records (in each of their windows) that C cuts from which on it is told.
_MUCH = 0.2
#: Names of damaged files that are printed.
_LISTED = 10
#: Hint for a run whose store and releases are files, which ``--fresh`` can move away.
_AGAIN = "; --fresh runs again, at a new charge"
_PERIOD = "; budget.covers gives each window its own, for a guarantee for each period"
#: Counts whose names do not say what is counted.
_COUNTED = {
    "operator_dead_time": "dead time (none, or outside [time.start, end))",
    "operator_dead_value": "dead value (no number)",
    "operator_dead_source": "dead source (no readable row)",
}


@click.command(
    short_help="Run a job, or continue it.",
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    epilog=examples(
        "dpstream run daily",
        "dpstream run daily --through 2024-02-01",
        "dpstream run daily --fresh          # the job was changed: a new charge",
        "dpstream run daily --runner=PrismRunner",
        "dpstream run daily --runner=FlinkRunner --job_name=flights",
    ),
)
@JOB
@click.option("--runner", default="DirectRunner", show_default=True, help="Beam runner.")
@click.option("--gcp-project", metavar="NAME", help="The Google Cloud project, for Dataflow.")
@click.option(
    "--through",
    metavar="INSTANT",
    help="For files that grow: release all that is due by this instant (a date, an RFC "
    "3339 time, now, end); the next run also reads files that are added later.",
)
@click.option(
    "--wait",
    metavar="LENGTH",
    help="Wait up to this long, such as 2h, for expected files before the run is refused.",
)
@click.option(
    "--incomplete",
    is_flag=True,
    help="Release without expected files that are missing; releases and `due` then name them.",
)
@click.option(
    "--fresh",
    is_flag=True,
    help="Start a new run, at a new charge; the old store and releases are renamed with "
    "the old run's id. Typed again after a failure, it continues the run that it began.",
)
@click.option(
    "--check",
    is_flag=True,
    help="Read the records first, as `dpstream check` does, and stop before the charge if none is "
    "usable. That it stops is one bit of private data, which no noise covers.",
)
@click.option("--fail-if-empty", is_flag=True, help="End with exit code 4 if nothing was released.")
@QUIET
@click.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    help="Serve public quantities to Prometheus on this port (say 9464).",
)
@click.option(
    "--metrics-host",
    default="127.0.0.1",
    show_default=True,
    help="Address to serve them on.",
)
@OPERATOR
@click.option(
    "--operator-report",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write exact counts of private records as JSON to FILE, which its owner alone can read.",
)
@AS_JSON
@click.pass_context
def run(
    ctx: click.Context,
    /,
    job: Chosen,
    runner: str,
    gcp_project: str | None,
    through: str | None,
    wait: str | None,
    incomplete: bool,
    fresh: bool,
    fail_if_empty: bool,
    quiet: bool,
    metrics_port: int | None,
    metrics_host: str,
    check: bool,
    operator_report: Path | None,
    as_json: bool,
) -> None:
    """Run a job, or continue it; other flags pass through to Beam.

    A job whose source has no end runs until it is interrupted, and continues when it is run
    again.  On a cluster, interrupting it (SIGINT, SIGTERM) stops it there too.
    """
    from dpstream.pipelines.operate.metrics import serving
    from dpstream.pipelines.operate.notice import announcing
    from dpstream.pipelines.operate.operator_report import Reporter
    from dpstream.pipelines.project.text import duration_micros
    from dpstream.pipelines.stream.completeness import Terms

    project = [] if gcp_project is None else [f"--project={gcp_project}"]
    beam_args = [*beam_flags(ctx, runner), *project]
    checked = load_job(job)
    terms = Terms(None if wait is None else duration_micros("--wait", wait), incomplete)
    with announcing(checked, through) as ended:
        reporter = Reporter(checked, operator_report)
        print_account(checked.ledger, checked.path, job.environment)

        def deliver(result: "Result") -> None:
            reporter.write(result)
            ended(result)

        with reporter.of_failure():
            if check:
                with Bar(hidden=quiet or as_json, what="rows") as bar:
                    reporter.look(fresh, f"dpstream check {checked.name}{job.flags}", bar.update)
            with serving(checked, metrics_port, metrics_host):
                run_checked(
                    checked,
                    runner,
                    beam_args,
                    quiet,
                    as_json,
                    through,
                    fail_if_empty,
                    fresh,
                    deliver,
                    terms,
                )
    if not as_json and operator_report is not None:
        click.echo(f"Operator's report in {operator_report}, not to be published")
    if not as_json and checked.sink.folder is not None:
        click.echo(f"Next: `dpstream report {checked.name}{job.flags}`")


def run_checked(
    checked: "Job",
    runner: str,
    beam_args: Sequence[str] = (),
    quiet: bool = False,
    as_json: bool = False,
    through: str | None = None,
    fail_if_empty: bool = False,
    fresh: bool = False,
    report: Callable[["Result"], None] = lambda _: None,
    terms: "Terms | None" = None,
) -> None:
    """Run a loaded job as `run` does, and print the result.

    Args:
        report: writes the operator's report.
        terms: what to do where expected files are missing.

    Raises:
        RunError: with ``fail_if_empty``, if nothing was released.
    """
    from dpstream.accounting.strength import weaknesses
    from dpstream.pipelines.connectors.registry import input_of
    from dpstream.pipelines.jobs.committed import store_identity
    from dpstream.pipelines.operate.account_view import account_warnings
    from dpstream.pipelines.runners.table import lives_on
    from dpstream.pipelines.stream.completeness import STRICT, came_late, unchecked
    from dpstream.pipelines.stream.run import run_job

    privacy = checked.plan.privacy
    warnings = [*weaknesses(privacy.epsilon, privacy.delta), *account_warnings(checked)]
    if fresh or store_identity(checked) is None:  # what goes on is charged already
        print_warnings(warnings)
    of_files = [*came_late(checked), *(() if through is None else unchecked(checked))]
    print_warnings(of_files)
    warnings += of_files

    def deliver(result: "Result") -> None:
        bar.stop()
        summary, damaged = result.summary, input_of(checked).damaged()
        if as_json:
            _print_json(checked, result, warnings, damaged)
        else:
            _print_result(checked, result)
            print_warnings(damage_text(checked, damaged))
        print_operator(checked, result)
        report(result)
        if summary is not None and summary.released.rows == 0 < summary.released.releases:
            _nothing_released(checked, fail_if_empty, fresh)

    with (
        Bar(hidden=quiet or as_json) as bar,
        stop_signals(checked.source.unbounded or lives_on(runner)) as stop,
    ):
        run_job(
            checked,
            runner,
            beam_args,
            progress=bar.update,
            stop=stop,
            through=through,
            fresh=fresh,
            deliver=deliver,
            terms=terms or STRICT,
        )


def damage_text(checked: "Job", damaged: Mapping[str, str]) -> list[str]:
    """Return which files of a growing folder are damaged, and what to do, as at most one text."""
    names = [f"{name!r} ({reason})" for name, reason in sorted(damaged.items())]
    if not names:
        return []
    more = f", and {len(names) - _LISTED:,} more" if len(names) > _LISTED else ""
    return [
        f"damaged files were not read to their end, and the rest of their rows counts nowhere:"
        f" {', '.join(names[:_LISTED])}{more}. Fix: type `dpstream check {checked.name}`, which"
        " shows from which row on, and write these rows into a new file of the folder."
    ]


def _print_json(
    checked: "Job", result: "Result", warnings: list[str], damaged: dict[str, str]
) -> None:
    """Print the result; --operator adds one object with the exact private counts."""
    from msgspec import to_builtins

    fields, summary = result._asdict(), result.summary
    private = dict(fields.pop("operator_only"))
    fields.pop("rows_by_file")
    fields["summary"] = None
    if summary is not None:
        fields["summary"] = {"released": to_builtins(summary.released)}
        private["records"] = to_builtins(summary.operator_only)
    fields |= {"insecure": checked.insecure, "warnings": warnings, "damaged_files": damaged}
    print_json(with_private(fields, private))


def _print_result(checked: "Job", result: "Result") -> None:
    """Print the result as text."""
    from dpstream.pipelines.connectors.registry import sink_of
    from dpstream.pipelines.render.account import run_lines

    how = "stopped; run it again to go on" if result.stopped else "all triggers done"
    if result.through is not None:
        how = f"released through {result.through}; files may join with a later --through"
    click.echo(f"Run {result.run_id}{' (resumed)' if result.resumed else ''}: {how}.")
    if not result.input_read:
        read = "" if result.read_at is None else f" again after {result.read_at}"
        again = _AGAIN if checked.state.path and checked.sink.folder else ""
        click.echo(f"Answered from the store: the input was not read{read}{again}.")
    if result.missing:
        click.echo(f"Incomplete: released without {', '.join(result.missing)}.")
    if result.summary is not None:
        click.echo(released_text(result.summary.released))
    click.echo(f"Releases in {sink_of(checked).description}")
    privacy = checked.plan.privacy
    per = "unit" if checked.plan.timeline.period is None else "unit and period"
    cost = f"{guarantee_pair(privacy.epsilon, privacy.delta)} per {per}"
    print_charge(run_lines(cost, checked.ledger is not None, result.run_id), checked.insecure)


def released_text(released: "Released") -> str:
    """Return the public figures of a run as one line."""
    empty = f" ({released.empty_windows:,} of them empty)" if released.empty_windows else ""
    text = (
        f"Released {count(released.rows, 'row')} of {count(released.keys, 'key')} in"
        f" {count(released.windows, 'window')}{empty}"
    )
    if released.relative_sd is None or released.median_relative_sd is None:
        return f"{text}."
    middle, largest = _share(released.median_relative_sd), _share(released.relative_sd)
    return f"{text}; relative noise (sd) of final values: median {middle}, largest {largest}."


def _share(part: float) -> str:
    return f"{100 * part:.3g}%" if part < 10 else "over 1,000%"


def _nothing_released(checked: "Job", fail_if_empty: bool, fresh: bool) -> None:
    """Warn that nothing was released.  The reason depends on the records, so only the operator sees
    it (`print_operator`).

    Raises:
        RunError: with ``fail_if_empty``.
    """
    job = checked.name
    why = "no key has enough units in a window, no record is usable, or there is no record"
    fix = (
        f"`dpstream plan {job}` says how many units a key needs, and `dpstream check {job}` counts"
        " unusable records, for the operator"
    )
    if fail_if_empty:
        if fresh:  # the same command again would continue this run
            fix += f"; if you keep the job, type `dpstream run {job}` once before the next --fresh"
        raise RunError("run", f"released nothing: {why}", fix)
    click.echo(f"WARNING: NOTHING WAS RELEASED: {why}. Fix: {fix}.", err=True)


def print_operator(checked: "Job", result: "Result") -> None:
    """Print exact counts, why nothing was released, and what C has cut."""
    from dpstream.pipelines.connectors.write import dead_letter_folder

    counts, records = result.operator_only, None
    if result.summary is not None:
        records = result.summary.operator_only
    amounts = ", ".join(
        f"{_COUNTED.get(name) or name.removeprefix('operator_').replace('_', ' ')} {amount:,}"
        for name, amount in sorted(counts.items())
        if name.startswith("operator_")
    )
    echo_private(f"{amounts or 'this command read no record'}.")
    if counts.get("operator_dead_letters"):
        share = None if records is None else records.dead_share
        of_all = "" if share is None else f", {100 * share:.3g}% of the records"
        folder = dead_letter_folder(checked)
        echo_private(f"unusable records (position and reason{of_all}) are listed in {folder}.")
    if records is not None and records.cause is not None:
        echo_private(f"{records.cause.problem}. Fix: {records.cause.fix}.")
    if not result.resumed:
        print_cut(checked, counts)


def print_cut(checked: "Job", counts: dict[str, int]) -> None:
    """Print the share of the records that C has cut, if it is large."""
    rejected = counts.get("operator_pairs_rejected", 0)
    share = rejected / max(1, rejected + counts.get("operator_pairs_admitted", 0))
    if share < _MUCH:
        return
    timeline, bound = checked.plan.timeline, checked.plan.privacy.contributions
    falls = timeline.period is None and (timeline.end is None or timeline.windows > 1)
    later = ", most of it in later windows" if falls else ""
    echo_private(
        f"contributions = {bound} left {100 * share:.3g}% of the records out"
        f"{later}. `dpstream choose` weighs another one{_PERIOD * falls}."
    )
