"""``dpstream workload answer``: answers a workload from records, or from a release."""

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dpstream.accounting.errors import UsageError, refuse_first
from dpstream.accounting.figures import guarantee_pair
from dpstream.pipelines.ask.question import Asking
from dpstream.pipelines.cli.parts import (
    AS_JSON,
    AS_OF,
    FRESH,
    QUIET,
    Bar,
    Chosen,
    beam_flags,
    examples,
    load_job,
    print_account,
    print_charge,
    print_json,
    print_plan,
    print_warnings,
)
from dpstream.pipelines.cli.plan import POPULATION
from dpstream.pipelines.cli.private_counts import OPERATOR, echo_private
from dpstream.pipelines.cli.workload import (
    MECHANISM,
    STRATEGY,
    WORKLOAD,
    check_geometric,
    located,
)
from dpstream.pipelines.render.layout import count, page

if TYPE_CHECKING:
    from dpstream.accounting.strategies.cells.strategy import CellStrategy
    from dpstream.accounting.workloads.workload import Workload
    from dpstream.pipelines.jobs.job import Job
    from dpstream.pipelines.workload.execute import Choice, Done, Order, Request
    from dpstream.pipelines.workload.registered import Answered
    from dpstream.pipelines.workload.release import Receipt

_PATH = click.Path(path_type=Path)


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    epilog=examples(
        "dpstream workload answer ages --out answers",
        "dpstream workload answer ages.json --job people --out hours --over-time",
        "dpstream workload answer ages --over-time --dry-run",
        "dpstream workload answer other.json --from answers --out other.csv",
    ),
)
@WORKLOAD
@click.option(
    "--job",
    "job_name",
    metavar="NAME",
    help="The job whose records count.  [default: that of the workload, or the only one]",
)
@click.option("--from", "release", type=_PATH, help="Folder of a release to answer from; free.")
@click.option(
    "--out",
    type=_PATH,
    help="New folder; with --from a .csv, .parquet or .arrow file."
    "  [default with --from: CSV on stdout]",
)
@click.option(
    "--over-time",
    is_flag=True,
    help="Answer at every trigger time, not only at its end.",
)
@click.option(
    "--nonnegative",
    is_flag=True,
    help="Fit nearest cell values that are not negative.",
)
@click.option("--covariance", type=_PATH, help="With --from: write the covariance (.npy).")
@MECHANISM
@click.option(
    "--optimise",
    type=click.Choice(["limit", "answer"]),
    default="limit",
    show_default=True,
    help="How auto compares the mechanisms: limit: at an equal share of what is left of "
    "the account's limit; answer: for this answer alone.",
)
@click.option(
    "--tables",
    is_flag=True,
    help="Measure residual tables once, without a histogram of all cells.  [default where "
    "there are too many cells]",
)
@STRATEGY
@click.option(
    "--format",
    "form",
    type=click.Choice(["parquet", "csv"]),
    help="Format of the answers.  [default: that of OUT, else parquet]",
)
@click.option("--runner", default="DirectRunner", show_default=True, help="Beam runner.")
@POPULATION
@FRESH
@AS_OF
@click.option(
    "--dry-run",
    is_flag=True,
    help="Only show whether it would be answered now, and the cost; charges nothing.",
)
@QUIET
@OPERATOR
@AS_JSON
@click.pass_context
def answer(
    ctx: click.Context,
    /,
    workload: Chosen,
    job_name: str | None,
    release: Path | None,
    out: Path | None,
    over_time: bool,
    nonnegative: bool,
    covariance: Path | None,
    strategy: str,
    objective: str,
    cache: Path | None,
    form: str | None,
    runner: str,
    quiet: bool,
    as_json: bool,
    mechanism: str,
    optimise: str,
    tables: bool,
    fresh: bool,
    as_of: str,
    dry_run: bool,
    units: int | None,
    records: int | None,
) -> None:
    """Answer a workload from the records of a job, or --from a release, at no charge.

    The workload is a section [workload.NAME] of the project file, or a file.  The key columns of
    its job are the workload's attributes; the job defines what is counted, the unit, the budget
    and the account.  A record outside the domain is a dead letter.  OUT gets the answers with
    exact standard errors, and the estimate from which any other workload over the same domain is
    answered.  Other flags pass through to Beam.

    If the answer would be refused now, --dry-run ends with the exit code of that refusal.
    """
    from dpstream.pipelines.workload.planning import read_workload

    how, beam_args = Asking(fresh, as_of), beam_flags(ctx, runner)
    _check_given(job_name, release, out, covariance, over_time, how, dry_run)
    file, own_job = located(workload)
    query_set = read_workload(file)
    if release is not None:
        _from(query_set, release, out, nonnegative, covariance, as_json)
        return
    from dpstream.pipelines.workload.execute import Choice, Order, by_choice, requested
    from dpstream.pipelines.workload.planning import folder_of

    loaded = load_job(workload._replace(name=job_name or own_job), workload=True)
    place = None if out is None else out.absolute()
    stored = over_time or runner != "DirectRunner" or bool(beam_args)

    def order_of(measured: "CellStrategy") -> Order:
        written = place or Path(), over_time, form, nonnegative
        return Order(query_set, loaded, measured, *written, runner, beam_args, fresh)

    options = mechanism, strategy, objective, tables, stored, order_of
    request = requested(query_set, loaded, folder_of(cache), *options)
    if request.mechanism == "geometric":
        check_geometric(strategy, objective)
    if not dry_run:
        print_account(loaded.ledger, loaded.path, workload.environment)

    def ask(choice: Choice) -> None:
        if dry_run:
            print_warnings(_weak(loaded, choice.family == "geometric"))
        order = request.run(choice)
        if order is None and stored:
            raise _drawn_once(over_time, loaded.plan.privacy.delta)
        if order is not None and how.as_of:
            raise UsageError("--as-of", "is for answers that no store keeps", "omit it")
        covered, lines = _covered(order, units, records)
        if dry_run:
            accepted = request.acceptance(choice, how, place)
            figures = {} if order is None else {"coverage": covered}
            print_plan(as_json, accepted, "Can answer", figures, page(lines))
        elif order is not None:
            _through_store(order, lines, quiet, as_json)
        else:
            _answer_once(request, choice, place or Path(), form, nonnegative, how, as_json)

    by_choice(lambda: request.choose(optimise), ask)


