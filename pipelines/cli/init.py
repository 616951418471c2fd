"""``dpstream init``: writes a project file with a first job, from a data file's schema alone."""

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dpstream.pipelines.cli.parts import (
    ACCOUNT,
    AS_JSON,
    COUNT,
    PROJECT,
    examples,
    on_terminal,
    options,
    print_figures,
)
from dpstream.pipelines.render.layout import count, each, labelled, page

if TYPE_CHECKING:
    from dpstream.pipelines.drafting.ask import Person
    from dpstream.pipelines.drafting.draft import Answers, Target

_PATH = click.Path(path_type=Path)
_COLUMNS = options(
    click.option(
        "--unit", metavar="COLUMN", help="Column with the privacy unit: who is protected."
    ),
    click.option("--key", metavar="COLUMN", multiple=True, help="Column to group by; repeatable."),
    click.option("--time", metavar="COLUMN", help="Column with the time of the record."),
    click.option(
        "--value",
        metavar="COLUMN",
        multiple=True,
        help="Publish the mean of this column beside the count; repeatable.",
    ),
    click.option(
        "--bounds",
        type=float,
        nargs=2,
        multiple=True,
        metavar="LOW HIGH",
        help="Public bounds of a --value: the first --bounds of the first --value, and so on.",
    ),
    click.option(
        "--time-format",
        metavar="FORMAT",
        help="How texts of --time are written, as '%d.%m.%Y %H:%M'.  [default: RFC 3339]",
    ),
    click.option(
        "--time-unit",
        type=click.Choice(("s", "ms", "us")),
        help="What numbers of --time count since 1970.",
    ),
    click.option(
        "--zone",
        metavar="ZONE",
        help="Zone of local times, days and months, as Europe/Berlin.  [default: UTC]",
    ),
    click.option(
        "--csv",
        metavar="FIELD=VALUE",
        multiple=True,
        help="How CSV is written: delimiter, decimal, thousands, encoding, skip_rows, names or "
        "line_breaks_in_quotes; repeatable.  [default: delimiter as in the first line]",
    ),
)
_AXIS = options(
    click.option("--start", metavar="DAY", help="First day of the data, in --zone, or a time."),
    click.option("--end", metavar="DAY", help="The day after the last day of the data."),
    click.option(
        "--window",
        metavar="LENGTH",
        help="Length of a window, in which records are counted together: hour, day, week, "
        "month, quarter, year, or like 12h.  [default: from the days between]",
    ),
    click.option(
        "--every",
        metavar="LENGTH",
        help="How often the count of a window is published while it grows.  [default: at its end]",
    ),
)
_BUDGET = options(
    click.option("--epsilon", type=float, help="Epsilon of the guarantee for one unit."),
    click.option(
        "--delta",
        type=float,
        default=1e-8,
        show_default=True,
        help="Delta of the guarantee; far below 1 / number of units.",
    ),
    click.option(
        "--contributions",
        type=COUNT,
        default=10,
        show_default=True,
        help="The contribution bound C: the most records of a unit that count, in what the "
        "budget covers.",
    ),
    click.option(
        "--covers",
        metavar="WHAT",
        help="What epsilon and C cover: window (each separately), lifetime (everything),"
        " or a length of several windows, such as 28d or, of months, 1 year.  [default: window]",
    ),
)


