"""A URL is no path, wherever a job, statements or a session want one; and what is
private under one name is not public under another, in any of them.  Names of compressed files are
told apart without reading a file.
"""

import errno
import functools
import glob
import itertools
import os
import random
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from dpstream.accounting.errors import DpstreamError, UsageError
from dpstream.accounting.places import (
    below,
    is_packed_name,
    matching,
    refuse_far,
    unpacked_name,
    walked,
)
from dpstream.pipelines.jobs.job import load_job
from dpstream.pipelines.session.config import load_config
from dpstream.pipelines.sql.load import load_catalog
from dpstream.pipelines.workload.planning import read_workload
from tests.golden.refusals import Refused

URLS = ("s3://b/x", "gs://b/x", "https://user:PASSWORD@h/x", "hdfs://h/x", "file:///x", "az://b/x")
JOB = """
version = 1
[data_set.d]
unit = { name = "user" }
account = { path = "ledger.db", id = "0acc0acc0acc0acc" }
secret = "file:noise.secret"
[table.t]
path = "in.parquet"
unit_column = "user"
time_column = "time"
[job.j]
table = "t"
key = ["page"]
aggregate.n = { kind = "count" }
start = "2024-01-01T00:00:00Z"
end = "2024-01-02T00:00:00Z"
window = "1d"
release_every = "12h"
budget = { epsilon = 1.0, delta = 1e-6, covers = "lifetime" }
contributions = 3
public_keys = "keys.csv"
store = "run.db"
sink = { kind = "parquet", path = "out" }
"""
PROJECT = """
version = 1
[data_set.d]
unit = { name = "user" }
account = { path = "ledger.db", id = "0acc0acc0acc0acc" }
secret = "file:noise.secret"
[table.t]
path = "t.parquet"
unit_column = "user"
columns = { user = "STRING" }
"""
TABLE = """
version = 1
[data_set.d]
account = { path = "ledger.db", id = "0acc0acc0acc0acc" }
secret = "file:noise.secret"
[table.t]
path = "r.csv"
coordinates = "t"
dimension.age = { type = "integer", low = 0, high = 9 }
dimension.epsilon = { type = "budget", most = 1.0 }
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


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize(
    ("read", "text", "old", "field"),
    [
        (load_job, JOB, "in.parquet", "table.t.path"),
        (load_job, JOB, "keys.csv", "job.j.public_keys"),
        (load_job, JOB, "noise.secret", "data_set.d.secret"),
        (load_job, JOB, "run.db", "job.j.store"),
        (load_job, JOB, "out", "job.j.sink.path"),
        (load_job, JOB, "ledger.db", "data_set.d.account.path"),
        (load_catalog, PROJECT, "t.parquet", "table.t.path"),
        (load_catalog, PROJECT, "noise.secret", "data_set.d.secret"),
        (load_catalog, PROJECT, "ledger.db", "data_set.d.account.path"),
        (load_config, TABLE, "r.csv", "table.t.path"),
        (load_config, TABLE, 'coordinates = "t"', "table.t.coordinates"),
        (load_config, TABLE, "noise.secret", "data_set.d.secret"),
        (load_config, TABLE, "ledger.db", "data_set.d.account.path"),
    ],
)  # fmt: skip
def test_a_url_is_refused(
    tmp_path: Path, url: str, read: object, text: str, old: str, field: str
) -> None:
    new = f'coordinates = "{url}"' if old.startswith("coordinates") else url
    got = refused(
        read,
        text,
        old,
        f"{new}.parquet" if old.endswith("t.parquet") or old == "in.parquet" else new,
        tmp_path,
    )
    assert got == field


def test_a_url_that_became_a_path_is_refused(tmp_path: Path, refused: Refused) -> None:
    refused(lambda: read_workload(Path("s3://b/w.json")))
    assert below(tmp_path, "a:b/c", "x") == tmp_path / "a:b/c"


def linked(private: Path) -> str:
    private.with_name("other.csv").symlink_to(private.name)
    return "other.csv"


def hard_linked(private: Path) -> str:
    os.link(private, private.with_name("other.csv"))
    return "other.csv"


def under_a_linked_folder(private: Path) -> str:
    private.with_name("folder").symlink_to(private.parent)
    return f"folder/{private.name}"


def roundabout(private: Path) -> str:
    return f"../{private.parent.name}/./{private.name}"


def by_a_pattern(_: Path) -> str:
    return "**/*.csv"


NAMES = (linked, hard_linked, under_a_linked_folder, roundabout, by_a_pattern)
LOOK_UP = """
[table.pages]
public = true
path = "PUBLIC"
key_columns = ["page"]
columns = { page = "STRING" }
"""


def csv_job(public: str, source: str = 'path = "private.csv"') -> str:
    return JOB.replace('path = "in.parquet"', source).replace("keys.csv", public)


def job_of_a_folder(public: str) -> str:
    """The whole folder is private."""
    return csv_job(public, 'folder = "."\nformat = "csv"')


def job_of_a_pattern(public: str) -> str:
    return csv_job(public, 'path = "priv*.csv"')


def job_that_looks_up(public: str) -> str:
    text = csv_job("keys.csv").replace('public_keys = "keys.csv"', 'query = "live.sql"')
    text = text.replace("time_column", 'columns = { page = "STRING" }\ntime_column')
    return text + LOOK_UP.replace("PUBLIC", public)


def catalog(public: str) -> str:
    private = PROJECT.replace("t.parquet", "private.csv")
    table = f'[table.p]\npath = "{public}"\npublic = true\n'
    return private + table + 'columns = { user = "STRING" }\n'


READERS: dict[str, tuple[Callable[[Path], object], Callable[[str], str], str]] = {
    "keys of a folder": (load_job, job_of_a_folder, "job.j.public_keys"),
    "keys of a pattern": (load_job, job_of_a_pattern, "job.j.public_keys"),
    "look-up": (load_job, job_that_looks_up, "table.pages.path"),
    "catalog": (load_catalog, catalog, "table p"),
}


@pytest.mark.parametrize(
    ("reader", "name"),
    [  # public keys are one file
        pair
        for pair in itertools.product(READERS, NAMES)
        if not (pair[0].startswith("keys") and pair[1] is by_a_pattern)
    ],
)
def test_one_file_is_not_private_and_public(
    tmp_path: Path, reader: str, name: Callable[[Path], str], refused: Refused
) -> None:
    read, text, field = READERS[reader]
    private = tmp_path / "private.csv"
    private.write_text("user,page,time\nSECRET,b,2024-01-01T00:00:00Z\n")
    (tmp_path / "live.sql").write_text("SELECT page FROM t JOIN pages USING (page)")
    (tmp_path / "x.toml").write_text(text(name(private)))
    error = refused(lambda: read(tmp_path / "x.toml"))
    assert error.field == field and "SECRET" not in str(error)


@pytest.mark.parametrize("reader", ["keys of a pattern", "look-up", "catalog"])
def test_a_public_file_with_the_same_rows_is_another_file(tmp_path: Path, reader: str) -> None:
    """A copy is not seen through, which limits.md says; and the fix of a refusal is this one."""
    read, text, _ = READERS[reader]
    for name in ("private.csv", "public.csv"):
        (tmp_path / name).write_text("user,page,time\n" if reader == "catalog" else "page\na\n")
    (tmp_path / "live.sql").write_text("SELECT page FROM t JOIN pages USING (page)")
    (tmp_path / "x.toml").write_text(text("public.csv"))
    assert read(tmp_path / "x.toml")


def database(uri: str, remote: str, public_uri: str, public_remote: str) -> str:
    columns = 'columns = { user = "STRING" }\n'
    private = PROJECT.replace('path = "t.parquet"', f'uri = "{uri}"\nremote = "{remote}"')
    public = f'[table.p]\nuri = "{public_uri}"\nremote = "{public_remote}"\n'
    return private + public + columns + "public = true\n"


@pytest.mark.parametrize(
    ("private", "public", "refused"),
    [
        (("sqlite:///a.db", "visits"), ("sqlite:///a.db", "Main.VISITS"), True),
        (("sqlite:///a.db", "visits"), ("sqlite:///link.db", "visits"), True),
        (("sqlite:///a.db", "visits"), ("sqlite:///a.db", "pages"), False),
        (("postgresql://a:x@h/d", "visits"), ("postgresql://b@H:5432/d", "public.visits"), True),
        (("postgresql://h/d", "visits"), ("postgresql:///d?host=h", "visits"), True),
        (("postgresql://h/d", "visits"), ("postgresql://h/d", "pages"), False),
        (("postgresql://h/d", "visits"), ("postgresql://h/e", "visits"), False),
    ],
)
def test_a_table_of_a_database_is_not_private_and_public(
    tmp_path: Path, private: tuple[str, str], public: tuple[str, str], refused: bool
) -> None:
    sqlite3.connect(tmp_path / "a.db").close()
    (tmp_path / "link.db").symlink_to("a.db")
    (tmp_path / "x.toml").write_text(database(*private, *public))
    error: DpstreamError | None = None
    try:
        load_catalog(tmp_path / "x.toml")
    except DpstreamError as refusal:
        error = refusal
    assert (error is not None and error.field == "table p") == refused
    assert refused or error is None


@pytest.mark.parametrize("name", ["visits.csv.gz", "visits.csv.ZST", "visits.csv.zip"])
def test_the_name_below_the_compression_says_the_kind(name: str) -> None:
    assert is_packed_name(name) and unpacked_name(name) == "visits.csv"


def test_a_plain_name_stays_as_it_is() -> None:
    assert (
        not is_packed_name("visits.csv") and unpacked_name("a.gz/visits.csv") == "a.gz/visits.csv"
    )


def test_far_folders_are_made_one_at_a_time(tmp_path: Path, refused: Refused) -> None:
    """Below the project's folder as many as are needed; elsewhere the last one of a path."""
    base = tmp_path / "project"
    base.mkdir()
    for near in (base / "a" / "b", tmp_path / "other", base / ".." / "other", tmp_path):
        refuse_far(near, base, "store")
    far = (tmp_path / "x" / "y", base / ".." / "x" / "y", Path("/nowhere-here"), Path("/n/x"))
    for folder in far:
        caught = refused(refuse_far, folder, base, "store")
        assert caught.field == "store"
    (tmp_path / "x").mkdir()
    refuse_far(tmp_path / "x" / "y", base, "store")