def _weak(job: "Job", geometric: bool) -> list[str]:
    """Return warnings about what the answer promises."""
    from dpstream.accounting.strength import weaknesses

    privacy = job.plan.privacy
    return weaknesses(privacy.epsilon, 0.0 if geometric else privacy.delta)


def _warn(job: "Job", receipt: "Receipt") -> None:
    """Print warnings about what an answer that was charged and the account promise."""
    from dpstream.accounting.strength import weaknesses
    from dpstream.pipelines.operate.account_view import account_warnings

    print_warnings([*weaknesses(receipt.epsilon, receipt.delta), *account_warnings(job)])


def _check_given(
    job: str | None,
    release: Path | None,
    out: Path | None,
    covariance: Path | None,
    over_time: bool,
    how: Asking,
    dry_run: bool,
) -> None:
    """Refuse options of a job with --from, and options of a release without it.

    Raises:
        UsageError: an option is missing or has no meaning.
    """
    free = release is not None
    of_job, no_charge = "is for a job", "a release is answered from at no charge"
    refuse_first(
        (
            free and job is not None,
            UsageError("--job", "excludes --from RELEASE", "give one of the two"),
        ),
        (
            not free and out is None and not dry_run,
            UsageError("--out", "is required", "name a new folder"),
        ),
        (
            not free and covariance is not None,
            UsageError("--covariance", "is for --from", "ask it of the release"),
        ),
        (free and over_time, UsageError("--over-time", of_job, "a release has its own triggers")),
        (free and how.fresh, UsageError("--fresh", of_job, no_charge)),
        (free and bool(how.as_of), UsageError("--as-of", of_job, no_charge)),
        (free and dry_run, UsageError("--dry-run", of_job, no_charge)),
    )


def _drawn_once(over_time: bool, delta: float) -> UsageError:
    other = "measure all cells with --strategy product" if delta else "write budget.delta = 1e-9"
    return UsageError(
        "--over-time" if over_time else "--runner",
        "requires a store, but this answer's noise is drawn once, in this process",
        f"omit it and flags of Beam, or {other}",
    )


def _through_store(order: "Order", lines: Sequence[str], quiet: bool, as_json: bool) -> None:
    """Answer by a run with a store.

    Args:
        lines: what the budget covers over time.
    """
    from dpstream.pipelines.render.account import run_lines
    from dpstream.pipelines.workload.execute import execute

    if not as_json:
        click.echo("".join(f"{line}\n" for line in lines), nl=False)

    def show(done: "Done") -> None:
        bar.stop()
        resumed, receipt = {"resumed": done.result.resumed}, done.receipt
        if not done.result.resumed:
            _warn(order.job, receipt)
        paid = run_lines(_cost(receipt), order.job.ledger is not None, receipt.run_id)
        echo_answer(receipt, order.workload, order.out, resumed, paid, as_json)

    with Bar(hidden=quiet or as_json) as bar:
        execute(order, bar.update, show)


