"""The facts of releases, against numbers that are computed here, and in every sink of files.

The final table, against DuckDB on the same releases.
"""

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import duckdb
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy import optimize, stats

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.errors import UsageError
from dpstream.accounting.facts import PROGRAM, RunStamp, run_facts
from dpstream.dp_transforms.batches import release_schema
from dpstream.pipelines.connectors.files.sink import Verdict, compare_file
from dpstream.pipelines.connectors.final import final_in, final_schema, write_final
from dpstream.pipelines.formats.encodings import encode, read_releases, table_of_text
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.pipelines.operate import state_admin
from dpstream.pipelines.stream.run import run_job
from dpstream.state import open as stores
from tests.published import Published
from tests.reports import edit

#: Two days as periods of their own, with public keys: no threshold takes part of delta.
DAYS = (
    ('covers = "lifetime"', 'covers = "1d"'),
    ('end = "2024-01-02', 'end = "2024-01-03'),
    ("contributions = 4", 'contributions = 4\npublic_keys = "keys.csv"'),
)
PURE = (*DAYS, ("delta = 1e-9", "delta = 0.0"))
GAUSSIAN = (*DAYS, ("sink =", 'mechanism = { strategy = "blt" }\nsink ='))
PUBLICATION = '\n[job.daily.publication]\ntitle = "T"\nwithhold = "sd > 10%"\n'


def delta_of(epsilon: float, mu: float) -> float:
    """delta of mu-Gaussian differential privacy (Dong, Roth and Su 2022, corollary 1)."""
    normal = stats.norm
    return float(
        normal.cdf(-epsilon / mu + mu / 2) - math.exp(epsilon) * normal.cdf(-epsilon / mu - mu / 2)
    )


def records(folder: Path, days: int = 2) -> None:
    """Records of 400 people: three busy keys and a small one."""
    rng = np.random.default_rng(3)
    rows = ["user,key,time,value"]
    for number in range(3000 * days):
        hour = number * 24 * days // (3000 * days)
        key = "=a" if number % 20 == 0 else "bcd"[int(rng.integers(3))]
        day, of_day = divmod(hour, 24)
        time = f"2024-01-{day + 1:02d}T{of_day:02d}:30:00Z"
        rows.append(f"u{rng.integers(400)},{key},{time},{rng.integers(10)}")
    (folder / "in").mkdir(exist_ok=True)
    (folder / "in" / "a.csv").write_text("\n".join(rows) + "\n")
    (folder / "keys.csv").write_text("key\n=a\nb\nc\nd\n")


def begun(make_job: Callable[..., Job], changes: tuple[tuple[str, str], ...], **how: Any) -> Job:
    job = make_job(**how)
    records(job.path.parent)
    return edit(job, *changes)


def run(job: Job, **how: Any) -> Job:
    run_job(job, **how)
    stores.close_all()
    return job


def facts_of_file(path: Path) -> dict[str, Any]:
    return dict(json.loads(pq.read_schema(path).metadata[b"dpstream"]))


@pytest.mark.parametrize("law", ["Gaussian", "two-sided geometric"])
def test_facts_are_those_of_the_plan(make_job: Callable[..., Job], law: str) -> None:
    """Every figure is that of the project file, or follows from its epsilon and delta."""
    pure = law != "Gaussian"
    job = run(begun(make_job, PURE if pure else GAUSSIAN))
    folder = Path(job.sink.path)
    facts = facts_of_file(folder / "window-000001" / "trigger-000003.parquet")
    window, trigger = facts.pop("window"), facts.pop("trigger")
    assert window == {
        "number": 1, "start": "2024-01-02T00:00:00Z", "end": "2024-01-03T00:00:00Z",
    }  # fmt: skip
    assert trigger == {"number": 3, "of": 4, "instant": "2024-01-02T18:00:00Z"}
    assert facts == json.loads((folder / "guarantee.json").read_text())
    guarantee, lifetime = facts["guarantee"], facts["lifetime"]
    del guarantee["neighbours"]
    delta = 0.0 if pure else 1e-9
    assert guarantee == {"sound": True, "epsilon": 6.0, "delta": delta, "covers": "1 day"}
    assert lifetime["periods"] == 2 and delta <= lifetime["delta"] <= 1.00002 * delta
    if pure:
        assert lifetime["epsilon"] == pytest.approx(12.0, rel=1e-5) and lifetime["epsilon"] >= 12
    else:
        mu = optimize.brentq(lambda mu: delta_of(6.0, mu) - 1e-9, 0.01, 5, xtol=1e-14)
        twice = optimize.brentq(lambda e: delta_of(e, mu * math.sqrt(2)) - 1e-9, 1, 20, xtol=1e-12)
        assert twice - 1e-6 <= lifetime["epsilon"] <= twice * (1 + 1e-4)
    assert facts["unit"]["column"] == "user" and facts["contributions"] == 4
    assert facts["values"] == [
        {"column": "records", "kind": "count", "of": None, "bounds": None, "grid": 1.0},
        {"column": "total", "kind": "sum", "of": "value", "bounds": [0.0, 10.0], "grid": 1.0},
    ]
    assert facts["mechanism"]["noise"] == law and facts["mechanism"]["keys"] == "a public list"
    named = json.loads((folder / "run.json").read_text())
    assert facts["run"] == {
        "plan_hash": job.plan.hash, "run_id": named["run_id"], "stamps": ["INSECURE"],
        "epoch": 0, "program": PROGRAM,
    }  # fmt: skip
    pyproject = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert f'\nversion = "{PROGRAM.removeprefix("dpstream ")}"\n' in pyproject


