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


def examples_of(*command: str) -> list[str]:
    """The examples of a command's help, each a line that begins with the command itself."""
    outcome = call(*command, "--help")
    assert outcome.exit_code == 0, outcome.output
    lines = outcome.output.partition("Examples:")[2].splitlines()
    examples = [line.strip() for line in lines if line.strip().startswith("dpstream ")]
    assert examples and all(line.startswith(" ".join(("dpstream", *command))) for line in examples)
    return examples


def refused(*args: str | Path, code: int = 2) -> str:
    """What a refusal says."""
    result = call(*args)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result.output
