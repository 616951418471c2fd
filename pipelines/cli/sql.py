"""``dpstream sql``: private answers to statements, and what they would cost."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dpstream.accounting.errors import UsageError, refuse_first, required
from dpstream.pipelines.ask.question import ONCE, Asking
from dpstream.pipelines.cli.parts import (
    AS_JSON,
    AS_OF,
    DATA_SET,
    FRESH,
    RUNNER,
    Chosen,
    examples,
    on_terminal,
    print_account,
    print_charge,
    print_figures,
    print_json,
    runner_of,
)
from dpstream.pipelines.cli.private_counts import OPERATOR

if TYPE_CHECKING:
    from collections.abc import Callable

    from dpstream.pipelines.door.route import Door, Explanation
    from dpstream.pipelines.runners.bounded import Runner
    from dpstream.pipelines.sql.receipt import SqlAnswer
    from dpstream.pipelines.tables.catalog import Catalog
    from dpstream.state.ledger.open import AccountPlace


@click.command(
    short_help="Ask the tables of a data set in SQL.",
    epilog=examples(
        'dpstream sql "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 1, delta = 1e-9,',
        "    max_groups_contributed = 4) page, COUNT(DISTINCT uid) AS visitors",
        '    FROM visits GROUP BY page"',
        "dpstream sql --explain -f queries.sql",
        "dpstream sql --data-set shop -f queries.sql --json",
        "dpstream sql -f queries.sql --runner=FlinkRunner --parallelism=4",
        "dpstream sql                                      # a prompt",
        "dpstream sql --check                              # unit_via: before anybody asks",
        'dpstream sql --stream daily "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 1,',
        "    delta = 1e-9, max_rows_contributed = 32) page, COUNT(*) AS views, SUM(seconds,",
        "    contribution_bounds_per_row => (0, 60)) AS seconds FROM visits WHERE seconds > 1",
        '    GROUP BY page" --emit by-page',
    ),
)
@click.argument("statement", required=False)
@DATA_SET
@click.option(
    "-f",
    "--file",
    type=click.Path(path_type=Path),
    help="File with statements, each ended by a semicolon.",
)
@click.option(
    "--explain",
    is_flag=True,
    help="Show whether the answer would be given now, cost, noise and thresholds; charges nothing.",
)
@click.option(
    "--check",
    is_flag=True,
    help="Check that the keys of unit_via name one row each; for the owner of the data, "
    "before the first statement.",
)
@FRESH
@AS_OF
@RUNNER
@click.option(
    "--stream",
    metavar="JOB",
    help="Answer the statement at every trigger time of this job, which has no key, "
    "aggregates, C, filters and look-ups: the statement adds them.",
)
@click.option(
    "--emit",
    metavar="NAME",
    help="With --stream: write the whole job into the project file, under this name, "
    "instead of running it.",
)
@click.option(
    "--analyst",
    default="analyst",
    show_default=True,
    metavar="NAME",
    help="Who asks a table whose records have budgets of their own: whose quota is charged, and "
    "whose allotments pay.",
)
@OPERATOR
@AS_JSON
def sql(
    statement: str | None,
    data_set: Chosen,
    file: Path | None,
    explain: bool,
    check: bool,
    fresh: bool,
    as_of: str,
    runner: str | None,
    parallelism: int,
    beam_flag: tuple[str, ...],
    stream: str | None,
    emit: str | None,
    analyst: str,
    as_json: bool,
) -> None:
    """Ask the tables of a data set in SQL.

    A statement is charged in the account before a row is read, and its answer is committed before
    it is shown.  The same statement gets the same bytes, with their date, at no further charge,
    whatever the rows are by then: --as-of names a state of the data, --fresh asks again at a new
    charge.

    If the question would be refused now, --explain ends with that refusal's exit code.
    """
    from dpstream.pipelines.door.route import Door
    from dpstream.pipelines.sql.load import catalog_of

    where, how = runner_of(runner, parallelism, beam_flag), Asking(fresh, as_of)
    text_given = statement is not None or file is not None
    refuse_first(
        (
            stream is not None and (explain or check or how != ONCE),
            UsageError(
                "--stream",
                "takes no --explain, --check, --fresh and --as-of",
                "write the job with --emit NAME, and ask `dpstream plan NAME`",
            ),
        ),
        (
            emit is not None and stream is None,
            UsageError("--emit", "is for --stream", "add that, or leave it out"),
        ),
        (
            check and text_given,
            UsageError("--check", "takes no statement", "ask them one by one"),
        ),
    )
    if stream is not None:
        text = _text_of(statement, file, f"dpstream sql --stream {stream}")
        _stream(data_set._replace(name=stream), text, emit, where, as_json)
        return
    project = data_set.load()
    if check:
        _check(catalog_of(project, data_set.name), as_json)
        return

    def tell(place: "AccountPlace") -> None:
        print_account(place, project.path, data_set.environment)

    with Door(project, data_set.name, analyst, where) as door:
        if not text_given and on_terminal():
            _prompt(door, explain, how, tell)
            return
        text = _text_of(statement, file, "dpstream sql")
        code = _answer(door, text, explain, how, as_json, tell)
    click.get_current_context().exit(code)


def _text_of(statement: str | None, file: Path | None, command: str) -> str:
    """Return the statement that is typed, or the statements of a file.

    Raises:
        UsageError: there is neither, or both.
    """

    if statement is not None and file is not None:
        raise UsageError("statement", "is typed and read from a file", "leave out one of them")
    if statement is None and file is None:
        fix = f'type `{command} "SELECT ..."`, or `{command} -f FILE` (-f - reads stdin)'
        raise UsageError("statement", "is missing", fix)
    return statement if statement is not None else _read(required(file, "a file is named"))


def _read(path: Path) -> str:
    from dpstream.state.disk_errors import unreadable

    if path == Path("-") and sys.stdin is None:
        raise UsageError("--file", "is stdin, which is closed", "name a file")
    try:
        with click.open_file(str(path), encoding="utf-8-sig") as file:
            return str(file.read(1 << 22))
    except OSError as error:
        raise unreadable("--file", error) from None
    except UnicodeDecodeError:
        raise UsageError("--file", "is not UTF-8", "save the statement as UTF-8") from None


def _answer(
    door: "Door",
    text: str,
    explain: bool,
    how: Asking,
    as_json: bool,
    tell: "Callable[[AccountPlace], object]",
) -> int:
    """Answer, or explain, the statements of a text; return the exit code.

    Args:
        tell: prints which account is charged.
    """
    from dpstream.pipelines.door.route import Explanation
    from dpstream.pipelines.render.question_plan import lacking_lines
    from dpstream.pipelines.sql.explain import split
    from dpstream.state.ledger.orders import SessionRefusedError

    statements = split(text)
    if not statements:
        raise UsageError("statement", "is empty", "write SELECT WITH DIFFERENTIAL_PRIVACY ...")
    routes = [door.route(one, explain) for one in statements]
    if len(statements) > 1:  # a mistake in the second is told before the first is charged
        for route in routes:
            door.check(route)
    places = (door.account(route) for route in routes if not route.explains)
    for place in dict.fromkeys(place for place in places if place is not None):
        tell(place)
    codes = list[int]()

    def show(answer: "SqlAnswer | Explanation") -> None:
        if isinstance(answer, Explanation):
            print_figures(as_json, answer.figures, answer.text)
            codes.append(answer.exit_code)
        else:
            _show(door, answer, as_json)

    try:
        door.answer_each(statements, how, show, explain)
    except SessionRefusedError as error:
        for line in () if as_json else lacking_lines(error.figures):
            click.echo(f"  {line}", err=True)
        raise
    return max(codes) if all(route.explains for route in routes) else 0


def _show(door: "Door", answer: "SqlAnswer", as_json: bool) -> None:
    """Print an answer and what it was charged."""
    import msgspec

    from dpstream.pipelines.render.account import charge_lines
    from dpstream.pipelines.render.answer import cut_lines, weak_lines
    from dpstream.pipelines.sql.receipt import answer_text, records

    head, unit = answer.header, ""
    warnings, notes = door.remarks(answer)
    if as_json:
        public = msgspec.to_builtins(head)
        fields = {
            "charged": answer.charged,
            "receipt": answer.digest,
            "insecure": answer.insecure,
            "warnings": warnings,
            "notes": notes,
            "intervals_cover": "noise",
        }
        print_json({**public, **fields, "rows": records(answer)})
        return
    click.echo(answer_text(answer), nl=False)
    if head.run_id and not head.points:
        unit = door.catalog.unit.name
        if not answer.table.num_rows:
            click.echo("Nothing was published: no group passed the threshold (see --explain).")
    cut = head.cuts, head.not_estimated, unit, "group", bool(answer.intervals)
    for line in (*weak_lines(answer.weak), *notes, *(cut_lines(*cut) if unit else ())):
        click.echo(line)
    for name in head.nulls:
        click.echo(f"{name} is NULL: too few units to choose its bounds by", err=True)
    if not head.run_id:
        return
    paid = charge_lines(head.paid, answer.charged, head.run_id, head.answered)
    print_charge(paid, answer.insecure, warnings if answer.charged is not False else ())


def _check(catalog: "Catalog", as_json: bool) -> None:
    """Print whether declared keys are unique; for the data's owner only, never for an analyst."""
    from dpstream.pipelines.tables.registration import register

    tables, keys = register(catalog)
    if as_json:
        print_json({"tables": tables, "unique_keys": keys})
        return
    for table in tables:
        owner = table["rows_of"]
        if "unit_column" in owner:
            owner = f"rows of the unit in {owner['unit_column']}"
        elif "on" in owner:
            on = ", ".join(f"{mine} = {key}" for mine, key in owner["on"])
            owner = f"rows of the unit of {owner['unit_via']} ({on})"
        click.echo(f"{table['table']:<20} {table['kind']:<10} {owner}")
    for name, columns in keys:
        click.echo(f"Unique: {name} ({', '.join(columns)})")