@click.command(
    short_help="Describe a file of records in the project file: first step.",
    epilog=examples(
        "dpstream init visits.parquet",
        "dpstream init visits.csv.gz --unit user --key page --time at --start 2024-01-01",
        "    --end 2025-01-01 --window week --epsilon 1",
        "dpstream init visits.parquet --job hourly --data-set visits --window hour",
        "dpstream init demo.parquet --unit user --key page --time at --epsilon 1 --public-sample",
    ),
)
@click.argument("file")
@_COLUMNS
@_AXIS
@_BUDGET
@click.option("--job", metavar="NAME", help="Name of the job.  [default: the file's name]")
@click.option(
    "--data-set",
    metavar="NAME",
    help="The records' data set: one of the project file, or a new one.  [default: a new "
    "one with the file's name]",
)
@PROJECT
@ACCOUNT
@click.option(
    "--secret",
    type=_PATH,
    metavar="FILE",
    help="The secret of a new data set, from which all noise is computed.  [default: "
    "DATA_SET.secret]",
)
@click.option(
    "--public-sample",
    is_flag=True,
    help="The values of FILE are public: read times and"
    " amounts to propose --start, --end and --bounds.",
)
@AS_JSON
def init(
    project: Path | None,
    job: str | None,
    data_set: str | None,
    account: str | None,
    new_account: bool,
    secret: Path | None,
    as_json: bool,
    public_sample: bool,
    covers: str | None,
    **given: Any,
) -> None:
    """Describe FILE (Parquet, CSV, JSON, Arrow or ORC; or a pattern in quotes), and a job on it,
    in the project file.

    The project file dpstream.toml is made, or extended if it exists.  Only the schema is read:
    the types of Parquet, Arrow and ORC, the first line of CSV, nothing of JSON.  Columns of CSV and
    JSON get types for SQL by their flags: --value a number, --time a time, all others text.  On a
    terminal the command asks for what no flag gives.  An existing secret is used, never
    overwritten.

    A new data set gets an account, in which its jobs are charged.  If there are accounts without
    a data set in this file, in its folder or in its parents up to the repository's root, you
    choose one of them, or make a new one.
    """
    from dpstream.pipelines.drafting import target as drafting
    from dpstream.pipelines.drafting.ask import Given, Person, answers
    from dpstream.pipelines.drafting.columns import is_file
    from dpstream.pipelines.drafting.draft import LIFETIME, checked, project_text
    from dpstream.pipelines.project.project import write_project

    person = Person(not as_json and on_terminal())
    path, before, there = drafting.project_at(project)
    name = drafting.name_of(given["file"])
    job = job or name
    data_set = data_set or drafting.data_set_of(there, given["file"], given["unit"], path.parent)
    drafting.check_job(path, there, job)
    drafting.refuse_no_data_set(there, data_set, person)
    replies = answers(Given(public_sample=public_sample, **given), person)
    choice = drafting.Choice(job, name, data_set, account, new_account, secret)
    target = drafting.target_of(path, before, there, replies, choice, person)
    notes = list[str]()
    if replies.windows.number > 1:
        replies, notes = _covered(replies, target, covers, person)
    drafted = checked(project_text(replies, target), target)
    target, secret_made = drafting.made(target, drafted)
    write_project(path, project_text(replies, target), before.encode())
    own = target.new_data_set
    private = () if own is None else (own.secret, f"{own.account}*")
    drafting.keep_out_of_git(path.parent, *private, *drafting.store_names(job), "dead_letter")
    words = ("dpstream", "check", job, *(() if project is None else ("--project", str(project))))
    notes += [_FIRST_ONLY] * (not is_file(given["file"]))
    notes += [replies.windows.note] * bool(replies.windows.note)
    notes += [_NO_SCHEMA] * (replies.file.columns is None)
    figures = {
        "project": os.path.relpath(path),
        "job": job,
        "table": target.table,
        "data_set": target.data_set,
        "account": own and own.as_dict(),
        "secret": own and own.secret,
        "secret_made": secret_made,
        "values_read": public_sample,
        "covers": replies.period or LIFETIME,
        "notes": notes,
        "next": shlex.join(words),
    }
    lines = [
        *_written_lines(target, replies, secret_made, public_sample),
        *each("Note", notes),
        *labelled("Next", shlex.join(words)),
    ]
    print_figures(as_json, figures, page(lines))


def _written_lines(
    target: "Target", replies: "Answers", secret_made: bool, public_sample: bool
) -> list[str]:
    """Return what was written and made as text."""
    sections = ", ".join(f"[{section}]" for section in target.sections)
    lines = labelled("Project", f"{os.path.relpath(target.path)}: {sections}")
    own = target.new_data_set
    if own is not None:
        lines += labelled("Account", f"{own.account}, id {own.id}, limit: {own.limit_text}")
        lines += labelled("Secret", f"{own.secret} ({_SECRET[secret_made]})")
    read = "values were read, as public" if public_sample else "its schema, and no values"
    windows = replies.windows
    span = f"of {windows.length} from {windows.start} to {windows.end}"
    return [*lines, *labelled("Read", read), *labelled("Windows", span)]


_NO_SCHEMA = (
    "JSON has no schema: whether objects have columns of these names shows only in the next"
    " command. A run with a misspelled name is charged, and releases nothing."
)
_FIRST_ONLY = "Of the files of the pattern only the first was looked at."
_DEFAULT = (
    "Without --covers the budget covers each window separately. With --covers lifetime, {bound} of"
    " a unit would count in all {windows:,} windows together."
)
_USED_UP = (
    "The budget covers all {windows:,} windows together: after {bound} a unit no longer"
    " contributes. --covers window gives each window its own budget; the guarantee then holds for"
    " each window of a unit."
)
_SECRET = {True: "new, mode 0600: keep it and back it up", False: "the one that was there"}


def _covered(
    replies: "Answers", target: "Target", covers: str | None, person: "Person"
) -> tuple["Answers", list[str]]:
    """Return the answers with what the budget covers, and notes on it."""
    from dpstream.pipelines.drafting.draft import WINDOW, with_covers

    covered = person.answer(
        "--covers",
        covers,
        "What epsilon and contributions cover (window, lifetime, or like 28d)",
        WINDOW,
        lambda text: with_covers(replies, target, text),
    )
    figures = {"windows": replies.windows.number, "bound": count(replies.contributions, "record")}
    notes = [_DEFAULT.format(**figures)] if covers is None and not person.at_terminal else []
    if covered.period is None:
        notes.append(_USED_UP.format(**figures))
    return covered, notes
