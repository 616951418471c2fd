"""What the tests of `dpstream choose` share: a job, its records, the command."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from click.testing import CliRunner, Result

from dpstream.accounting.errors import PolicyError
from dpstream.pipelines.cli.main import cli
from dpstream.pipelines.jobs.job import load_job
from dpstream.pipelines.jobs.secret import new_secret
from dpstream.state import open as stores
from tests import accounts

PROJECT = """\
version = 1

[data_set.deliveries]
unit = { name = "user" }
account = { path = "deliveries.account.db", limit = { epsilon = 3.0, delta = 1e-6 } }
secret = "file:keys/noise.secret"

[table.records]
path = "in/*.csv"
unit_column = "user"
time_column = "time"

[job.hourly]
# Deliveries, hourly.  KEEP THIS COMMENT.
table = "records"
key = ["key"]
aggregate.records = { kind = "count" }
aggregate.total = { kind = "sum", column = "value", grid = 0.5 }
start = "2024-01-01T00:00:00Z"
end = "2024-01-03T00:00:00Z"
window = "1d"
release_every = "6h"
budget = { epsilon = 2.0, delta = 1e-8, covers = "lifetime" }  # and this one
mechanism.strategy = "tree"
sink = { kind = "parquet", path = "releases" }
choice.range = { total = [-100, 200] }
"""
CANARY = "CANARY9313"
USERS = 1500
ASK = ("--first", "12h", "--epsilon", "1")


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    with mock.patch("dpstream.pipelines.cli.main.silence"):
        yield
    stores.close_all()


def pairs_of(user: int) -> int:
    """Records of a user in the first 12 hours: 1 .. 6."""
    return 1 + user % 6


def value_of(user: int) -> float:
    return -20.0 + user % 41  # -20 .. 20, alike


def records(users: int, hour: int = 0) -> str:
    rows = [
        f"{CANARY}u{u},k{u % 7},2024-01-01T{hour + i:02d}:30:00Z,{value_of(u)}"
        for u in range(users)
        for i in range(pairs_of(u))
    ]
    # Outside the first hours: another day, and noise that would move every figure.
    rows += [f"{CANARY}x{u},k1,2024-01-02T10:00:00Z,199" for u in range(3 * users)]
    return "user,key,time,value\n" + "\n".join(rows) + "\n"


@pytest.fixture(name="project")
def project_file(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    (tmp_path / "keys").mkdir()
    (tmp_path / "in" / "a.csv").write_text(records(USERS))
    new_secret(tmp_path / "keys" / "noise.secret")
    write(tmp_path / "dpstream.toml", PROJECT)
    return tmp_path / "dpstream.toml"


def write(path: Path, *changes: str | tuple[str, str]) -> None:
    """Write a project file: the text, with parts replaced; its account is made."""
    text, *pairs = changes if isinstance(changes[0], str) else (PROJECT, *changes)
    assert isinstance(text, str)
    for pair in pairs:
        assert not isinstance(pair, str)
        old, new = pair
        assert old in text, old
        text = text.replace(old, new)
    accounts.write(path, text)


def call(*args: str | Path) -> Result:
    result = CliRunner().invoke(cli, [str(a) for a in args])
    assert CANARY not in result.output
    return result


def choose(project: Path, new: str = "new", *flags: str, ask: tuple[str, ...] = ASK) -> Result:
    return call("choose", "hourly", *ask, "--as", new, "--project", project, *flags)


def done(result: Result) -> Result:
    assert result.exit_code == 0, result.output
    return result


def jobs(project: Path) -> dict[str, Any]:
    """The jobs of a project file, as it has them."""
    decoded: dict[str, Any] = tomllib.loads(project.read_text())["job"]
    return decoded


def account(project: Path) -> Path:
    return project.with_name("deliveries.account.db")


def entries(project: Path) -> int:
    if not account(project).exists():
        return 0
    ledger = accounts.opened(account(project), "deliveries")
    try:
        return len(ledger.entries())
    finally:
        ledger.close()


def load(path: Path, name: str = "new") -> str:
    """The field a job is refused for, or nothing."""
    try:
        load_job(path, name)
    except PolicyError as error:
        return error.field
    return ""
