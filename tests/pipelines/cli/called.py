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
    return CliRunner().invoke(cli, ["session", *words])


def json_of(*words: str) -> dict[str, Any]:
    """What a command says to machines."""
    result = called(*words, "--json")
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = printed(result.stdout)
    return report


def session_refused(code: int, *words: str) -> str:
    """What a command that fails says; it fails with its own code and without a traceback."""
    result = called(*words)
    assert result.exit_code == code, result.output
    return result.output
