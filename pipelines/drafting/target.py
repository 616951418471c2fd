"""The target of a first job: its sections in the project file, its files, data set and account.

No other job has its files.  The data set is one that is there, or a new one, whose account is one
that is there or a new one too.

Two accounts of the same people are two budgets, and what is published of both adds up.  So whoever
begins a job sees the data sets and the accounts that exist, and chooses.
"""

import contextlib
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.errors import DpstreamError, UsageError
from dpstream.accounting.fields import Field, FieldType
from dpstream.accounting.plan.unit import identity_of
from dpstream.pipelines.drafting.ask import Person
from dpstream.pipelines.drafting.draft import (
    NO_ID,
    Answers,
    NewDataSet,
    Target,
    limit_of,
    release_folder,
    source_path,
    store_name,
)
from dpstream.pipelines.jobs.charging import spend_of
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.jobs.secret import new_secret
from dpstream.pipelines.project.project import (
    Project,
    account_of,
    check_name,
    decode_project,
    find,
    free_name,
    locate,
)
from dpstream.pipelines.project.sections import CsvSection, TimeColumn, UnitSection
from dpstream.pipelines.project.text import read_at_most
from dpstream.state.disk_errors import file_error
from dpstream.state.durable import replacing
from dpstream.state.ledger.events import Created, Limit
from dpstream.state.ledger.open import (
    PROJECT_FILE,
    create_account,
    file_of,
    history_of,
    open_path,
    place_below,
    project_option,
    read_ledger,
)
from dpstream.state.repository import repository_of

#: A name for what a file's name says nothing about.
_ANY_NAME = "records"


def project_at(given: Path | None) -> tuple[Path, str, Project | None]:
    """Return the project file to create or extend: absolute path, text (empty: none) and content.

    Args:
        given: of ``--project``; ``None``: the file that commands find from the current folder, or
            a new one there.

    Raises:
        UsageError: its folder does not exist, or it is no usable project file.
    """
    path = locate(given) if given is not None else find(Path.cwd()) or Path.cwd() / PROJECT_FILE
    if not path.parent.is_dir():
        raise UsageError("--project", "is in a folder that does not exist", "make the folder first")
    if not path.exists():
        return path, "", None
    text = read_at_most(path, path.name, f"give a {PROJECT_FILE}")
    return path, text.decode(errors="surrogateescape"), decode_project(text, path)


def name_of(file: str) -> str:
    """Return a section's name for a file or a pattern of files: the file's own, or its folder's."""
    given = Path(file)
    for part in (given.name.partition(".")[0], given.absolute().parent.name):
        name = re.sub(r"[^A-Za-z0-9_-]+", "_", part).strip("_-")
        name = re.sub(r"^[^A-Za-z]+", "", name)[:64]
        if name:
            return name
    return _ANY_NAME


def check_job(path: Path, project: Project | None, job: str) -> None:
    """Refuse a job's name before anything is asked.

    Args:
        path: of the project file, absolute.

    Raises:
        UsageError: it is no name of a section, a job of this name is there, or files that would be
            taken for this job's.
    """
    check_name("--job", job)
    if _is_job(project, job):
        raise UsageError(
            "--job",
            f"[job.{job}] is in {path.name} already, and is not written over",
            f"`dpstream plan {job}{project_option(path)}` shows it; for another one add "
            f"--job {_free(path, project, job)}, or edit the section",
        )
    for name in _files(job):
        if (path.parent / name).exists():
            raise UsageError(
                "--job",
                f"would be taken to go on with {name}, which another run has begun",
                f"add --job {_free(path, project, job)}",
            )


def _files(job: str) -> tuple[str, str]:
    return store_name(job), release_folder(job)


def _is_job(project: Project | None, job: str) -> bool:
    return project is not None and job in project.sections.job


def _free(path: Path, project: Project | None, job: str) -> str:
    """A name of a job that meets nothing."""
    names = (f"{job}{number}" for number in range(2, 10_000))
    return next(
        name
        for name in names
        if not _is_job(project, name)
        and not any((path.parent / file).exists() for file in _files(name))
    )


#: Private files that commands leave beside a job, a catalog or a table: heads and logs.
PRIVATE_FILES = ("dpstream-*.head", "dpstream-errors*.log")


