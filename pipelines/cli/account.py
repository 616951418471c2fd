"""Commands of a data set's account and secret.

* ``dpstream account``: what runs and questions have charged on a data set, and the limit.
* ``dpstream secret``: makes a secret, or checks whether a job's can be read and fits its store.
"""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dpstream.pipelines.cli.parts import (
    ALLOW_LARGE_DELTA,
    AS_JSON,
    JOB,
    Chosen,
    Commands,
    examples,
    load_job,
    print_figures,
    print_json,
    print_warnings,
    section,
)
from dpstream.pipelines.render.layout import count, labelled, page
from dpstream.state.private_log import keep_beside

if TYPE_CHECKING:
    from dpstream.accounting.fields import FieldType
    from dpstream.accounting.plan.unit import UnitIdentity
    from dpstream.state.ledger.open import AccountPlace


#: `accounting.fields.FieldType`, which help must not load.
TYPES = ("string", "int", "bool", "bytes")
_NAMED = section("named", metavar="[DATA_SET|PATH]")


def _place(named: Chosen) -> "AccountPlace | str":
    """Return the account that the command's argument names.

    Raises:
        UsageError: the argument names no account; or it is a path, and options of the project
            file are given too.
    """
    from dpstream.accounting.errors import UsageError
    from dpstream.pipelines.operate import account_view
    from dpstream.pipelines.project.project import is_name

    # A name of the project file, of its only data set without one; not a file or a URL.
    if named.name is None or (is_name(named.name) and not Path(named.name).is_file()):
        place: AccountPlace | str = account_view.of_data_set(named.load(), named.name)
    elif named.flags:
        fix = "name the data set of the project file"
        raise UsageError(
            "--project, --env, --set", "do not go with the path of a file or account", fix
        )
    else:
        place = account_view.named_by(str(named.name))
    keep_beside(place if isinstance(place, str) else place.path)
    return place


@click.group(cls=Commands, short_help="Make a data set's account, show it, or change its limit.")
def account() -> None:
    """Make a data set's account, show it, change its limit, or recover it.

    All of an account is public.  Name it by a data set of the project file (without a name: the
    only one), by a file that names an account, or by the account's own file or URL.
    """


@account.command(
    epilog=examples(
        "dpstream account create shop.account.db --data-set shop --unit customer --type int"
        " --epsilon 8 --delta 1e-6",
        "dpstream account create spanner://my-project/my-instance/my-account --data-set shop",
        "    --unit customer --type int --epsilon 8 --delta 1e-6",
    )
)
@click.argument("path")
@click.option("--unit", required=True, help="Name of the privacy unit: the column with its ids.")
@click.option(
    "--type",
    "type_",
    type=click.Choice(TYPES),
    default="string",
    show_default=True,
    help="Type of the unit's ids.",
)
@click.option(
    "--epsilon",
    type=float,
    required=True,
    help="The limit's epsilon: the most that all charges together may spend per unit.",
)
@click.option("--delta", type=float, required=True, help="The limit's delta.")
@click.option(
    "--data-set",
    help="Name of the data set.  [default: the data set of the project file here whose account is "
    "PATH, or the file's only data set]",
)
@click.option(
    "--covers",
    metavar="LENGTH",
    help="Length of a period, such as 7d: the limit is per unit and period.  [default: per unit, "
    "over all its records]",
)
@click.option(
    "--time",
    metavar="COLUMN",
    help="With --covers: column of the event times that decide the period of a record.",
)
@click.option(
    "--start",
    metavar="TIME",
    help="With --covers: time at which a period begins, like 2024-01-01T00:00:00Z.  "
    "[default: 1970-01-01T00:00:00Z]",
)
@ALLOW_LARGE_DELTA
@AS_JSON
def create(
    path: str,
    unit: str,
    type_: "FieldType",
    epsilon: float,
    delta: float,
    data_set: str | None,
    covers: str | None,
    time: str | None,
    start: str | None,
    allow_large_delta: bool,
    as_json: bool,
) -> None:
    """Make the account of a data set; nothing is charged.

    Prints the account's id, and the section of the project file that names the account.  The limit
    protects all records of a unit, or with --covers a unit's records of each period; this never
    changes.  For a table whose records have budgets of their own, `dpstream table init` makes the
    account.
    """
    from dpstream.accounting.strength import check_delta, limit_weaknesses
    from dpstream.pipelines.operate import account_view
    from dpstream.pipelines.project.project import check_name
    from dpstream.state.ledger.open import create_account, limit_of, place_below

    check_delta(delta, allow_large_delta, "--delta", "--allow-large-delta")
    limit = limit_of(epsilon, delta)
    if data_set is None:
        data_set = account_view.data_set_of(path)
    check_name("--data-set", data_set)
    print_warnings(limit_weaknesses(limit))
    made = create_account(
        place_below(Path(), path), data_set, _unit_of(unit, type_, covers, time, start), limit
    )
    keep_beside(path)
    if as_json:
        print_json(
            {
                "id": made.id,
                "path": path,
                "data_set": data_set,
                "unit": unit,
                "type": type_,
                "protects": made.unit.description,
                "limit": {"epsilon": limit[0], "delta": limit[1]},
            }
        )
        return
    click.echo(f"Account {made.id} is made. Name it in the project file:\n")
    click.echo(lines(path, data_set, unit, type_, made.id))


