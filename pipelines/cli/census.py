"""``dpstream census``: makes census tables from a statistical office's own files."""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import click

from dpstream.accounting.figures import guarantee_pair
from dpstream.pipelines.ask.question import Asking
from dpstream.pipelines.cli.parts import (
    ALLOW_LARGE_DELTA,
    AS_JSON,
    AS_OF,
    FRESH,
    RUNNER,
    TRY,
    Chosen,
    Commands,
    examples,
    print_account,
    print_charge,
    print_figures,
    print_json,
    print_plan,
    runner_of,
    section,
)
from dpstream.pipelines.cli.private_counts import OPERATOR, echo_private
from dpstream.pipelines.render.layout import count, page

if TYPE_CHECKING:
    from dpstream.dp_transforms.noise.secret_source import SecretSource
    from dpstream.pipelines.tabulation.config import Choice
    from dpstream.pipelines.tabulation.execute import Execution
    from dpstream.state.ledger.open import AccountPlace

_FOLDER = click.Path(path_type=Path)
CENSUS = section("census")
#: Exit code of files with faults, as of every unusable input.
_FAULTY = 2


class Described(NamedTuple):
    """A section ``[census.NAME]``: its files, the choice of tables, the secret and the account."""

    name: str
    parameters: Path
    data: Path
    choice: "Choice"
    secret: "SecretSource | None"
    account: "AccountPlace | None"
    project: Path


def described(census: Chosen) -> Described:
    """Return the section that a command names, with its paths resolved.

    Raises:
        UsageError: there is no such section, its data set has no privacy unit, or a part of it
            cannot be used.
    """
    from dpstream.accounting.tabulation.parameters import UNITS
    from dpstream.pipelines.project.project import account_of, secret_of, unit_of
    from dpstream.pipelines.tabulation.config import Choice

    project = census.load()
    name, written = project.census(census.name)
    choice = Choice(written.program, written.noise, written.estimates)
    secret, account = None, None
    if written.data_set is not None or project.sections.data_set:
        field = f"census.{name}.data_set"
        data_set, section = project.data_set(written.data_set, field)
        unit_of(project, data_set, "census tables", UNITS[written.program])
        source = secret_of(project, data_set)
        secret = source if source.given else None
        if section.account is not None:
            account = account_of(project, data_set)
    folder = project.folder
    return Described(
        name,
        folder / written.parameters,
        folder / written.data,
        choice,
        secret,
        account,
        project.path,
    )


@click.group(cls=Commands, short_help="Make census tables of detailed groups by region.")
def census() -> None:
    """Census tables: adaptive detail for groups of people by region, race and ethnicity.

    [census.NAME] of the project file names a folder of parameters with config.json and the lists of
    iterations and codes, and one of data with GRF-C.txt and person-records.txt, or
    household-records.txt and pop-group-totals.txt.
    """


@census.command(
    epilog=examples(
        "dpstream census plan",
        "dpstream census plan persons --try census.persons.noise=rounded --json",
        "dpstream census plan persons --out tables",
        "dpstream census plan households --faults",
    )
)
@CENSUS
@TRY
@click.option(
    "--faults",
    is_flag=True,
    help="List every fault of the public files instead; exit code 2 if there is one.",
)
@click.option("--out", type=_FOLDER, help="The folder that `execute` would make.")
@click.option("--delta", type=float, help="The delta at which epsilon is stated.  [default: 1e-10]")
@ALLOW_LARGE_DELTA
@FRESH
@AS_OF
@AS_JSON
def plan(
    census: Chosen,
    tries: tuple[str, ...],
    faults: bool,
    out: Path | None,
    delta: float | None,
    fresh: bool,
    as_of: str,
    allow_large_delta: bool,
    as_json: bool,
) -> None:
    """Show what the tables would cost, and the exact 95% margin of every kind of figure.

    Only public files are read; the records may be absent.  With --out or an account the output
    also shows whether `execute` would be accepted now; if not, the exit code is that of the
    refusal.

    With --faults each fault is listed with its file, row, column, rule and fix, without values.  Of
    the records only the header is read: faults of records are reported only to the operator, in the
    dead letters of an execution.
    """
    from dpstream.accounting.strength import check_delta
    from dpstream.pipelines.render.census_plan import census_text
    from dpstream.pipelines.tabulation.inputs import figures
    from dpstream.pipelines.tabulation.inputs import plan as planned

    check_delta(delta or 0.0, allow_large_delta, "--delta", "--allow-large-delta")
    tables = described(census._replace(tries=tries))
    if faults:
        _list_faults(tables, as_json)
    table_plan = planned(tables.parameters, tables.data, tables.choice)
    report = figures(table_plan, delta)
    accepted = None
    if (tables.account is not None or out is not None) and not tries:
        from dpstream.pipelines.tabulation.execute import acceptance
        from dpstream.pipelines.tabulation.inputs import inputs_of

        accepted = acceptance(
            inputs_of(tables.parameters, tables.data, tables.choice, tables.project.parent),
            table_plan.plan,
            tables.secret,
            tables.account,
            Asking(fresh, as_of),
            None if out is None else out.absolute(),
        )
    print_plan(as_json, accepted, "Can make", report, census_text(report))


