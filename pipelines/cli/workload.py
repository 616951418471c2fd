"""``dpstream workload``: shows what linear answers would cost, before there is data."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dpstream.accounting.errors import DpstreamError, UsageError
from dpstream.pipelines.cli.parts import (
    ALLOW_LARGE_DELTA,
    AS_JSON,
    COUNT,
    Chosen,
    Commands,
    examples,
    load_job,
    options,
    print_plan,
    section,
)

if TYPE_CHECKING:
    from dpstream.accounting.workloads.workload import Workload
    from dpstream.pipelines.ask.acceptance import Acceptance
    from dpstream.pipelines.jobs.job import Job

WORKLOAD = section("workload", required=True, metavar="WORKLOAD|FILE")
STRATEGY = options(
    click.option(
        "--strategy",
        default="auto",
        show_default=True,
        help="What is measured: auto, optimum, eigen, identity or product.",
    ),
    click.option(
        "--objective",
        default="total",
        show_default=True,
        help="What the strategy minimises: total: the weighted sum of squared errors; worst: "
        "the largest error; relative: each query's error in proportion to its norm.",
    ),
    click.option(
        "--cache",
        type=click.Path(path_type=Path),
        help="Folder of solved strategies.  [default: below the user's cache folder]",
    ),
)


def located(workload: Chosen) -> tuple[Path, str | None]:
    """Return the file of a workload, and the job that its section names.

    Args:
        workload: the name of its section in the project file, or its file.

    Raises:
        UsageError: there is no such section.
    """
    name = workload.name or ""
    if name.endswith((".json", ".npz")):
        return Path(name), None
    project = workload.load()
    _, written = project.workload(name)
    return project.folder / written.file, written.job


#: Default strategy and objective.
_LEFT_ALONE = ("auto", "total")
MECHANISM = click.option(
    "--mechanism",
    type=click.Choice(["auto", "gaussian", "geometric"]),
    default="auto",
    show_default=True,
    help="gaussian: noise for epsilon and delta; geometric: noise for epsilon alone (pure epsilon);"
    " auto: the one with the smaller error.",
)


def check_geometric(strategy: str, objective: str) -> None:
    """Refuse a strategy or objective that geometric noise does not use.

    Raises:
        UsageError: geometric noise has its own strategies, for the total of squared errors.
    """
    if (strategy, objective) != _LEFT_ALONE:
        raise UsageError(
            "--mechanism",
            "geometric has strategies of its own, for the total error",
            "omit --strategy and --objective",
        )


@click.group(
    cls=Commands, short_help="Answer many linear queries together: ranges, tables, curves."
)
def workload() -> None:
    """Many linear answers (ranges, tables, cumulative curves, any matrix) from one estimate.

    [workload.NAME] of the project file names a file and the job whose records are counted.  A
    workload file is JSON: {"domain": [{"name": "age", "edges": [0, 10, 20]}, {"name": "sex",
    "values": ["f", "m"]}], "queries": [{"factors": {"age": "range"}}]}; or NPZ with a matrix W.
    """


@workload.command(
    epilog=examples(
        "dpstream workload plan ages",
        "dpstream workload plan ages.json --epsilon 1 --delta 1e-8",
        "dpstream workload plan ages.json --mu 1 --objective worst --json",
        "dpstream workload plan ages.json --mu 0.5 --contributions 4 --picture errors.svg",
        "dpstream workload plan ages.json --epsilon 1 --mechanism geometric",
    )
)
@WORKLOAD
@STRATEGY
@click.option(
    "--epsilon",
    type=float,
    help="Epsilon of the guarantee for every unit, with --delta.  [default: the budget of the "
    "workload's job]",
)
@click.option("--delta", type=float, help="Delta of the guarantee for every unit.")
@ALLOW_LARGE_DELTA
@click.option("--mu", type=float, help="Or the guarantee as mu of Gaussian differential privacy.")
@click.option(
    "--contributions",
    type=COUNT,
    help="The contribution bound C: the most records of a unit that count.  [default: of the "
    "workload's job, else 1]",
)
@MECHANISM
@click.option(
    "--picture",
    type=click.Path(path_type=Path),
    help="Draw the errors of all queries, with Gaussian noise, into this file.",
)
@click.option(
    "--matrix",
    type=click.Path(path_type=Path),
    help="Draw the strategy for Gaussian noise into this file.",
)
@AS_JSON
def plan(
    workload: Chosen,
    strategy: str,
    objective: str,
    cache: Path | None,
    epsilon: float | None,
    delta: float | None,
    mu: float | None,
    contributions: int | None,
    picture: Path | None,
    matrix: Path | None,
    mechanism: str,
    allow_large_delta: bool,
    as_json: bool,
) -> None:
    """Show how large the errors of a workload's answers will be, and that no strategy has less.

    The budget and C are those of the job that the workload's section names, unless flags give
    others; without them the output also shows whether `dpstream workload answer` would be accepted
    now, and if not, the exit code is that of the refusal.  No data is read.  The strategy is
    stored in the cache, where `dpstream workload answer` finds it.
    """
    from dpstream.accounting.strength import check_delta
    from dpstream.pipelines.render.workload_plan import workload_text
    from dpstream.pipelines.workload.lattice import compared, planned_purely
    from dpstream.pipelines.workload.planning import (
        figures,
        folder_of,
        guarantee_of,
        planned,
        read_workload,
    )

    file, job_name = located(workload)
    query_set, folder, accepted = read_workload(file), folder_of(cache), None
    if job_name is not None:
        job = load_job(workload._replace(name=job_name), workload=True)
        privacy = job.plan.privacy
        if (epsilon, delta, mu, contributions) == (None,) * 4:
            accepted = _accepted(query_set, job, folder, (mechanism, strategy, objective))
        contributions = contributions or privacy.contributions
        if epsilon is None and delta is None and mu is None:
            epsilon, delta = privacy.epsilon, privacy.delta
    contributions = contributions or 1
    drawn = picture is not None or matrix is not None
    if mechanism == "auto" and epsilon is not None and mu is None and not delta:
        mechanism = "geometric"
    elif mechanism == "auto" and (mu is not None or drawn or (strategy, objective) != _LEFT_ALONE):
        mechanism = "gaussian"
    if mechanism == "geometric":
        check_geometric(strategy, objective)
        if epsilon is None or mu is not None or drawn:
            raise UsageError(
                "--mechanism", "geometric takes --epsilon", "omit --mu, --picture and --matrix"
            )
        result = planned_purely(query_set, epsilon, contributions, folder)
    else:
        check_delta(delta or 0.0, allow_large_delta, "--delta", "--allow-large-delta")
        guarantee = guarantee_of(epsilon, delta, mu, contributions)
        solved_plan = planned(query_set, folder, objective, strategy)
        if drawn:
            from dpstream.pipelines.workload.picture import save

            save(solved_plan, guarantee, picture, matrix)
        result = (
            compared(solved_plan, guarantee, folder)
            if mechanism == "auto"
            else figures(solved_plan, guarantee)
        )
    print_plan(as_json, accepted, "Can answer", result, workload_text(result))


def _accepted(
    query_set: "Workload", job: "Job", folder: Path, options: tuple[str, str, str]
) -> "Acceptance":
    """Return whether the job would answer now.

    Args:
        options: mechanism, strategy and objective.
    """
    from dpstream.pipelines.ask.acceptance import Acceptance
    from dpstream.pipelines.workload.execute import requested

    try:
        request = requested(query_set, job, folder, *options)
        return request.acceptance(request.choose())
    except DpstreamError as error:
        return Acceptance(error, None, None, None)
