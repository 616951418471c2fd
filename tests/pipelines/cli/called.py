"""What the tests of commands share: a call in this process, and how a refusal looks."""

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from dpstream.pipelines.cli.main import cli


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
