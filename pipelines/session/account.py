"""The account of a session table: it is made once, named in the project file, and migrated to wider
dimensions.
"""

import contextlib
import dataclasses
import json
import tomllib
from typing import Any

import msgspec
import tomlkit
from tomlkit.exceptions import TOMLKitError

from dpstream.accounting.errors import UsageError
from dpstream.accounting.plan.unit import UnitIdentity
from dpstream.pipelines.project.copying import read_project_text, set_field
from dpstream.pipelines.project.project import Project, write_project
from dpstream.pipelines.project.text import text_of
from dpstream.pipelines.session.config import Config, config_in, located
from dpstream.pipelines.session.records.manifest import MANIFEST, read_manifest, refuse_table
from dpstream.state.ledger.balances import widen
from dpstream.state.ledger.events import RECORD
from dpstream.state.ledger.open import (
    AccountPlace,
    create_account,
    history_of,
    ledger_exists,
    open_ledger,
    read_ledger,
)


def with_account(project: Project, table: str | None) -> tuple[Config, bool]:
    """Return a session table with its account, and whether the project file was extended for it.

    An account of these records at the path is used; otherwise one is made there.  So the same
    command continues where a process was stopped between making the account and writing the file.

    Raises:
        PolicyError: the folder already holds a table, which belongs to another account.
        UsageError: another account is at the path, or the id cannot be written into the file.
    """
    config = config_in(project, table, without_account=True)
    place = config.account
    if place.id:
        return config, False
    refuse_table(config.folder, config.option)
    if ledger_exists(place.path):
        id_ = _id_of_records(place)
    else:
        id_ = create_account(place.path, place.data_set, UnitIdentity(RECORD, "string"), None).id
    account = project.sections.data_set[place.data_set].account
    path = f"{place.data_set}.account.db" if account is None else account.path
    _write(project, place.data_set, path, id_)
    return dataclasses.replace(config, account=msgspec.structs.replace(place, id=id_)), True


def _id_of_records(place: AccountPlace) -> str:
    """Return the id of the account at a data set's path.

    Raises:
        UsageError: it is the account of another data set, or its unit is not a record.
    """
    created, field = (
        history_of(read_ledger(place.path)).created,
        f"data_set.{place.data_set}.account.path",
    )
    fix = "write another path, where `dpstream table init` makes the account"
    if created.unit.name != RECORD or created.limit is not None:
        rule = f"is an account of the unit {created.unit.description}, which has a limit"
        raise UsageError(field, f"{rule}: here each record has a budget of its own", fix)
    if created.data_set != place.data_set:
        rule = f"is an account already, of the data set {created.data_set!r}"
        raise UsageError(field, rule, f"{fix}; or name the section of the data set so")
    return created.id


def migrate(project: Project, old_name: str, new_name: str | None) -> int | None:
    """Embed the spent amounts of a table's points in the wider space of another table.

    Both tables are of one data set.  Repeating a call does what remains to be done.

    Returns:
        The number of embedded charges; ``None`` if they were embedded before.

    Raises:
        UsageError: the old space does not fit into the new one, or the data sets differ.
        PolicyError: the account, or the new table's folder, belongs to another table.
    """
    old, new = config_in(project, old_name), config_in(project, new_name)
    if new.account.data_set != old.account.data_set:
        raise UsageError(
            f"table.{new.name}.data_set",
            f"is another one than that of table {old_name}",
            f'write data_set = "{old.account.data_set}", whose account has what was spent',
        )
    columns = dict(zip((d.name for d in old.table.dimensions), _columns(old), strict=True))
    for dimension, column in zip(new.table.dimensions, _columns(new), strict=True):
        if columns.get(dimension.name, column) != column:
            raise UsageError(
                f"table.{new.name}.dimension.{dimension.name}",
                "is of another column, or has another value: records would be at other points",
                "keep its column and value",
            )
    if (new.folder / MANIFEST).exists():
        read_manifest(new.folder, new.table)
    with (
        contextlib.closing(open_ledger(old.account)) as ledger,
        located(new.name, [*columns, *(d.name for d in new.table.dimensions)]),
    ):
        return widen(ledger, old.table, new.table)


def _columns(config: Config) -> list[tuple[str | None, float | None]]:
    """Return the source of each dimension's coordinates: its column, or its fixed value."""
    return list(zip(config.columns, config.fixed, strict=True))


def _write(project: Project, data_set: str, path: str, id_: str) -> None:
    """Write the id of a data set's account into the project file, or the whole line if there is
    none; everything else stays as it was written.

    Raises:
        UsageError: the file's layout has no place for the line; else as `write_project`.
    """
    before = read_project_text(project)
    given = text_of(before)
    quoted = json.dumps(path, ensure_ascii=False)
    line = f'account = {{ path = {quoted}, id = "{id_}" }}'
    expected = tomllib.loads(given)
    section = expected["data_set"][data_set]
    section["account"] = {"path": path} | section.get("account", {}) | {"id": id_}
    text = ""
    with contextlib.suppress(TOMLKitError):
        text = _with_line(given, data_set, line, id_)
    if not text or tomllib.loads(text) != expected:
        fix = f"write {line} into [data_set.{data_set}]"
        raise UsageError(f"data_set.{data_set}.account", "cannot be written to", fix)
    write_project(project.path, text, before)


def _with_line(text: str, data_set: str, line: str, id_: str) -> str:
    document: Any = tomlkit.parse(text)
    section = document["data_set"][data_set]
    if "account" in section:
        set_field(section, "account", "id", id_)
    else:
        newline = "\r\n" if "\r\n" in text else "\n"
        section["account"] = tomlkit.parse(line + newline)["account"]
    return tomlkit.dumps(document)