def _list_faults(tables: Described, as_json: bool) -> NoReturn:
    from dpstream.pipelines.tabulation.inputs import faults

    problems = faults(tables.parameters, tables.data, tables.choice)
    files = sorted({fault.file for fault in problems})
    summary = f"Faults: {len(problems):,} in {', '.join(files)}" if problems else "No fault."
    text = page([*map(str, problems), summary])
    print_figures(as_json, {"faults": [fault._asdict() for fault in problems]}, text)
    click.get_current_context().exit(_FAULTY if problems else 0)


@census.command(
    epilog=examples(
        "dpstream census execute",
        "dpstream census execute persons --out tables",
        "dpstream census execute persons --out tables --runner FlinkRunner --parallelism 4",
    )
)
@CENSUS
@click.option("--out", type=_FOLDER, help="The folder to make.  [default: tables/NAME]")
@FRESH
@AS_OF
@click.option("--strict", is_flag=True, help="Refuse a file if one of its records breaks a rule.")
@click.option(
    "--dead-letter",
    type=_FOLDER,
    help="Folder for the position and rule of refused records.  [default: dead_letter/ "
    "beside --out]",
)
@RUNNER
@OPERATOR
@AS_JSON
def execute(
    census: Chosen,
    out: Path | None,
    strict: bool,
    dead_letter: Path | None,
    fresh: bool,
    as_of: str,
    runner: str | None,
    parallelism: int,
    beam_flag: tuple[str, ...],
    as_json: bool,
) -> None:
    """Make the tables in a new folder.

    The charge is committed before the first record is parsed.  The folder appears complete or not
    at all.  An execution that was interrupted continues under its run id at no charge; one that
    was answered is restored from the account's files, whatever the records are by then.
    """
    from dpstream.accounting.strength import weaknesses
    from dpstream.accounting.tabulation.plan import NO_GUARANTEE
    from dpstream.dp_transforms.noise.secret_source import SecretSource
    from dpstream.pipelines.render.account import charge_lines
    from dpstream.pipelines.tabulation.execute import Order
    from dpstream.pipelines.tabulation.execute import execute as run
    from dpstream.pipelines.tabulation.inputs import inputs_of

    tables = described(census)
    rule = f"is required: all noise of [census.{tables.name}] comes from it"
    secret = (tables.secret or SecretSource()).required("secret", rule)
    order = Order(
        inputs_of(tables.parameters, tables.data, tables.choice, tables.project.parent),
        (out or Path("tables") / tables.name).absolute(),
        secret,
        tables.account,
        runner_of(runner, parallelism, beam_flag),
        Asking(fresh, as_of),
        strict,
        dead_letter,
        tables.name,
    )
    print_account(tables.account, tables.project, census.environment)

    def show(done: "Execution") -> None:
        manifest = done.manifest
        cost = {name: getattr(manifest, name) for name in ("epsilon", "delta", "mu", "rho")}
        warnings = (
            [NO_GUARANTEE]
            if manifest.epsilon is None
            else weaknesses(manifest.epsilon, manifest.delta)
        )
        fields = {
            "out": order.out.name,
            "run_id": manifest.run_id,
            "charged": done.charged,
            "drawn": done.drawn,
            "insecure": manifest.insecure,
            **cost,
        }
        if as_json:
            print_json({**fields, "files": len(manifest.files), "warnings": warnings})
            return
        click.echo(
            f"{count(len(manifest.files), 'file')} in {out or Path('tables') / tables.name}; "
            f"run {manifest.run_id}"
        )
        lines = list[str]()
        if manifest.epsilon is not None:
            guarantee = f"{guarantee_pair(manifest.epsilon, manifest.delta)} of every record"
            charged = None if tables.account is None else done.charged
            lines = charge_lines(guarantee, charged, manifest.run_id)
        print_charge(lines, manifest.insecure, warnings if done.charged or done.drawn else ())
        if order.letters is not None and order.letters.exists():
            echo_private(f"unusable records (position and rule) are listed in {order.letters}.")

    run(order, show)
