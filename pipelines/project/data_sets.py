"""What the tables and questions of a data set share: its account and its secret."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from dpstream.accounting.errors import DpstreamError, UsageError
from dpstream.dp_transforms.noise.references import KeyPlace
from dpstream.pipelines.project.project import Project
from dpstream.state.ledger.open import AccountPlace, check_names, place_below


def account_of(project: Project, name: str) -> AccountPlace:
    """The account of a data set, a file by its absolute path; it need not be there.

    Raises:
        UsageError: the data set names none, or its path or id cannot be one.
    """
    section = project.sections.data_set[name]
    account, where = section.account, f"data_set.{name}"
    if account is None:
        raise UsageError(
            f"{where}.account",
            "is required: an answer is charged before a row is read",
            "make one with `dpstream account create`, which prints the line",
        )
    unit = None if section.unit is None else section.unit.name
    with _located(where):
        return account_place(project.folder, project.path, account.path, name, account.id, unit)


def account_place(
    folder: Path, file: Path | None, path: str, data_set: str, id_: str, unit: str | None
) -> AccountPlace:
    """An account as a file names it; it need not be there.

    Args:
        folder: from which a path starts; file: that names the account, whole path.

    Raises:
        UsageError: a name or the id is none, or the URL is none of an account.
    """
    for field, text in (("account.path", path), ("unit.name", unit)):
        if text is not None and (not text or "\0" in text):
            raise UsageError(field, "must not be empty", "write a name")
    check_names(data_set, id_)
    named = None if file is None else str(file)
    return AccountPlace(place_below(folder, path), data_set, id_, unit, named)


def secret_of(project: Project, name: str) -> KeyPlace:
    """Where the secret of a data set is, a file by its absolute path; nothing is read.

    Raises:
        UsageError: it is given twice, or its path is no path.
    """
    section = project.sections.data_set[name]
    with _located(f"data_set.{name}"):
        place = KeyPlace(key=section.secret, insecure_test_key=section.insecure_test_secret)
        return place.below(project.folder)


@contextlib.contextmanager
def _located(where: str) -> Iterator[None]:
    """Errors about a part of a section name it as the project file has it."""
    try:
        yield
    except DpstreamError as error:
        raise type(error)(f"{where}.{error.field}", error.rule, error.fix) from None
