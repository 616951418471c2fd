"""``dpstream init``: a first job file for a data file, from its schema alone."""

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dpstream.pipelines.cli.parts import (
    ACCOUNT,
    AS_JSON,
    COUNT,
    examples,
    options,
    person_of,
    print_json,
)

if TYPE_CHECKING:
    from dpstream.pipelines.drafting.ask import Person
    from dpstream.pipelines.drafting.covering import Population
    from dpstream.pipelines.drafting.draft import Answers

_PATH = click.Path(path_type=Path)
_COLUMNS = options(
    click.option("--unit", metavar="COLUMN", help="Whose record it is: what is protected."),
    click.option("--key", metavar="COLUMN", multiple=True, help="What is grouped by; repeatable."),
    click.option("--time", metavar="COLUMN", help="When it happened."),
    click.option("--value", metavar="COLUMN", multiple=True,
                 help="Publish its mean beside the count; repeatable."),
    click.option("--clamp", type=float, nargs=2, multiple=True, metavar="LOW HIGH",
                 help="Public bounds of the --value in the same place."),
    click.option("--micros", is_flag=True, help="Whole numbers of --time are microseconds."),
)  # fmt: skip
_AXIS = options(
    click.option("--start", metavar="DAY", help="First day of the data, UTC, or a time."),
    click.option("--end", metavar="DAY", help="The day after the last one."),
    click.option("--window", metavar="LENGTH",
                 help="What is counted together: hour, day, week, month (4 weeks, or the calendar's"
                 " if --start and --end are one), quarter, year, or like 12h.  [default: by the"
                 " days between]"),
    click.option("--every", metavar="LENGTH",
                 help="How often a window is published while it grows.  [default: at its end]"),
)  # fmt: skip
_BUDGET = options(
    click.option("--epsilon", type=float, help="The guarantee for one unit."),
    click.option("--delta", type=float, default=1e-8, show_default=True,
                 help="Far below 1 / number of units."),
    click.option("--contributions", type=COUNT, default=10, show_default=True,
                 help="C: the most records of a unit that count, in what the budget covers."),
    click.option("--covers", metavar="WHAT",
                 help="What epsilon and C cover: window (each separately), lifetime (everything),"
                 " or a length of several windows, such as 28d.  [default: window]"),
    click.option("--units", type=COUNT, default=10_000, show_default=True,
                 help="Assumed number of units with records in a window, for the figures."),
    click.option("--records", type=COUNT, default=30_000, show_default=True,
                 help="Assumed number of their records in a window."),
    click.option("--keys", type=COUNT, default=1_000, show_default=True,
                 help="Assumed number of keys."),
)  # fmt: skip


@click.command(
    epilog=examples(
        "dpstream init visits.parquet",
        "dpstream init visits.csv.gz --unit user --key page --time at --start 2024-01-01",
        "    --end 2025-01-01 --window week --epsilon 1",
        "dpstream init demo.parquet --unit user --key page --time at --epsilon 1 --public-sample",
    )
)
@click.argument("file")
@_COLUMNS
@_AXIS
@_BUDGET
@click.option("--out", type=_PATH, default="job.toml", show_default=True, help="The job file.")
@ACCOUNT
@click.option("--key-file", type=_PATH, help="The noise key.  [default: noise.key beside the job]")
@click.option("--replace", is_flag=True, help="Write over an existing job file.")
@click.option("--public-sample", is_flag=True, help="The values of FILE are public: read times and"
              " amounts to propose --start, --end and --clamp.")  # fmt: skip