def keep_out_of_git(folder: Path, *private: str | Path) -> None:
    """Name a folder's private files in its ``.gitignore``, where it is part of a repository.

    Args:
        private: secret, account, stores, dead letters: paths or patterns, named if they lie in
            the folder itself.

    Raises:
        RunError: the file cannot be written.
    """
    if repository_of(folder) is None:
        return
    paths = [folder / each for each in private]
    names = [*(path.name for path in paths if path.parent == folder), *PRIVATE_FILES]
    path = folder / ".gitignore"
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        missing = [name for name in names if name not in text.splitlines()]
        if missing:
            with replacing(path) as draft:
                end = "" if text.endswith("\n") or not text else "\n"
                draft.write_text("\n".join([text + end + missing[0], *missing[1:], ""]))
    except (OSError, UnicodeError) as error:
        raise file_error(".gitignore", "cannot be written", error) from None


def store_names(job: str) -> tuple[str, str]:
    """Return the patterns of a job's store with its journals, and of stores that `run --fresh`
    moved.
    """
    store = store_name(job)
    return f"{store}*", f"{store.removesuffix('.db')}-*.db*"


def make_secret(path: Path) -> bool:
    """Make a secret unless one is there; whether it was made.

    Raises:
        UsageError: there is something else; RunError: the operating system cannot write.
    """
    if not path.parent.is_dir():
        raise UsageError("--secret", "is in a folder that does not exist", "make the folder first")
    if path.exists() and not path.is_file():
        raise UsageError("--secret", "is there, and is no file", "choose another name")
    if path.exists():
        return False
    new_secret(path)
    return True


#: Data set, unit, its type, and limit (``None``: each record has a budget of its own).
Wanted = tuple[str, str, FieldType, Limit | None]
_HEADER = b"SQLite format 3\0"


def chosen_data_set(
    project: Project | None, given: str | None, person: Person, unit: Field, proposal: str
) -> tuple[str, bool]:
    """Name of the data set of a first job, and whether the project file has it.

    Args:
        given: of ``--data-set``; person: who is asked where the file has data sets and no name is
            given; proposal: a name for a new one.

    Raises:
        UsageError: the name is not usable, the unit is of another type, or nobody can be asked.
    """
    sections = {} if project is None else project.sections.data_set
    there = _units(project)
    new = free_name(proposal, sections)
    refuse_no_data_set(project, given, person)
    if given is None and there:
        listed = _listed_units(there)
        person.show(f"Data sets that are there: {listed}")
        given = person.answer("--data-set", None, "Data set (its name, or a new one)", new, str)
    name = new if given is None else given
    check_name("--data-set", name)
    if name not in sections:
        return name, False
    if name not in there:
        raise UsageError(
            "--data-set", "has records with budgets of their own, and no unit", f"name it {new}"
        )
    if there[name].type != unit.type:
        raise UsageError(
            "--data-set",
            f"is of the unit {there[name].name} ({there[name].type}), and --unit is of type "
            f"{unit.type}",
            "name another data set, or another column",
        )
    return name, True


def refuse_no_data_set(project: Project | None, given: str | None, person: Person) -> None:
    """Refuse a missing name where the project file has data sets, and nobody can be asked.

    Raises:
        UsageError: it is missing.
    """
    there = _units(project)
    if given is None and there and not person.at_terminal:
        raise UsageError(
            "--data-set",
            f"is required, because the project file has data sets: {_listed_units(there)}",
            f"add --data-set {next(iter(there))} for the same people, or a new name for others",
        )


def _units(project: Project | None) -> dict[str, UnitSection]:
    sections = {} if project is None else project.sections.data_set
    return {name: section.unit for name, section in sections.items() if section.unit is not None}


def _listed_units(there: dict[str, UnitSection]) -> str:
    return "; ".join(f"{name}, unit {unit.name} ({unit.type})" for name, unit in there.items())


def data_set_of(project: Project | None, file: str, unit: str | None, folder: Path) -> str | None:
    """Return the data set of a table of the same file with the same unit; ``None``: there is
    none.
    """
    if project is None or unit is None:
        return None
    path, tables = source_path(file, folder), project.written.table.values()
    same = (table for table in tables if (table.path, table.unit_column) == (path, unit))
    return next((table.data_set or next(iter(_units(project))) for table in same), None)


