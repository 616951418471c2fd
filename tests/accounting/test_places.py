"""A URL is no path, wherever a job file, a catalog or a table wants one."""

from pathlib import Path

import pytest

from dpstream.accounting.errors import UsageError
from dpstream.accounting.places import below
from dpstream.pipelines.jobs.job import decode_job, job_of
from dpstream.pipelines.session.config import load_config
from dpstream.pipelines.sql.catalog_file import load_catalog
from dpstream.pipelines.workload.files import read_workload

URLS = ("s3://b/x", "gs://b/x", "https://user:PASSWORD@h/x", "hdfs://h/x", "file:///x", "az://b/x")
JOB = """
[source]
kind = "parquet"
path = "in.parquet"
[schema]
unit = { column = "user" }
key = [{ column = "page" }]
event_time = { column = "time" }
[[aggregate]]
name = "n"
kind = "count"
[time]
start = "2024-01-01T00:00:00Z"
end = "2024-01-02T00:00:00Z"
window = "1d"
trigger_every = "12h"
[privacy]
epsilon = 1.0
delta = 1e-6
contributions = 3
key_file = "noise.key"
[keys]
public = "keys.csv"
[state]
store = "sqlite:run.db"
[sink]
kind = "parquet"
path = "out"
[ledger]
path = "ledger.db"
data_set = "d"
id = "0acc0acc0acc0acc"
"""
CATALOG = """
[ledger]
path = "ledger.db"
data_set = "d"
id = "0acc0acc0acc0acc"
[unit]
name = "user"
type = "string"
[privacy]
key_file = "noise.key"
[[table]]
name = "t"
path = "t.parquet"
unit_column = "user"
columns = { user = "STRING" }
"""
TABLE = """
[table]
name = "t"
folder = "t"
records = "r.csv"
[[dimension]]
name = "age"
type = "integer"
low = 0
high = 9
[[dimension]]
name = "epsilon"
type = "budget"
most = 1.0
[ledger]
path = "ledger.db"
data_set = "d"
[privacy]
key_file = "noise.key"
"""


def refused(read: object, text: str, old: str, url: str, folder: Path) -> str:
    assert old in text
    (folder / "keys.csv").write_text("page\na\n")
    path = folder / "x.toml"
    path.write_text(text.replace(old, url))
    with pytest.raises(UsageError) as error:
        read(path)  # type: ignore[operator]
    assert "PASSWORD" not in str(error.value)
    return error.value.field


def load(path: Path) -> object:
    return job_of(decode_job(path.read_bytes()), path)


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize(
    ("read", "text", "old", "field"),
    [
        (load, JOB, "in.parquet", "source.path"),
        (load, JOB, "keys.csv", "keys.public"),
        (load, JOB, "noise.key", "privacy.key_file"),
        (load, JOB, "sqlite:run.db", "state.store"),
        (load, JOB, "run.db", "state.store"),
        (load, JOB, "out", "sink.path"),
        (load, JOB, "ledger.db", "ledger.path"),
        (load_catalog, CATALOG, "t.parquet", "table[0].path"),
        (load_catalog, CATALOG, "noise.key", "privacy.key_file"),
        (load_catalog, CATALOG, "ledger.db", "ledger.path"),
        (load_config, TABLE, "r.csv", "table.records"),
        (load_config, TABLE, 'folder = "t"', "table.folder"),
        (load_config, TABLE, "noise.key", "privacy.key_file"),
        (load_config, TABLE, "ledger.db", "ledger.path"),
    ],
)  # fmt: skip
def test_a_url_is_refused(
    tmp_path: Path, url: str, read: object, text: str, old: str, field: str
) -> None:
    new = f'folder = "{url}"' if old.startswith("folder") else url
    got = refused(read, text, old, f"{new}.parquet" if old == "t.parquet" else new, tmp_path)
    assert got == field or (field.startswith("table[") and got.endswith(".path"))


def test_a_url_that_became_a_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        read_workload(Path("s3://b/w.json"))
    assert below(tmp_path, "a:b/c", "x") == tmp_path / "a:b/c"
