"""``dpstream tabulate``: census tables from an office's own files."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dpstream.accounting.figures import up
from dpstream.pipelines.ask.question import Asking
from dpstream.pipelines.cli.parts import (
    ALLOW_LARGE_DELTA,
    AS_JSON,
    AS_OF,
    COUNT,
    FRESH,
    examples,
    options,
    print_json,
    print_warnings,
    runner_of,
)
from dpstream.pipelines.cli.private_counts import OPERATOR, echo_private

if TYPE_CHECKING:
    from dpstream.dp_transforms.noise.key_source import KeySource
    from dpstream.pipelines.tabulation.config import Choice
    from dpstream.state.ledger.open import AccountPlace

_FOLDER = click.Path(path_type=Path)
PARAMETERS = click.argument("parameters", type=_FOLDER)
DATA = click.argument("data", type=_FOLDER)
PROGRAM = click.option(
    "--program",
    type=click.Choice(["p", "h"]),
    default="p",
    show_default=True,
    help="p: persons (t1, t2); h: households (t3, t4).",
)
CHOICE = options(
    PROGRAM,
    click.option(
        "--noise",
        type=click.Choice(["census", "rounded"]),
        default="census",
        show_default=True,
        help="census: discrete Gaussian (zcdp) or geometric (puredp), as published; rounded:"
        " rounded Gaussian (zcdp), which costs less.",
    ),
    click.option(
        "--estimates",
        type=click.Choice(["census", "combined"]),
        default="census",
        show_default=True,
        help="combined: totals from both steps by least squares.",
    ),
)
CHARGED = options(
    click.option("--key-file", type=_FOLDER, help="The noise key, of `dpstream key new`."),
    click.option("--key", metavar="REFERENCE", help="Or where it is: env:NAME or gcp:NAME."),
    click.option("--ledger", help="File or URL of the account that is charged."),
    click.option("--data-set", help="--ledger: whose records these are; another for households."),
    click.option("--account-id", help="--ledger: its id, as `dpstream account create` prints it."),
    click.option("--limit-epsilon", type=float, hidden=True),
    click.option("--limit-delta", type=float, hidden=True),
    FRESH,
    AS_OF,
)
#: Exit code of files with faults, as of every unusable input.
_FAULTY = 2


@click.group()
def tabulate() -> None:
    """Census tables: adaptive detail for groups of people by region, race and ethnicity.

    PARAMETERS is a folder with config.json and the lists of iterations and codes; DATA is one with
    GRF-C.txt and person-records.txt, or household-records.txt and pop-group-totals.txt.
    """


def choice_of(program: str, noise: str, estimates: str) -> "Choice":
    """What is asked for beside the files."""
    from dpstream.pipelines.tabulation.config import Choice

    return Choice(program, noise, estimates)  # type: ignore[arg-type]


@tabulate.command(
    epilog=examples(
        "dpstream tabulate validate parameters data",
        "dpstream tabulate validate parameters data --program h --json",
    )
)
@PARAMETERS
@DATA
@CHOICE
@AS_JSON
def validate(parameters: Path, data: Path, as_json: bool, **choice: str) -> None:
    """List every fault of the public files; exit code 2 if there is one.

    A fault has its file, row, column, rule and fix, and shows no value.  Of the records only the
    header is looked at: what is wrong with a record is told to nobody but the operator, by the dead
    letters of an execution.
    """
    from dpstream.pipelines.tabulation.public_plan import faults

    problems = faults(parameters, data, choice_of(**choice))
    if as_json:
        print_json({"faults": [fault.as_dict() for fault in problems]})
    else:
        for fault in problems:
            click.echo(str(fault))
        files = sorted({fault.file for fault in problems})
        summary = f"Faults: {len(problems):,} in {', '.join(files)}"
        click.echo(summary if problems else "No fault.")
    if problems:
        click.get_current_context().exit(_FAULTY)


@tabulate.command(
    epilog=examples(
        "dpstream tabulate plan parameters data",
        "dpstream tabulate plan parameters data --noise rounded --estimates combined --json",
        "dpstream tabulate plan parameters data --scale 331000000",
        "dpstream tabulate plan parameters data out --key-file noise.key --ledger ledger.db",
        "    --data-set persons --account-id 7f3a0c5d9e1b2846",
    )
)
@PARAMETERS
@DATA
@click.argument("out", type=_FOLDER, required=False)
@CHOICE
@click.option("--delta", type=float, help="That epsilon is stated for.  [default: 1e-10]")
@ALLOW_LARGE_DELTA
@CHARGED
@click.option("--scale", type=COUNT, metavar="RECORDS", help="What so many records would need.")
@AS_JSON
def plan(
    parameters: Path,
    data: Path,
    out: Path | None,
    delta: float | None,
    scale: int | None,
    allow_large_delta: bool,
    as_json: bool,
    program: str,
    noise: str,
    estimates: str,
    **given: Any,
) -> None:
    """Say what the tables would cost, and the exact 95% margin of every kind of figure.

    Only public files are read; the records need not be there.  With OUT or a --ledger it says
    whether `execute` would be accepted now, and ends with the exit code of the refusal if not.
    """
    from dpstream.accounting.strength import check_delta
    from dpstream.pipelines.tabulation.public_plan import figures, words
    from dpstream.pipelines.tabulation.public_plan import plan as planned

    check_delta(delta or 0.0, allow_large_delta, "--delta", "--allow-large-delta")
    ledger, choice = _ledger(given), choice_of(program, noise, estimates)
    table_plan = planned(parameters, data, choice)
    report = figures(table_plan, delta, scale)
    accepted = None
    if ledger is not None or out is not None:
        from dpstream.pipelines.tabulation.execute import acceptance
        from dpstream.pipelines.tabulation.inputs import inputs_of

        place = None if out is None else out.absolute()
        referred = given["key_file"] is not None or given["key"] is not None
        key = _key(given["key_file"], given["key"]) if referred else None
        inputs = inputs_of(parameters, data, choice)
        accepted = acceptance(
            inputs,
            table_plan.prepared.plan,
            key,
            ledger,
            Asking(given["fresh"], given["as_of"]),
            place,
        )
        report["acceptance"] = accepted.as_dict()
    if as_json:
        more = () if accepted is None else accepted.warnings
        print_json(report | {"warnings": [*report["warnings"], *more]})
    else:
        first = [] if accepted is None else accepted.lines("Can make")
        click.echo("\n".join([*first, words(report)]), nl=False)
    click.get_current_context().exit(0 if accepted is None else accepted.exit_code)


@tabulate.command(
    epilog=examples(
        "dpstream tabulate execute parameters data out --key-file noise.key --ledger ledger.db",
        "    --data-set persons --account-id 7f3a0c5d9e1b2846",
        "dpstream tabulate execute parameters data out --key-file noise.key --noise rounded",
        "    --estimates combined --runner FlinkRunner --parallelism 4",
    )
)
@PARAMETERS
@DATA
@click.argument("out", type=_FOLDER)
@CHOICE
@CHARGED
@click.option("--strict", is_flag=True, help="Refuse a file with a record that breaks a rule.")
@click.option(
    "--dead-letter",
    type=_FOLDER,
    help="Folder of refused records: position and rule.  [default: dead_letter/ beside OUT]",
)
@click.option("--runner", help="Beam runner whose workers do it; default: this process.")
@click.option("--parallelism", type=click.IntRange(1, 4096), default=1, help="Of its workers.")
@click.option("--beam-flag", multiple=True, help="Of the runner, as --beam-flag=--NAME=VALUE.")
@OPERATOR
@AS_JSON
def execute(
    parameters: Path,
    data: Path,
    out: Path,
    strict: bool,
    dead_letter: Path | None,
    fresh: bool,
    as_of: str,
    runner: str | None,
    parallelism: int,
    beam_flag: tuple[str, ...],
    as_json: bool,
    **given: Any,
) -> None:
    """Make the tables of DATA in the new folder OUT.

    The charge comes before the first record is parsed, and OUT appears whole or not at all.  An
    execution that was cut off goes on under its run id at no charge; one that was answered is
    restored from the account's files, whatever the records are by then.
    """
    from dpstream.accounting.strength import weaknesses
    from dpstream.accounting.tabulation.describe import NO_GUARANTEE
    from dpstream.pipelines.tabulation.execute import Order
    from dpstream.pipelines.tabulation.execute import execute as run
    from dpstream.pipelines.tabulation.inputs import inputs_of

    choice = choice_of(given["program"], given["noise"], given["estimates"])
    key, ledger = _key(given["key_file"], given["key"]), _ledger(given)
    order = Order(
        inputs_of(parameters, data, choice),
        out.absolute(),
        key,
        ledger,
        runner_of(runner, parallelism, beam_flag),
        Asking(fresh, as_of),
        strict,
        dead_letter,
    )
    if ledger is None:
        click.echo("Warning: no --ledger: nobody keeps account of what these records pay", err=True)
    done = run(order)
    manifest = done.manifest
    cost = {name: getattr(manifest, name) for name in ("epsilon", "delta", "mu", "rho")}
    warnings = [NO_GUARANTEE]
    if manifest.epsilon is not None:
        warnings = weaknesses(manifest.epsilon, manifest.delta)
    print_warnings(warnings)
    fields = {
        "out": out.name,
        "run_id": manifest.run_id,
        "charged": done.charged,
        "drawn": done.drawn,
        "insecure": manifest.insecure,
        **cost,
    }
    if as_json:
        print_json({**fields, "files": len(manifest.files), "warnings": warnings})
        return
    click.echo(f"{len(manifest.files):,} files in {out.name}; run {manifest.run_id}")
    if manifest.epsilon is not None:
        guarantee = f"({up(manifest.epsilon)}, {up(manifest.delta)}) of every record"
        verb = "Charged" if done.charged else "Charged before" if ledger else "Costs"
        click.echo(f"{verb} {guarantee}", err=True)
    if order.letters is not None and order.letters.exists():
        echo_private(f"unusable records (position and rule) are listed in {order.letters}.")
    if manifest.insecure:
        click.echo("INSECURE: a fixed test key was used; do not publish.", err=True)


def _key(file: Path | None, reference: str | None) -> "KeySource":
    """Where the noise key is.

    Raises:
        UsageError: nowhere, or in two places.
    """
    from dpstream.accounting.errors import UsageError
    from dpstream.dp_transforms.noise.key_source import KeySource

    if (file is None) == (reference is None):
        rule = "is required" if file is None else "is given twice"
        raise UsageError("--key-file", rule, "give one; make it with `dpstream key new FILE`")
    return KeySource(reference if file is None else f"file:{file.absolute()}")


def _ledger(given: dict[str, Any]) -> "AccountPlace | None":
    """The account to charge.

    Raises:
        UsageError: a part of it is missing, or a limit is given.
    """
    from dpstream.accounting.errors import UsageError

    if given["limit_epsilon"] is not None or given["limit_delta"] is not None:
        raise UsageError(
            "--limit-epsilon",
            "and --limit-delta are not options: the account has the limit",
            "set it with `dpstream account limit PATH --epsilon E --delta D`",
        )
    names = ("ledger", "data_set", "account_id")
    missing = [name for name in names if given[name] is None]
    if len(missing) == len(names):
        return None
    if missing:
        field = "--" + missing[0].replace("_", "-")
        raise UsageError(field, "is required with an account", "give all three of its options")
    from dpstream.state.ledger.open import AccountPlace, check_names, place_below

    check_names(given["data_set"], given["account_id"])
    place = place_below(Path.cwd(), given["ledger"])
    return AccountPlace(place, given["data_set"], given["account_id"])


@tabulate.command(
    epilog=examples(
        "dpstream tabulate report parameters data report --run out",
        "dpstream tabulate report parameters data report --run first --run second --json",
    )
)
@PARAMETERS
@DATA
@click.argument("out", type=_FOLDER)
@CHOICE
@click.option(
    "--run",
    "runs",
    type=_FOLDER,
    multiple=True,
    required=True,
    help="Output of an execution of these files; several for the report on many runs.",
)
@AS_JSON
def report(
    parameters: Path, data: Path, out: Path, runs: tuple[Path, ...], as_json: bool, **choice: str
) -> None:
    """Hold published tables against the truth: NOT private, for public or invented data.

    Writes error_report.csv, multi_run_error_report.csv and report.html to the folder OUT, which
    only its owner can read.
    """
    from dpstream.pipelines.tabulation.report import report as write

    figures = write(parameters, data, choice_of(**choice), runs, out)
    if as_json:
        print_json(figures)
        return
    click.echo(figures["stamp"], err=True)
    click.echo(f"Reports on {len(runs)} runs in {out.name}: open report.html")


@tabulate.command(
    epilog=examples(
        "dpstream tabulate generate parameters data",
        "dpstream tabulate generate parameters data --size production --persons 1000000",
        "dpstream tabulate generate parameters data --states 01,02,72 --tracts 60 --places 30",
    )
)
@PARAMETERS
@DATA
@click.option(
    "--size",
    type=click.Choice(["small", "production"]),
    default="small",
    show_default=True,
    help="Of the lists of iterations and codes, and of everything not said.",
)
@click.option("--persons", type=int, help="Records of persons; households are two for five.")
@click.option("--states", help="FIPS codes with commas; 72 is Puerto Rico.")
@click.option("--tracts", type=int, help="Over all states, of 40 blocks each.")
@click.option("--places", type=int, help="Over all states.")
@click.option("--aiannh", type=int, help="Over all states but Puerto Rico.")
@click.option("--seed", type=int, help="Same seed, same files.")
@click.option("--overwrite", is_flag=True, help="Replace existing files.")
@AS_JSON
def generate(
    parameters: Path,
    data: Path,
    size: str,
    states: str | None,
    overwrite: bool,
    as_json: bool,
    **numbers: Any,
) -> None:
    """Write a complete set of invented files, of nobody, in the format of production.

    --size production writes as many iterations and codes as the tables of 2020 had, by default
    with a million persons in three states.
    """
    from dpstream.pipelines.tabulation.generate import PRODUCTION, Size
    from dpstream.pipelines.tabulation.generate import generate as write

    sizes = PRODUCTION if size == "production" else Size()
    given = {name: value for name, value in numbers.items() if value is not None}
    sizes = sizes._replace(**given)
    if states is not None:
        sizes = sizes._replace(states=tuple(states.split(",")))
    rows = write(parameters, data, sizes, overwrite)
    if as_json:
        print_json({"rows": rows})
        return
    for name, count in rows.items():
        click.echo(f"{count:>13,}  {name}")