def _covered(
    order: "Order | None", units: int | None, records: int | None
) -> tuple[dict[str, Any] | None, list[str]]:
    """Return what the budget covers over time, as in `dpstream plan`."""
    if order is None or not order.over_time:
        return None, []
    from dpstream.accounting.budget.allocation import allocate
    from dpstream.accounting.tuning.outlook import coverage, warnings_of
    from dpstream.pipelines.render.job_plan import coverage_lines
    from dpstream.pipelines.render.layout import each
    from dpstream.pipelines.workload.execute import job_of

    plan = job_of(order).plan
    covered = coverage(plan, allocate(plan), units, records, order.workload.cells)
    return covered, [*coverage_lines(plan, covered), *each("Warning", warnings_of(covered))]


def _answer_once(
    request: "Request",
    choice: "Choice",
    out: Path,
    form: str | None,
    nonnegative: bool,
    how: Asking,
    as_json: bool,
) -> None:
    """Answer once, with charge and answer in the account."""
    from dpstream.pipelines.render.account import charge_lines
    from dpstream.pipelines.workload.registered import answer_once

    workload, drawn = request.workload, request.drawn(choice.family)

    def show(done: "Answered") -> None:
        if done.dead_letters:
            echo_private(f"{count(done.dead_letters, 'refused record')}.")
        if done.charged:
            _warn(request.job, done.receipt)
        paid = charge_lines(_cost(done.receipt), done.charged, done.receipt.run_id)
        echo_answer(done.receipt, workload, out, {"charged": done.charged}, paid, as_json)

    options = out, form, nonnegative, how, choice.accept, show
    answer_once(workload, request.job, drawn, *options)


def _cost(receipt: "Receipt") -> str:
    return f"{guarantee_pair(receipt.epsilon, receipt.delta)} per unit"


def echo_answer(
    receipt: "Receipt",
    workload: "Workload",
    out: Path,
    state: dict[str, bool],
    paid: list[str],
    as_json: bool,
) -> None:
    """Print a summary of the release, and what it was charged.

    Args:
        state: ``resumed`` of a run with a store, ``charged`` of an answer in the account.
        paid: the cost as text.
    """
    from dpstream.accounting.strength import weaknesses

    answers = len(receipt.moments) * workload.queries
    written = any(name.startswith("answers.") for name in receipt.files)
    if as_json:
        print_json(
            {
                "out": out.name,
                "run_id": receipt.run_id,
                **state,
                "strategy": receipt.strategy,
                "mechanism": receipt.mechanism,
                "releases": len(receipt.moments),
                "answers": answers if written else 0,
                "epsilon": receipt.epsilon,
                "delta": receipt.delta,
                "mu": receipt.mu,
                "insecure": receipt.insecure,
                "warnings": weaknesses(receipt.epsilon, receipt.delta),
            }
        )
        return
    what = count(workload.queries, "answer") if written else "The estimate"
    click.echo(
        f"{what} at {len(receipt.moments):,} release(s) in {os.path.relpath(out)};"
        f" strategy {receipt.strategy}, {receipt.mechanism} noise, run {receipt.run_id}"
    )
    if not written:
        click.echo(
            f"No table was written: {answers:,} answers are too many for one. Ask for parts at no"
            f" charge: `dpstream workload answer PART.json --from {os.path.relpath(out)}`"
        )
    print_charge(paid, receipt.insecure)


def _from(
    workload: "Workload",
    folder: Path,
    out: Path | None,
    nonnegative: bool,
    covariance: Path | None,
    as_json: bool,
) -> None:
    """Answer from a release: post-processing of public data."""
    import numpy as np

    from dpstream.pipelines.workload.planning import MAX_ANSWERS
    from dpstream.pipelines.workload.release import (
        answers,
        check_domain,
        read_release,
        write_csv,
        write_table,
    )
    from dpstream.state.durable import replacing

    receipt, estimate = read_release(folder)
    check_domain(receipt, workload)
    several = len(receipt.moments) > 1
    table = answers(workload, estimate, receipt.moments, several, nonnegative)
    if table is None:
        raise UsageError(
            "queries", f"one table has at most {MAX_ANSWERS:,} answers", "ask a smaller workload"
        )
    if covariance is not None:
        if covariance.suffix != ".npy" or several:
            raise UsageError("--covariance", "is an .npy file, of one release", "name such a file")
        with replacing(covariance) as draft, open(draft, "wb") as file:
            rows = workload.aligned_rows
            np.save(file, estimate.covariance(workload.aligned)[np.ix_(rows, rows)])
    if out is not None:
        write_table(out, table)
    if as_json:
        print_json({"answers": table.num_rows, "run_id": receipt.run_id, "charged": False})
    elif out is None:
        text = io.BytesIO()
        write_csv(table, text)
        click.echo(text.getvalue(), nl=False)
    else:
        click.echo(f"{count(table.num_rows, 'answer')} in {out}; nothing was charged")
