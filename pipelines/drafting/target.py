"""The sections that a first job adds to a project file: their names, account and secret."""

import os
from pathlib import Path
from typing import NamedTuple

from dpstream.accounting.errors import UsageError
from dpstream.accounting.fields import Field
from dpstream.pipelines.drafting import account as accounts
from dpstream.pipelines.drafting.ask import Person
from dpstream.pipelines.drafting.draft import (
    NO_ID,
    Answers,
    NewDataSet,
    Target,
    limit_of,
    source_path,
)
from dpstream.pipelines.drafting.place import make_secret
from dpstream.pipelines.project.project import Project, free_name


class Choice(NamedTuple):
    """What the flags say of the sections.

    Attributes:
        job: the job's name; name: of a new table and a new data set.
        data_set, account, new_account, secret: the flags of `dpstream init`.
    """

    job: str
    name: str
    data_set: str | None
    account: str | None
    new_account: bool
    secret: Path | None


def target_of(
    path: Path,
    before: str,
    project: Project | None,
    answers: Answers,
    choice: Choice,
    person: Person,
) -> Target:
    """The sections of a first job; nothing is made yet.

    Args:
        path, before, project: the file, its text and what it has; see `place.project_at`.
        person: who is asked which data set, and which account.

    Raises:
        UsageError: flags that do not fit, or nobody can be asked.
    """
    name, there = accounts.chosen_data_set(
        project, choice.data_set, person, answers.unit, choice.name
    )
    new = None
    if there:
        _refuse_flags(choice)
    else:
        name, new = _new_data_set(path.parent, project, answers, choice, name, person)
    table, new_table = _table(project, name, answers, choice.name, path.parent)
    return Target(path, before, choice.job, table, name, new, new_table)


def made(target: Target, answers: Answers) -> tuple[Target, bool]:
    """The target with its account and secret, which are made now if they are new, and whether the
    secret is.

    Raises:
        DpstreamError: one of them cannot be made.
    """
    new, folder = target.new_data_set, target.path.parent
    if new is None:
        return target, False
    secret_made = make_secret(folder / new.secret)
    if new.limit is not None:
        path, created = accounts.new_account(folder, target.data_set, answers.unit, new.limit)
        new = new._replace(account=path, id=created.id)
    return target._replace(new_data_set=new), secret_made


def _new_data_set(
    folder: Path,
    project: Project | None,
    answers: Answers,
    choice: Choice,
    name: str,
    person: Person,
) -> tuple[str, NewDataSet]:
    """A new data set and its name, which is that of its account."""
    unit, limit = answers.unit, limit_of(answers.epsilon, answers.delta)
    own = accounts.own_accounts(project)
    wanted = (name, unit.column, unit.type, limit)
    chosen = accounts.chosen_account(
        folder, person, choice.account, choice.new_account, wanted, own
    )
    if chosen is None:
        account, id_, unit_name = accounts.free_account(folder, name), NO_ID, unit.column
    else:
        account, id_, unit_name, name = _taken(folder, project, chosen, unit, choice)
    secret = folder / f"{name}.secret" if choice.secret is None else choice.secret.absolute()
    written = os.path.relpath(secret, folder)
    return name, NewDataSet(unit_name, account, id_, written, limit if chosen is None else None)


def _taken(
    folder: Path, project: Project | None, chosen: str, unit: Field, choice: Choice
) -> tuple[str, str, str, str]:
    """Path, id, unit and data set of an account that is there."""
    account, created = accounts.taken_account(folder, chosen, unit)
    if choice.data_set not in (None, created.data_set):
        raise UsageError(
            "--data-set",
            f"is {choice.data_set}, and the account is of the data set {created.data_set}",
            f"--data-set {created.data_set}, or another account",
        )
    if project is not None and created.data_set in project.sections.data_set:
        raise UsageError(
            "--account",
            f"is of the data set {created.data_set}, which the project file has with another one",
            f"--data-set {created.data_set}, or another account",
        )
    return account, created.id, created.unit, created.data_set


def _table(
    project: Project | None, data_set: str, answers: Answers, name: str, folder: Path
) -> tuple[str, bool]:
    """Name of the records' table, and whether the file lacks it."""
    tables = {} if project is None else project.written.table
    path = source_path(answers.file.given, folder)
    for other, table in tables.items():
        same = (table.path, table.unit_column, table.time_column)
        if same == (path, answers.unit.column, answers.time) and table.data_set in (None, data_set):
            return other, False
    return free_name(name.replace("-", "_"), tables), True  # statements name tables without it


def _refuse_flags(choice: Choice) -> None:
    """A data set of the file has an account and a secret."""
    given = {
        "--account": choice.account is not None,
        "--new-account": choice.new_account,
        "--secret": choice.secret is not None,
    }
    for flag, there in given.items():
        if there:
            raise UsageError(
                flag, "is of a new data set, and this one is in the project file", "omit it"
            )
