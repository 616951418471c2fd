"""``dpstream plan``: what a job promises and costs."""

import click

from dpstream.pipelines.cli.parts import (
    AS_JSON,
    COUNT,
    JOB,
    TRY,
    Chosen,
    examples,
    load_job,
    options,
    print_plan,
)

POPULATION = options(
    click.option(
        "--units",
        type=COUNT,
        help="Number of units with records in a window, to estimate what appears.",
    ),
    click.option(
        "--records",
        type=COUNT,
        help="Number of the units' records in a window, to estimate what C cuts.",
    ),
)

_ZONES = (
    "calendar and the table's time_column have different zones: local times are of the column's,"
    " and windows are days of the calendar's."
)


@click.command(
    short_help="Show whether a job can run, what it publishes and what it costs.",
    epilog=examples(
        "dpstream plan daily",
        "dpstream plan daily --units 5000 --records 40000",
        "dpstream plan daily --details",
        "dpstream plan daily --try job.daily.contributions=20",
        "dpstream plan daily --json",
    ),
)
@JOB
@TRY
@click.option(
    "--changed-keys",
    type=COUNT,
    help="Number of keys with new data at one trigger time, for the number of shards on Spanner.",
)
@POPULATION
@click.option("--keys", type=COUNT, help="Number of keys in a window.  [default: 1000]")
@click.option(
    "--fresh", is_flag=True, help="Plan for `dpstream run --fresh`: a new run at a new charge."
)
@click.option("--details", is_flag=True, help="Also show all figures of the mechanism, in tables.")
@AS_JSON
def plan(
    job: Chosen,
    tries: tuple[str, ...],
    changed_keys: int | None,
    fresh: bool,
    details: bool,
    as_json: bool,
    units: int | None,
    records: int | None,
    keys: int | None,
) -> None:
    """Show whether a job can run, whether anything will appear, how exact it is, what the budget
    covers and what would help.  It reads no record, only the columns of the first file.

    If `dpstream run` would be refused now, the exit code is that of the refusal.

    "Helps most" is the best mechanism for the same figures, on a public reference shape.  If a run
    was begun in the job's store, the figures are those that this run committed.
    """
    from dpstream.accounting.budget.allocation import allocate
    from dpstream.accounting.guarantee import describe
    from dpstream.accounting.tuning.outlook import KEYS, coverage, outlook, warnings_of
    from dpstream.pipelines.ask.acceptance import job_acceptance
    from dpstream.pipelines.jobs.charging import unfinished_fresh
    from dpstream.pipelines.jobs.committed import committed, tuned_of
    from dpstream.pipelines.jobs.shards import shard_figures
    from dpstream.pipelines.render.job_plan import (
        coverage_lines,
        details_text,
        shards_lines,
        summary_text,
    )
    from dpstream.pipelines.render.layout import each, labelled, page
    from dpstream.pipelines.stream.completeness import came_late

    loaded = load_job(job._replace(tries=tries))
    # With --try the plan is not that of the store's run.  With --fresh it is, if an earlier --fresh
    # began that run and did not finish it.
    fresh = bool(tries) or (fresh and unfinished_fresh(loaded) is None)
    checked, tuned = loaded.plan, tuned_of(loaded)
    state_figures = shard_figures(loaded, changed_keys)
    accepted = job_acceptance(loaded, fresh)
    begun = None if fresh else committed(loaded)
    planned, budget = begun[1:] if begun else (checked, allocate(checked))
    covered = coverage(planned, budget, units, records, keys or KEYS)
    figures = describe(planned, budget, tuned)
    declared = (loaded.reading.time, loaded.plan.timeline.calendar)
    zones = {each.zone for each in declared if each is not None and each.zone is not None}
    warnings = [*warnings_of(covered), *[_ZONES] * (len(zones) > 1), *came_late(loaded)]
    figures["warnings"] += warnings
    figures |= {"plan_hash": checked.hash, "run_id": begun.run_id if begun else None}
    figures |= {"state": state_figures} if state_figures else {}
    figures |= {"coverage": covered, "outlook": outlook(planned, budget, units, keys, checked)}
    text = page(coverage_lines(planned, covered))
    text += summary_text(planned, budget, tuned, units, keys, checked)
    if details:
        text += "\n" + details_text(planned, budget, tuned)
    last = list[str]()
    if begun:
        last = labelled("Figures", f"of run {begun.run_id}, committed when it began")
    last += each("Warning", warnings) + shards_lines(state_figures)
    print_plan(as_json, accepted, "Can run", figures, text + page(last))