@AS_JSON
def init(
    out: Path, account: str | None, new_account: bool, key_file: Path | None, replace: bool,
    as_json: bool, public_sample: bool,
    covers: str | None, units: int, records: int, keys: int, **given: Any,
) -> None:  # fmt: skip
    """Write a job file for FILE (Parquet, CSV or JSON Lines; or a pattern in quotes), and a key.

    Only the schema is read: types of Parquet, the first line of CSV, nothing of JSON Lines.  What
    no flag says is asked for on a terminal.  An existing key is used, never written over.

    The job is charged in an account.  Where accounts are there, in the job's folder or in its
    parents up to the repository's root, one of them is chosen, or a new one is made.
    """
    from dpstream.pipelines.drafting.account import account_of, chosen_account, named_by
    from dpstream.pipelines.drafting.ask import Given, answers
    from dpstream.pipelines.drafting.columns import is_file
    from dpstream.pipelines.drafting.covering import LIFETIME, Population
    from dpstream.pipelines.drafting.draft import checked, data_set_of, job_text, limit_of
    from dpstream.pipelines.drafting.place import check_place, keep_out_of_git, store_names, write

    out = out.absolute()
    key_file = out.with_name("noise.key") if key_file is None else key_file.absolute()
    check_place(out, key_file, replace)
    person = person_of(as_json)
    replies = answers(Given(public_sample=public_sample, **given), person, out, key_file)
    people, notes = Population(units, records, keys), list[str]()
    rows = list[str]()
    if replies.windows.several:
        replies, rows, notes = _covered(replies, out, covers, people, person)
    data_set = data_set_of(replies, out)
    checked(job_text(replies, out), out)
    limit, unit = limit_of(replies.epsilon, replies.delta), replies.unit
    wanted = (data_set, unit.column, unit.type, limit)
    chosen = chosen_account(out.parent, person, account, new_account, wanted, named_by(out))
    place, what = account_of(chosen, out.parent, unit, data_set, limit)
    made = write(job_text(replies, out, place), out, key_file, replace)
    keep_out_of_git(out.parent, key_file, f"{place.path}*", *store_names(out), "dead_letter")
    job, key = (os.path.relpath(path) for path in (out, key_file))
    following = shlex.join(["dpstream", "plan", job])
    notes += [] if is_file(given["file"]) else [_FIRST_ONLY]
    notes += [replies.windows.note] * bool(replies.windows.note)
    if as_json:
        print_json({
            "job": job, "account": {"path": place.path, "id": place.id, "limit": what},
            "noise_key": key, "noise_key_made": made, "values_read": public_sample,
            "covers": replies.period or LIFETIME, "choices": rows, "notes": notes,
            "next": following,
        })  # fmt: skip
        return
    read = "values were read, as public" if public_sample else "its schema, and no values"
    click.echo(f"Job file     {job}")
    click.echo(f"Account      {place.path}, id {place.id}, limit: {what}")
    click.echo(f"Noise key    {key} ({_KEY[made]})")
    click.echo(f"Read         {read}")
    click.echo(f"Windows      of {replies.windows.length} from {replies.windows.start}"
               f" to {replies.windows.end}")  # fmt: skip
    for i, row in enumerate(rows):
        click.echo(f"{'' if i else 'Covers':<13}{row}")
    for note in notes:
        click.echo(f"Note         {note}")
    click.echo(f"Next         {following}")


_FIRST_ONLY = "Of the files of the pattern only the first was looked at."
_DEFAULT = (
    "Without --covers the budget covers each window separately. With --covers lifetime, {bound}"
    " records of a unit would count in all {windows:,} windows together."
)
_USED_UP = (
    "The budget covers all {windows:,} windows together: after {bound} records a unit no longer"
    " contributes. --covers window gives each window its own budget; the guarantee then holds for"
    " each window of a unit."
)
_KEY = {True: "new, mode 0600: keep it secret and back it up", False: "the one that was there"}


def _covered(
    replies: "Answers", out: Path, covers: str | None, people: "Population", person: "Person"
) -> tuple["Answers", list[str], list[str]]:
    """Ask what the budget covers: the answers with it, lines that compare choices, and notes."""
    from dpstream.pipelines.drafting.covering import (
        LIFETIME,
        WINDOW,
        assumed,
        checker,
        choices,
        table,
        with_covers,
    )

    options = choices(replies)
    rows = table(replies, out, options, people)
    rows.append(assumed(people))
    for row in rows:
        person.show(row)
    chosen = person.answer(
        "--covers", covers, "What epsilon and contributions cover (window, lifetime, or like 28d)",
        WINDOW, checker(replies, out),
    )  # fmt: skip
    notes, figures = [], {"windows": replies.windows.number, "bound": replies.contributions}
    if covers is None and person.ask is None:
        notes.append(_DEFAULT.format(**figures))
    if chosen == LIFETIME:
        notes.append(_USED_UP.format(**figures))
    if chosen not in options:
        rows = [*table(replies, out, [*options, chosen], people), rows[-1]]
    return with_covers(replies, chosen), rows if person.ask is None else [], notes