def test_a_stream_without_end_has_no_lifetime(make_job: Callable[..., Job]) -> None:
    job = edit(
        make_job(), ('covers = "lifetime"', 'covers = "1d"'),
        ('end = "2024-01-02T00:00:00Z"\n', ""), ('path = "in/*.csv"', 'folder = "in"'),
    )  # fmt: skip
    budget = allocate(job.plan)
    facts = run_facts(job.plan, budget, RunStamp(job.plan.hash, "r", 0))
    assert facts["lifetime"] == "unbounded"
    # A further epoch costs as much again; without a guarantee there is no lifetime either.
    again = run_facts(job.plan, budget, RunStamp(job.plan.hash, "r", 1))
    assert again["guarantee"]["epsilon"] > 1.3 * facts["guarantee"]["epsilon"]
    unsound = msgspec.structs.replace(budget, has_guarantee=False)
    facts = run_facts(job.plan, unsound, RunStamp(job.plan.hash, "UNSOUND-r", 0))
    assert (facts["lifetime"], facts["run"]["stamps"]) == (None, ["UNSOUND"])


def test_a_release_of_another_program_is_the_same(fresh_published: Published) -> None:
    """Of this program other facts are damage, and so is any other byte."""
    [batch, *_] = fresh_published.batches()
    facts = batch.schema.metadata[b"dpstream"]

    def file(content: bytes | None) -> bytes:
        metadata = {**batch.schema.metadata, b"dpstream": content}
        metadata = {name: text for name, text in metadata.items() if text is not None}
        return encode(batch.replace_schema_metadata(metadata), "parquet")

    older = facts.replace(PROGRAM.encode(), b"dpstream 0.0.9").replace(b'"delta"', b'"d"')
    for content in (facts, older, None):
        assert compare_file(file(content), batch, "parquet") is Verdict.SAME
    stronger = facts.replace(b'"epsilon":20.0', b'"epsilon":0.01')
    assert stronger != facts
    assert compare_file(file(stronger), batch, "parquet") is Verdict.DAMAGED
    data = bytearray(file(older))
    data[data.index(b'"d":') + 1] ^= 1
    assert compare_file(bytes(data), batch, "parquet") is Verdict.DAMAGED


@pytest.fixture
def fresh_published(tmp_path: Path) -> Published:
    published = Published(tmp_path / "place")
    published.run('kind = "parquet"\npath = "out"')
    return published


#: The documented columns of the newest release of each window, with intervals and quality.
QUERY = """
SELECT window_start, window_end, key, records, records_sd,
       records - w * records_sd AS records_low, records + w * records_sd AS records_high,
       CASE WHEN records > 0 AND records_sd <= 0.1 * records THEN
            CASE WHEN newest = 4 THEN 'final' ELSE 'not final' END
            ELSE 'too uncertain' END AS records_quality,
       total, total_sd, total - w * total_sd AS total_low, total + w * total_sd AS total_high,
       CASE WHEN total > 0 AND total_sd <= 0.1 * total THEN
            CASE WHEN newest = 4 THEN 'final' ELSE 'not final' END
            ELSE 'too uncertain' END AS total_quality
FROM (SELECT *, 1.959963984540054 AS w, max(trigger) OVER (PARTITION BY window_start) AS newest
      FROM releases QUALIFY trigger = max(trigger) OVER (PARTITION BY window_start, key))
ORDER BY window_start, key
"""