#: What ends the prompt, as Ctrl-D does.
_LEAVE = ("exit", "quit", "\\q")


def _prompt(
    door: "Door", explain: bool, how: Asking, tell: "Callable[[AccountPlace], object]"
) -> None:
    """Read statements, each ended by a semicolon; an error does not end the prompt."""
    from dpstream.accounting.errors import DpstreamError
    from dpstream.state.ledger.open import AccountPlace

    places = set[AccountPlace]()

    def once(place: AccountPlace) -> None:
        if place not in places:
            tell(place)
        places.add(place)

    click.echo("Statements end with ;  EXPLAIN before one shows its cost.  Ctrl-D ends.")
    text = ""
    while True:
        try:
            line = click.prompt(
                "...>" if text else "sql>", prompt_suffix=" ", default="", show_default=False
            )
        except click.Abort:
            click.echo()
            return
        if not text and line.strip(" ;").lower() in _LEAVE:
            return
        text += line + "\n"
        if not line.rstrip().endswith(";"):
            text = text if text.strip() else ""
            continue
        try:
            _answer(door, text, explain, how, False, once)
        except DpstreamError as error:
            click.echo(f"{error.kind}: {error}", err=True)
        text = ""


def _stream(
    job: Chosen, text: str, emit: str | None, where: "Runner | None", as_json: bool
) -> None:
    """Run, or write, the job that a section and a statement make together.

    Args:
        job: a job without key, aggregates and C.
        text: one statement; a semicolon may end it.
        emit: the name under which the job is written instead of running it.
        where: the job's runner; ``None``: the DirectRunner.
    """
    from dpstream.pipelines.cli.run import run_checked
    from dpstream.pipelines.sql.explain import split
    from dpstream.pipelines.sql.stream import stream_job, write_job
    from dpstream.pipelines.statements.errors import refusal

    statements = split(text)
    if len(statements) != 1:
        raise refusal("one-statement")
    project = job.load()
    compiled = stream_job(project, job.name, statements[0])
    if emit is None:
        print_account(compiled.job.ledger, project.path, job.environment)
        name, flags = ("DirectRunner", []) if where is None else (where.name, where.beam_args)
        run_checked(compiled.job, name, flags, quiet=as_json, as_json=as_json)
        return
    place = write_job(project, compiled, emit)
    click.echo(f"[job.{emit}] is in {project.path.name}: `dpstream run {emit}{job.flags}` runs it")
    click.echo(f"Releases: {place}")
