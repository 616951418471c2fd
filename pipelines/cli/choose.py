"""``dpstream choose``: chooses C and bounds from the stream's first hours, or from other data."""

from typing import TYPE_CHECKING, Any

import click

from dpstream.pipelines.cli.parts import (
    AS_JSON,
    AS_OF,
    COUNT,
    FRESH,
    JOB,
    Chosen,
    examples,
    print_account,
    print_charge,
    print_json,
    print_plan,
    print_warnings,
)

if TYPE_CHECKING:
    from dpstream.pipelines.tuning.choose import Outcome


@click.command(
    short_help="Choose a job's contributions and missing bounds from the data.",
    epilog=examples(
        "dpstream choose daily --first 2h --epsilon 0.5 --dry-run",
        "dpstream choose daily --first 2h --epsilon 0.5 --as chosen",
        "dpstream choose daily --first 1d --epsilon 1 --cover 0.95 --bounds --as chosen",
        "dpstream choose daily --proxy 'last-year/*.parquet' --proxy-start 2012-01-01T00:00:00Z",
        "    --as chosen",
    ),
)
@JOB
@click.option("--as", "new", metavar="NAME", help="Name of the new job in the project file.")
@click.option(
    "--first",
    help="Read only records whose time and stamp lie in this first part of the stream, e.g. 2h.",
)
@click.option("--epsilon", type=float, help="Epsilon of the choice, charged in the account.")
@click.option("--delta", type=float, help="Delta of the choice.  [default: the job's]")
@click.option(
    "--key-records",
    type=COUNT,
    help="Choose the C with the least error, noise and cut together, for a key with this "
    "number of records.  [default: 1000]",
)
@click.option(
    "--quantile", type=float, help="Choose instead this quantile of the records per unit as C."
)
@click.option(
    "--cover", type=float, help="Choose instead a C that keeps this share of all records."
)
@click.option(
    "--max-contributions", default=1000, show_default=True, help="The largest C to choose."
)
@click.option(
    "--scale",
    type=float,
    help="Public factor from the first hours to the horizon.  [default: ratio of their times]",
)
@click.option("--bounds", is_flag=True, help="Choose all bounds, not only the missing ones.")
@click.option(
    "--tail", default=0.05, show_default=True, help="Share of values to leave outside each bound."
)
@click.option(
    "--values-per-unit",
    default=1,
    show_default=True,
    help="The most values of a unit that count (m); the noise grows with it.",
)
@click.option(
    "--proxy",
    help="Choose from other data (file or glob), without noise or charge; the job is marked.",
)
@click.option("--proxy-start", help="First instant of the proxy data.  [default: the job's]")
@FRESH
@AS_OF
@click.option(
    "--dry-run",
    is_flag=True,
    help="Only show whether it would be answered now, cost and accuracy; charges nothing.",
)
@AS_JSON
def choose(job: Chosen, new: str | None, dry_run: bool, as_json: bool, **figures: Any) -> None:
    """Choose contributions and missing bounds by a charged private mechanism.

    They are written as a new job, [job.NAME], at the end of the project file.

    Without --proxy the answer is a release: it costs --epsilon in the data set's account, and is
    charged before anything is drawn.  The same question gets the same figures at no further
    charge, whatever the files hold by then; every other question costs again.

    If the question would be refused now, --dry-run ends with that refusal's exit code.
    """
    import msgspec

    from dpstream.accounting.errors import UsageError
    from dpstream.accounting.tuning.answer import KEY_RECORDS
    from dpstream.pipelines.operate.account_view import account_warnings
    from dpstream.pipelines.project.project import free_name
    from dpstream.pipelines.render.tuning import choice_text, outcome_text
    from dpstream.pipelines.tuning.ask import Request, ask
    from dpstream.pipelines.tuning.choose import acceptance
    from dpstream.pipelines.tuning.choose import choose as run

    required = {"--as": new is None and not dry_run}
    if figures["proxy"] is None:
        required |= {name: figures[name[2:]] is None for name in ("--first", "--epsilon")}
    project = job.load()
    name, _ = project.job_as_written(job.name)
    if missing := [option for option, absent in required.items() if absent]:
        example = f"dpstream choose {name} --first 2h --epsilon 0.5 --as chosen{job.flags}"
        fix = f"type e.g. `{example}`; --proxy needs neither --first nor --epsilon"
        raise UsageError(", ".join(missing), "must be given", fix)
    free = free_name(f"{name[:50]}_chosen", project.sections.job)
    question = ask(Request(project=project, job=name, new=new or free, **figures))
    public = question.describe()
    if dry_run:
        accepted = acceptance(question)
        if not question.private and accepted.refusal is None and not as_json:
            click.echo(choice_text(public), nl=False)
            return
        print_plan(as_json, accepted, "Can choose", public, choice_text(public))
    if question.private:
        print_account(question.job.ledger, project.path, job.environment)
    if not as_json:
        click.echo(choice_text(public), nl=False)
    warnings = account_warnings(question.job)

    def show(outcome: "Outcome") -> None:
        print_warnings(warnings if outcome.charged else ())
        figures = msgspec.to_builtins(outcome._asdict())
        if as_json:
            print_json({**figures, "asked": public, "warnings": warnings})
            return
        click.echo(outcome_text(figures, question.question.key_records or KEY_RECORDS), nl=False)
        print_charge([], outcome.insecure)

    run(question, show)