def own_accounts(project: Project | None) -> set[str]:
    """Return the places of the accounts that the project file names."""
    if project is None:
        return set()
    named = (n for n, section in project.sections.data_set.items() if section.account is not None)
    return {account_of(project, name, to_make=True).path for name in named}


class Listed(NamedTuple):
    """An existing account: its path, its data set, and its number of entries."""

    path: Path
    created: Created
    entries: int

    def made_for(self, wanted: Wanted) -> bool:
        """Return whether an interrupted command made it for the wanted sections, and it was not
        used.
        """
        own = self.created
        made = (own.data_set, own.unit.name, own.unit.type, own.limit)
        return self.entries == 1 and made == wanted

    @property
    def line(self) -> str:
        """The target as a line for people."""
        own = self.created
        unit = f"unit {own.unit.description}"
        return f"{os.path.relpath(self.path)}  data set {own.data_set}, {unit}, id {own.id}"


def accounts_near(folder: Path) -> list[Listed]:
    """Return the accounts in files of a folder and of its parents up to the repository's root.

    Without a repository only the folder itself is looked at.
    """
    folders = [folder, *folder.parents]
    root = next((n for n, each in enumerate(folders) if (each / ".git").exists()), 0)
    listed = list[Listed]()
    for each in folders[: root + 1]:
        for path in sorted(each.glob("*.db")):
            with contextlib.suppress(DpstreamError, OSError):
                if path.is_file() and _starts(path):
                    account = history_of(read_ledger(path))
                    listed.append(Listed(path, account.created, len(account.digests)))
    return listed


