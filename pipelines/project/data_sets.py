"""Unit, account and secret of a data set, which its tables and questions share."""

import contextlib
from collections.abc import Iterator

from dpstream.accounting.errors import DpstreamError, UsageError
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.pipelines.project.project import Project
from dpstream.pipelines.project.sections import AccountSection, TableSection, UnitSection
from dpstream.state.ledger.open import AccountPlace, check_names, place_below


def unit_of(project: Project, name: str, used_by: str, unit_name: str = "user") -> UnitSection:
    """Return the unit of a data set.

    Args:
        used_by: a text for errors: what needs a unit.
        unit_name: the name of the unit that the error proposes.

    Raises:
        UsageError: the data set has no unit.
    """
    unit = project.sections.data_set[name].unit
    if unit is None:
        fix = f'add unit = {{ name = "{unit_name}", type = "string" }} to [data_set.{name}]'
        table = _session_table(project, name)
        if table is not None:
            fix = f"ask with `dpstream session ask {table}`, or name a data set with a unit"
        raise UsageError(f"data_set.{name}.unit", f"is required by {used_by}", fix)
    return unit


def account_of(project: Project, name: str, to_make: bool = False) -> AccountPlace:
    """Return the account of a data set, a file by its absolute path; it need not exist.

    Args:
        to_make: a data set without an account gets the path ``NAME.account.db``; without an id,
            the id is empty.

    Raises:
        UsageError: the data set names no account, or its path or id cannot be used.
    """
    section = project.sections.data_set[name]
    account, where = section.account, f"data_set.{name}"
    if account is None:
        if not to_make:
            raise UsageError(
                f"{where}.account",
                "is required: an answer is charged before a row is read",
                _making(project, name),
            )
        account = AccountSection(f"{name}.account.db")
    if account.id is None and not to_make:
        raise UsageError(f"{where}.account.id", "is required", _making(project, name))
    unit = None if section.unit is None else section.unit.name
    with _located(where):
        for field, text in (("account.path", account.path), ("unit.name", unit)):
            if text is not None and (not text or "\0" in text):
                raise UsageError(field, "must not be empty", "write a name")
        check_names(name, account.id)
        place = place_below(project.folder, account.path)
        return AccountPlace(place, name, account.id or "", unit, str(project.path))


def _making(project: Project, name: str) -> str:
    """Return the command that makes the account of a data set."""
    if project.sections.data_set[name].unit is not None:
        return "make one with `dpstream account create`, which prints the line"
    table = _session_table(project, name) or "TABLE"
    return f"make it with `dpstream session init {table}`, which writes the line"


def is_session_table(table: TableSection) -> bool:
    """Return whether each record of a table has its own budget."""
    return bool(table.dimension)


def _session_table(project: Project, data_set: str) -> str | None:
    """Return the name of a data set's table whose records have their own budgets, if any."""
    only = next(iter(project.sections.data_set)) if len(project.sections.data_set) == 1 else None
    for name, table in project.sections.table.items():
        if is_session_table(table) and (table.data_set or only) == data_set:
            return name
    return None


def secret_of(project: Project, name: str) -> SecretSource:
    """Return the reference to a data set's secret, a file by its absolute path; nothing is read.

    Raises:
        UsageError: the secret is given twice, or its path cannot be used.
    """
    section = project.sections.data_set[name]
    with _located(f"data_set.{name}"):
        source = SecretSource(section.secret, section.insecure_test_secret)
        return source.below(project.folder)


@contextlib.contextmanager
def _located(where: str) -> Iterator[None]:
    """Rewrite errors about a part so that they name the field of the project file."""
    try:
        yield
    except DpstreamError as error:
        raise type(error)(f"{where}.{error.field}", error.rule, error.fix) from None
