"""What the tests of `dpstream choose` share: a job, its records, the command."""

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from click.testing import CliRunner, Result

from dpstream.accounting.errors import PolicyError
from dpstream.pipelines.cli.main import cli
from dpstream.pipelines.jobs.job import load_job
from dpstream.pipelines.jobs.noise_key import new_key
from dpstream.state import open as stores
from tests import accounts

JOB = """\
# Deliveries, hourly.  KEEP THIS COMMENT.
[source]
kind = "csv"
path = "in/*.csv"  # and this one
[schema]
unit = { column = "user" }
key = [{ column = "key" }]
event_time = { column = "time" }
[[aggregate]]
name = "records"
kind = "count"
[[aggregate]]
name = "total"
kind = "sum"
column = "value"
grid = 0.5
[time]
start = "2024-01-01T00:00:00Z"
end = "2024-01-03T00:00:00Z"
window = "1d"
trigger_every = "6h"
[privacy]
strategy = "tree"
epsilon = 2.0
delta = 1e-8
key_file = "keys/noise.key"
[ledger]
path = "ledger.db"
data_set = "deliveries"
limit = { epsilon = 3.0, delta = 1e-6 }
[sink]
kind = "parquet"
path = "releases"
[choice]
range = { total = [-100, 200] }
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


@pytest.fixture(name="job")
def job_file(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    (tmp_path / "keys").mkdir()
    (tmp_path / "in" / "a.csv").write_text(records(USERS))
    new_key(tmp_path / "keys" / "noise.key")
    accounts.write(tmp_path / "job.toml", JOB)
    return tmp_path / "job.toml"


def call(*args: str | Path) -> Result:
    result = CliRunner().invoke(cli, [str(a) for a in args])
    assert CANARY not in result.output
    return result


def choose(job: Path, out: str = "new.toml", *flags: str, ask: tuple[str, ...] = ASK) -> Result:
    return call("choose", job, *ask, "--out", job.parent / out, *flags)


def done(result: Result) -> Result:
    assert result.exit_code == 0, result.output
    return result


def entries(job: Path) -> int:
    if not job.with_name("ledger.db").exists():
        return 0
    ledger = accounts.opened(job.with_name("ledger.db"), "deliveries")
    try:
        return len(ledger.entries())
    finally:
        ledger.close()


# --- what is chosen ------------------------------------------------------------------------------


def load(path: Path) -> str:
    """The field a job is refused for, or nothing."""
    try:
        load_job(path)
    except PolicyError as error:
        return error.field
    return ""