def _starts(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(len(_HEADER)) == _HEADER


def chosen_account(
    folder: Path,
    person: Person,
    account: str | None,
    new_account: bool,
    wanted: Wanted,
    without: Collection[str] = (),
) -> str | None:
    """Return the path or URL of the account to charge; ``None``: a new one.

    Args:
        folder: of the file that names it; person: who is asked where there are accounts.
        account, new_account: what the flags say; wanted: data set, unit, type and limit of the
            account that would be made; without: accounts that the file names already.

    Raises:
        UsageError: both flags are given; or there are accounts, no flag, and nobody to ask.
    """
    if account is not None and new_account:
        raise UsageError("--account", "and --new-account exclude each other", "give one of them")
    if account is not None or new_account:
        return account
    listed = [each for each in accounts_near(folder) if str(each.path) not in without]
    for each in listed:
        if each.made_for(wanted):
            return str(each.path)
    if not listed:
        return None
    if not person.at_terminal:
        raise UsageError(
            "--account",
            "is required, because accounts are there already: " + "; ".join(a.line for a in listed),
            "add --account PATH to charge one of them, or --new-account for other data",
        )
    paths = {os.path.relpath(each.path): str(each.path) for each in listed}

    def read(text: str) -> str | None:
        if text != "new" and text not in paths:
            raise UsageError("--account", "is none of them", "type a path of the list, or new")
        return paths.get(text)

    person.show("\n".join(["Accounts that are there:", *(f"  {each.line}" for each in listed)]))
    return person.answer("--account", None, "Account to charge (its path, or new)", None, read)


def taken_account(folder: Path, account: str, unit: Field) -> tuple[str, Created]:
    """Return an existing account, as a file of this folder names it, and its data set.

    Raises:
        UsageError: it is of another type of unit; DpstreamError: it is none, or cannot be read.
    """
    path = place_below(Path().absolute(), account)
    with contextlib.closing(open_path(path)) as ledger:
        created = ledger.history().created
    if created.limit is None:
        raise UsageError(
            "--account",
            "is of a table whose records have budgets of their own: they are another privacy unit",
            "--new-account, or an account of this unit",
        )
    if created.unit.type != unit.type:
        raise UsageError(
            "--account",
            f"is of the unit {created.unit.name} ({created.unit.type}), and --unit is of type "
            f"{unit.type}",
            "--new-account, or another column",
        )
    return path if file_of(path) is None else os.path.relpath(path, folder), created


def new_account(folder: Path, data_set: str, job: Job, limit: Limit) -> tuple[str, Created]:
    """Return a new account in a file of the folder whose name is free.

    Args:
        job: the first one; the account has its privacy unit, and parts into which it fits.

    Raises:
        DpstreamError: it cannot be made.
    """
    name, unit = free_account(folder, data_set), identity_of(job.plan).of_all_times
    first = spend_of(job, allocate(job.plan), "")
    return name, create_account(folder / name, data_set, unit, limit, first)


def free_account(folder: Path, data_set: str) -> str:
    """Return a name for the file of a new account."""
    stems = (f"{data_set}{number}" for number in ("", *range(2, 10_000)))
    names = (f"{stem}.account.db" for stem in stems)
    return next(name for name in names if not (folder / name).exists())


class Choice(NamedTuple):
    """The choices of flags for the sections.

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
    """Return the sections of a first job; nothing is made yet.

    Args:
        path, before, project: the file, its text and what it has; see `project_at`.
        person: prompts for the data set and the account.

    Raises:
        UsageError: flags that do not fit, or nobody can be asked.
    """
    name, there = chosen_data_set(project, choice.data_set, person, answers.unit, choice.name)
    new = None
    if there:
        _refuse_flags(choice)
    else:
        _refuse_second_budget(path.parent, project, answers, choice)
        name, new = _new_data_set(path.parent, project, answers, choice, name, person)
    table, new_table = _table(project, name, answers, choice.name, path.parent)
    return Target(path, before, choice.job, table, name, new, new_table)


def _refuse_second_budget(
    folder: Path, project: Project | None, answers: Answers, choice: Choice
) -> None:
    """Refuse a new account for a file whose rows have one, unless it is asked for."""
    if project is None or choice.new_account or choice.account is not None:
        return
    path = source_path(answers.file.given, folder)
    for table in project.written.table.values():
        if table.path == path and table.unit_column is not None:
            owner = table.data_set or next(iter(_units(project)))
            raise UsageError(
                "--data-set",
                f"is new, and the file is a table of data set {owner}: an account of its own would "
                "be a second budget of the same people",
                f"add --data-set {owner}, or --new-account for other people",
            )


def made(target: Target, job: Job) -> tuple[Target, bool]:
    """Return the target with its account and secret, which are made now if they are new, and
    whether the secret is.

    Args:
        job: the drafted job.

    Raises:
        DpstreamError: one of them cannot be made.
    """
    new, folder = target.new_data_set, target.path.parent
    if new is None:
        return target, False
    secret_made = make_secret(folder / new.secret)
    if new.limit is not None:
        path, created = new_account(folder, target.data_set, job, new.limit)
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
    own = own_accounts(project)
    wanted = (name, unit.column, unit.type, limit)
    chosen = chosen_account(folder, person, choice.account, choice.new_account, wanted, own)
    if chosen is None:
        account, id_, unit_name = free_account(folder, name), NO_ID, unit.column
    else:
        account, id_, unit_name, name = _taken(folder, project, chosen, unit, choice)
    secret = folder / f"{name}.secret" if choice.secret is None else choice.secret.absolute()
    written = os.path.relpath(secret, folder)
    return name, NewDataSet(unit_name, account, id_, written, limit if chosen is None else None)


def _taken(
    folder: Path, project: Project | None, chosen: str, unit: Field, choice: Choice
) -> tuple[str, str, str, str]:
    """Path, id, unit and data set of an account that is there."""
    account, created = taken_account(folder, chosen, unit)
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
    return account, created.id, created.unit.name, created.data_set


def _table(
    project: Project | None, data_set: str, answers: Answers, name: str, folder: Path
) -> tuple[str, bool]:
    """Name of the records' table, and whether the file lacks it."""
    tables = {} if project is None else project.written.table
    path = source_path(answers.file.given, folder)
    for other, table in tables.items():
        time, csv = table.time_column, table.csv or CsvSection()
        time = TimeColumn(time) if isinstance(time, str) else time
        same = (table.path, table.unit_column, time, csv)
        described = (path, answers.unit.column, answers.time, answers.file.csv)
        if same == described and table.data_set in (None, data_set):
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
