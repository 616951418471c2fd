"""What the tests of commands share: a call in this process, and how a refusal looks."""

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from dpstream.pipelines.cli.main import cli
from dpstream.state.ledger.open import PROJECT_FILE
from tests import accounts
from tests.pipelines.session.tables import RECORDS, SMALL_PROJECT


def call(*args: str | Path) -> Result:
    """A command's exit code and output."""
    return CliRunner().invoke(cli, [str(a) for a in args])


def printed(text: str) -> dict[str, Any]:
    """The object that --json printed, which says the version of its names, without it."""
    fields: dict[str, Any] = json.loads(text)
    assert fields.pop("schema_version") == 1
    return fields


def refused(*args: str | Path, code: int = 2) -> str:
    """What a refusal says."""
    result = call(*args)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result.output


# The commands of sessions, called on a small table in a folder.


#: A table as commands name it: with its project file.
Named = tuple[str, ...]


def named(folder: Path, name: str = "small") -> Named:
    return (name, "--project", str(folder))


def prepared(folder: Path, more: str = "") -> Named:
    """Records and the project file, not loaded yet."""
    (folder / "small.csv").write_text(RECORDS)
    accounts.write(folder / PROJECT_FILE, SMALL_PROJECT.format(key="22" * 32, more=more))
    return named(folder)


def loaded(folder: Path, more: str = "") -> Named:
    """The same, with its table."""
    table = prepared(folder, more)
    assert called("init", *table).exit_code == 0
    return table


def called(*words: str) -> Result:
    return CliRunner().invoke(cli, ["table", *words])


def ask_sql(table: Named, statement: str, *options: str) -> Result:
    """A statement about a table, or what follows the options of its private SELECT.

    ``"epsilon = 1 | COUNT(*) AS n | a < 2"`` is a count of the points where a < 2.
    """
    parts = [part.strip() for part in statement.split("|")]
    if len(parts) > 1:
        where = f" WHERE {parts[2]}" if len(parts) > 2 else ""
        statement = f"SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS({parts[0]}) {parts[1]}"
        statement = f"{statement} FROM {table[0]}{where}"
    return CliRunner().invoke(cli, ["sql", statement, *table[1:], *options])


def json_of(*words: str) -> dict[str, Any]:
    """What an owner's command says to machines."""
    result = called(*words, "--json")
    assert result.exit_code == 0, result.output
    return printed(result.stdout)


def answer_of(table: Named, statement: str, *options: str) -> dict[str, Any]:
    """What a statement's answer says to machines."""
    result = ask_sql(table, statement, *options, "--json")
    assert result.exit_code == 0, result.output
    return printed(result.stdout)


def budget_of(table: Named) -> list[Any]:
    """What each region has spent, by its kind and place."""
    rows = answer_of(table, "SELECT kind, region, spent FROM dpstream.budget")["rows"]
    return [tuple(row["values"].values()) for row in rows]


def failed(code: int, result: Result) -> str:
    """What a command that fails says; it fails with its own code and without a traceback."""
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result.output
