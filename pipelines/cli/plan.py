"""``dpstream plan``: what a job promises and costs; ``--scale``: what a stated load needs."""

from typing import TYPE_CHECKING, Any

import click

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.cli.parts import (
    AS_JSON,
    COUNT,
    JOB,
    MOST_ASSUMED,
    Chosen,
    examples,
    load_job,
    options,
    print_figures,
    print_json,
)

if TYPE_CHECKING:
    from dpstream.pipelines.jobs.job import Job


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
    covers and what would help.  It reads no record, only the columns of the first file.

    If `dpstream run` would be refused now, the exit code is that of the refusal.

    The line with a star is the best mechanism for the job as it is, on a public reference shape.
    If a run was begun in the job's store, the figures are those that this run committed.
    """
    from dpstream.accounting.budget.allocation import allocate
    from dpstream.accounting.guarantee import describe
    from dpstream.accounting.tuning.outlook import KEYS, coverage, outlook, warnings_of
    from dpstream.pipelines.ask.acceptance import job_acceptance
    from dpstream.pipelines.jobs.charging import unfinished_fresh
    from dpstream.pipelines.jobs.committed import committed, tuned_of
    from dpstream.pipelines.render.account import acceptance_lines
    from dpstream.pipelines.render.job_plan import coverage_lines, details_text, summary_text
    from dpstream.pipelines.render.layout import each, labelled, page
    from dpstream.pipelines.render.scale import shards_lines
    from dpstream.pipelines.scale.scale import shard_figures

    loaded = load_job(job._replace(tries=tries))
    # With --try the plan is not that of the store's run.  With --fresh it is, if an earlier --fresh
    # began that run and did not finish it.
    fresh = bool(tries) or (fresh and unfinished_fresh(loaded) is None)
    records = load.pop("records")
    if scale:
        _scaled(loaded, load, as_json)
        return
    checked, tuned = loaded.plan, tuned_of(loaded)
    state_figures = shard_figures(loaded, changed_keys)
    accepted = job_acceptance(loaded, fresh)
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
        first = acceptance_lines(accepted.as_dict(), warnings=accepted.warnings)
        output = page([*first, *coverage_lines(planned, covered)])
        output += summary_text(planned, budget, tuned, *stated, checked)
        if details:
            output += "\n" + details_text(planned, budget, tuned)
        last = list[str]()
        if begun:
            last = labelled("Figures", f"of run {begun.run_id}, committed when it began")
        last += each("Warning", warnings_of(covered)) + shards_lines(state_figures)
        click.echo(output + page(last), nl=False)
    click.get_current_context().exit(accepted.exit_code)


def _scaled(job: "Job", given: dict[str, object], as_json: bool) -> None:
    """Print the estimate for the options of ``--scale``."""
    import msgspec

    from dpstream.pipelines.project.text import duration_micros
    from dpstream.pipelines.render.scale import scale_text
    from dpstream.pipelines.scale.rates import RATES, measured_rates, with_prices
    from dpstream.pipelines.scale.scale import Load, as_dict, estimate

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
    figures = as_dict(estimate(job, load, rates, prices), load, rates, prices)
    print_figures(as_json, {"scale": figures}, scale_text(figures))


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