def by_query(job: Job) -> pa.Table:
    releases = read_releases(job.sink.path, release_schema(job.plan))
    connection = duckdb.connect()
    connection.register("releases", releases)
    connection.execute("SET TimeZone = 'UTC'")
    table = connection.sql(QUERY).to_arrow_table()
    return table.cast(final_schema(job.plan))


def read_final(path: Path, job: Job) -> pa.Table:
    if path.suffix == ".parquet":
        return pq.read_table(path).replace_schema_metadata(None)
    return table_of_text(path.read_bytes(), path.suffix[1:], final_schema(job.plan))


def close(one: pa.Table, other: pa.Table) -> bool:
    """The same but for the rounding of text and of the interval."""
    for name in one.schema.names:
        a, b = one[name].to_pylist(), other[name].to_pylist()
        same = np.allclose(a, b, rtol=1e-12) if isinstance(a[0], float) else a == b
        if len(a) != len(b) or not same:
            return False
    return one.schema.names == other.schema.names


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
def test_the_final_table_is_that_of_duckdb(make_job: Callable[..., Job], kind: str) -> None:
    """After a pass that ends within a window, and at the end; each kind, and from the store."""
    rare = (
        ("sink =", "mechanism = { refresh_every = 2, select_every = 1 }\nsink =")
        if kind == "csv"
        else ("", "")
    )
    job = begun(make_job, (*DAYS[:2], rare), sink=kind)
    job.path.write_text(job.path.read_text() + PUBLICATION)
    job = load_job(job.path)
    path = Path(job.sink.path) / f"_final.{kind}"
    run(job, through="2024-01-02T19:00:00Z")
    first, expected = read_final(path, job), by_query(job)
    qualities = set(first["records_quality"].to_pylist())
    assert close(first.replace_schema_metadata(None), unguard(expected, kind))
    assert qualities == {"final", "not final", "too uncertain"} and first.num_rows >= 6
    run(job, through="end")
    second = read_final(path, job)
    assert close(second, unguard(by_query(job), kind))
    assert set(second["records_quality"].to_pylist()) == {"final", "too uncertain"}
    assert not any(p.match("releases/*/*.parquet") and p == path for p in path.parent.glob("*/*"))
    # From the store, as for services: the same bytes.
    other = path.parent.parent / f"x.{kind}"
    with mock.patch.object(type(job.sink), "folder", None):
        state_admin.final(job, other)
    assert other.read_bytes() == path.read_bytes()


def unguard(table: pa.Table, kind: str) -> pa.Table:
    """CSV has an apostrophe before what a spreadsheet would compute."""
    if kind != "csv":
        return table
    keys = ["'" + key if key.startswith("=") else key for key in table["key"].to_pylist()]
    return table.set_column(2, "key", pa.array(keys))


def test_a_table_is_whole_or_the_old_one(make_job: Callable[..., Job]) -> None:
    """Cut off while it is written the old one stays; another file is never replaced."""
    job = run(begun(make_job, DAYS))
    path = Path(job.sink.path) / "_final.parquet"
    before = path.read_bytes()

    class Killed(BaseException):
        pass

    with mock.patch.object(os, "replace", side_effect=Killed), pytest.raises(Killed):
        write_final(final_in(job, path.parent), job, path)
    assert path.read_bytes() == before
    write_final(final_in(job, path.parent), job, path)
    assert path.read_bytes() == before
    releases = path.parent / "window-000000" / "trigger-000004.parquet"
    (path.parent / "mine.csv").write_text("user\n1\n")
    (path.parent / "empty.csv").touch()  # a table of CSV has a header
    for foreign in (releases, path.parent / "mine.csv", path.parent / "empty.csv"):
        content = foreign.read_bytes()
        with pytest.raises(UsageError):
            state_admin.final(job, foreign)
        assert foreign.read_bytes() == content


def test_a_run_says_that_its_table_was_not_written(make_job: Callable[..., Job]) -> None:
    job = run(begun(make_job, DAYS))
    path = Path(job.sink.path) / "_final.parquet"
    path.unlink()
    path.mkdir()
    texts: list[Any] = []
    run_job(job, warn=texts.append)
    stores.close_all()
    assert len(texts) == 1 and "`dpstream state final daily`" in texts[0]
    shutil.rmtree(path)
    state_admin.final(job, path)
    assert pq.read_table(path).num_rows == 8