def _unit_of(
    name: str, type_: "FieldType", covers: str | None, time: str | None, start: str | None
) -> "UnitIdentity":
    """Return the privacy unit that the flags describe."""
    from dpstream.accounting.errors import UsageError
    from dpstream.accounting.plan.unit import UnitIdentity
    from dpstream.pipelines.project.text import duration_micros, instant_micros

    if covers is None:
        if time is not None or start is not None:
            raise UsageError(
                "--time, --start", "need --covers", "add --covers LENGTH, or omit them"
            )
        return UnitIdentity(name, type_)
    if time is None:
        raise UsageError("--time", "is required by --covers", "name the column of the event times")
    length, _, zone = covers.partition(" in ")
    if zone:
        from dpstream.pipelines.jobs.time_axis import period_of

        return UnitIdentity(name, type_, time, *period_of("--covers", length, zone, start))
    period = duration_micros("--covers", covers)
    if not period:
        raise UsageError("--covers", "must be a positive length", "write e.g. --covers 7d")
    phase = 0 if start is None else instant_micros("--start", start) % period
    return UnitIdentity(name, type_, time, period, phase)


def lines(path: str, data_set: str, unit: str, type_: str, id_: str) -> str:
    """Return the project file's section of a data set with its account."""
    import json

    path, unit = (json.dumps(text, ensure_ascii=False) for text in (path, unit))
    return "\n".join(
        (
            f"[data_set.{data_set}]",
            f'unit = {{ name = {unit}, type = "{type_}" }}',
            f'account = {{ path = {path}, id = "{id_}" }}',
        )
    )


@account.command(
    epilog=examples(
        "dpstream account show",
        "dpstream account show shop",
        "dpstream account show shop.account.db",
        "dpstream account show spanner://my-project/my-instance/my-account",
    )
)
@_NAMED
@AS_JSON
def show(named: Chosen, as_json: bool) -> None:
    """List the entries of an account, what they spent together, and what is left of the limit."""
    from dpstream.pipelines.operate import account_view
    from dpstream.pipelines.render.account import view_text

    figures = account_view.view(_place(named))
    print_figures(as_json, figures, view_text(figures))


@account.command(
    epilog=examples(
        "dpstream account forecast",
        "dpstream account forecast shop --until 2030-01-01 --out forecast.html",
    )
)
@section("named", metavar="[DATA_SET]")
@click.option(
    "--until",
    metavar="DATE",
    help="Last day of the forecast.  [default: five years from now]",
)
@click.option(
    "--out", type=click.Path(path_type=Path), help="Also write a page with a picture, FILE.html."
)
@AS_JSON
def forecast(named: Chosen, until: str | None, out: Path | None, as_json: bool) -> None:
    """Show what the jobs of a data set will have spent by a date, and when the limit ends.

    Each job is assumed to begin again when its time has passed, for as long and with the same
    budget.  Nothing is charged.
    """
    from dpstream.accounting.errors import UsageError
    from dpstream.accounting.limits import MICROS_PER_SECOND
    from dpstream.pipelines.operate import forecast as forecasts
    from dpstream.pipelines.project.text import instant
    from dpstream.pipelines.render import forecast as rendered
    from dpstream.pipelines.render.account import forecast_text
    from dpstream.state.ledger.events import now_micros

    now = now_micros()
    end = forecasts.in_five_years(now)
    if until is not None:
        end = int(instant("--until", until).timestamp()) * MICROS_PER_SECOND
    if end <= now:
        raise UsageError("--until", "lies in the past", "give a later date")
    figures = forecasts.forecast(named.load(), named.name, now, end)
    if out is not None:
        rendered.write(figures, out)
    print_figures(as_json, figures, forecast_text(figures))