def test_a_text_with_nul_is_no_path(refused: Refused) -> None:
    refused(lambda: below(Path(), "a\0b", "store"))


def test_a_glob_is_that_of_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In trees with hidden names, links and brackets; it also finds what lies below a file."""
    rng = random.Random(1)

    def fill(folder: Path, depth: int) -> None:
        for name in ("a", "b", ".h", "x.csv", "y[1].csv", "date=1", "z.parquet"):
            kind = rng.random()
            if kind < 0.35 and depth < 4 and "." not in name[1:]:
                (folder / name).mkdir()
                fill(folder / name, depth + 1)
            elif kind < 0.75:
                (folder / name).touch()
            elif kind < 0.8:
                (folder / name).symlink_to("nowhere")

    fill(tmp_path, 0)
    monkeypatch.chdir(tmp_path)
    parts = ("*", "**", "a", "b", "*.csv", "date=*", "?", "[ab]", ".*", "x.csv", "**.csv", "")
    for _ in range(2_000):
        pattern = "/".join(rng.choice(parts) for _ in range(rng.randint(1, 4))).lstrip("/") or "a"
        pattern = f"{tmp_path}/{pattern}" if rng.random() < 0.3 else pattern
        expected = [p for p in glob.glob(pattern, recursive=True) if os.path.lexists(p)]
        assert sorted(matching(pattern)) == sorted(expected), pattern


@pytest.mark.parametrize("pattern", ["*/*.csv", "**/x.csv", "a/*"])
def test_a_folder_that_cannot_be_listed_is_not_empty(
    pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table would lose its files without a word."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.csv").touch()
    real = {name: getattr(os, name) for name in ("listdir", "scandir")}

    def failing(name: str, path: str) -> object:
        if os.path.basename(path) == "a":
            raise OSError(errno.EIO, "")
        return real[name](path)

    for name in real:
        monkeypatch.setattr(os, name, functools.partial(failing, name))
    with pytest.raises(OSError):
        matching(str(tmp_path / pattern))
    with pytest.raises(OSError):
        list(walked(tmp_path))
