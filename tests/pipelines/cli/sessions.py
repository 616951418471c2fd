"""The commands of sessions, called on a small table in a folder."""

from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from dpstream.pipelines.cli.main import cli
from dpstream.state.ledger.open import PROJECT_FILE
from tests import accounts
from tests.pipelines.cli.called import printed
from tests.pipelines.session.small import PROJECT, RECORDS

#: A table as commands name it: with its project file.
Named = tuple[str, ...]


def named(folder: Path, name: str = "small") -> Named:
    return (name, "--project", str(folder))


def prepared(folder: Path, more: str = "") -> Named:
    """Records and the project file, not loaded yet."""
    (folder / "small.csv").write_text(RECORDS)
    accounts.write(folder / PROJECT_FILE, PROJECT.format(key="22" * 32, more=more))
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


def refused(code: int, *words: str) -> str:
    """What a command that fails says; it fails with its own code and without a traceback."""
    result = called(*words)
    assert result.exit_code == code, result.output
    return result.output