@account.command(
    epilog=examples(
        "dpstream account limit shop --epsilon 8 --delta 1e-6",
        "dpstream account limit shop.account.db --epsilon 8 --delta 1e-6",
    )
)
@_NAMED
@click.option(
    "--epsilon",
    type=float,
    required=True,
    help="The limit's epsilon: the most that all charges together may spend per unit.",
)
@click.option("--delta", type=float, required=True, help="The limit's delta.")
@ALLOW_LARGE_DELTA
@AS_JSON
def limit(
    named: Chosen, epsilon: float, delta: float, allow_large_delta: bool, as_json: bool
) -> None:
    """Change the limit of an account; the data steward decides it.

    The change is an entry of the account and changes no charge: a limit below what is spent only
    refuses further charges.
    """
    from dpstream.accounting.figures import exact
    from dpstream.accounting.strength import check_delta, limit_weaknesses
    from dpstream.pipelines.operate import account_view
    from dpstream.state.ledger.open import limit_of

    check_delta(delta, allow_large_delta, "--delta", "--allow-large-delta")
    new = limit_of(epsilon, delta)
    print_warnings(limit_weaknesses(new))
    with contextlib.closing(account_view.opened(_place(named))) as opened:
        old = opened.set_limit(new)
    pairs = {"old": old, "new": new}
    figures = {name: {"epsilon": e, "delta": d} for name, (e, d) in pairs.items()}
    lines = (
        f"{name.capitalize()} limit  epsilon {exact(e)} at delta {exact(d)}"
        for name, (e, d) in pairs.items()
    )
    print_figures(as_json, figures, page(lines))


@account.command(
    "recover",
    epilog=examples("dpstream account recover shop", "dpstream account recover shop.account.db"),
)
@_NAMED
@AS_JSON
def recover_command(named: Chosen, as_json: bool) -> None:
    """Add what was spent since the backup to an account that was restored from it.

    The head file proves what was spent.  A charge whose answer is not in the account is closed:
    that question can be asked again, at a new charge.  Then every command works as before.
    """
    from dpstream.pipelines.operate import account_view
    from dpstream.state.ledger.recovery import recover

    with contextlib.closing(account_view.opened(_place(named), recovering=True)) as ledger:
        done = recover(ledger)
    closed = f"{count(len(done.closed), 'charge')} without an answer; asking again is a new charge"
    lines = [
        *labelled("Added", f"entries: {done.entries}, charges among them: {done.charges}"),
        *labelled("Closed", closed),
    ]
    if not done.entries and not done.closed:
        lines = ["The account has all entries of its head file; nothing was added."]
    print_figures(as_json, done._asdict(), page(lines))


_WHERE = {
    "file": "in a file",
    "env": "in an environment variable",
    "gcp": "in Google Secret Manager",
    "insecure_test_secret": "in the project file: INSECURE, do not publish",
}
_STORE = {
    "new": "there is none yet: a run would begin with this secret",
    "fits": "was begun with it",
}


@click.group(cls=Commands, short_help="Make a data set's secret, or check the one of a job.")
def secret() -> None:
    """Make the secret of a data set, or check the one of a job.

    All noise is computed from the secret: whoever has it can subtract the noise.
    """


@secret.command("new", epilog=examples("dpstream secret new noise.secret"))
@click.argument("file", type=click.Path(path_type=Path))
@AS_JSON
def secret_new(file: Path, as_json: bool) -> None:
    """Write a new random secret that only you can read; never overwrites."""
    from dpstream.pipelines.jobs.secret import new_secret

    new_secret(file)
    text = f"New secret in {file.name} (mode 0600). Keep it secret and back it up."
    print_figures(as_json, {"created": file.name}, text)


@secret.command("check", epilog=examples("dpstream secret check daily"))
@JOB
@AS_JSON
def secret_check(job: Chosen, as_json: bool) -> None:
    """Show whether a job's secret can be read here and whether its store was begun with it.

    The secret is not shown: the fingerprint is a keyed hash that only distinguishes secrets.
    """
    from dpstream.pipelines.jobs.secret import check_secret

    report = check_secret(load_job(job))
    lines = [
        *labelled("Secret", f"found {_WHERE[report['where']]}"),
        *labelled("Store", _STORE[report["store"]]),
        *labelled("Fingerprint", report["fingerprint"]),
    ]
    print_figures(as_json, report, page(lines))
