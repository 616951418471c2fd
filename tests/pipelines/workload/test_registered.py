"""A job's records as cells, and answers through the account, from end to end."""

import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import duckdb
import numpy as np
import pyarrow.parquet as pq
import pytest

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.strategies.cells.fitted import fit
from dpstream.accounting.strategies.cells.mixing import mixed
from dpstream.accounting.strategies.cells.optimum import optimum
from dpstream.accounting.strategies.cells.residual import residual
from dpstream.accounting.strategies.cells.strategy import identity
from dpstream.accounting.workloads.workload import Workload
from dpstream.dp_transforms import residual as noise
from dpstream.dp_transforms.noise.oneshot import OneShot
from dpstream.pipelines.ask.question import Asking
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.jobs.secret import secret_source
from dpstream.pipelines.workload import registered
from dpstream.pipelines.workload.registered import (
    Answered,
    Mechanism,
    Rows,
    answer_once,
    asked_once,
    bounded,
    cells_job,
    pure_mechanism,
    table_mechanism,
    with_own_places,
)
from dpstream.pipelines.workload.release import read_release
from tests.golden.pinned import check, of_refusals
from tests.golden.refusals import Refused
from tests.pipelines.workload.survey import DOMAIN, JOB, charges, exact, rows, survey, workload

MIXING = mixed(optimum(workload()).strategy, workload().sizes)


def test_once_and_over_time(tmp_path: Path) -> None:
    job = survey(tmp_path)
    once, often = (cells_job(job, workload(), MIXING, over) for over in (False, True))
    assert (once.plan.timeline.windows, once.plan.timeline.triggers) == (1, 1)
    assert often.plan.timeline == job.plan.timeline
    for made in (once, often):
        assert made.plan.cells is not None and made.plan.cells.digest == MIXING.digest
        assert [field.column for field in made.key] == ["age", "sex"]
        assert set(made.columns) == {"user", "age", "sex", "at"}
        assert allocate(made.plan).mu > 0
    assert once.plan.hash != often.plan.hash


SINK = 'kind = "parquet", path = "releases"'


@pytest.mark.parametrize(
    ("sink", "field", "place"),
    [
        ('kind = "kafka", topic = "cells", servers = "s:9092"', "topic", "cells-over-time"),
        ('kind = "pubsub", topic = "projects/p/topics/t"', "topic",
         "projects/p/topics/t-over-time"),
        ('kind = "bigquery", table = "p.d.t"', "table", "p.d.t-over-time"),
        ('kind = "csv", path = "."', "path", "{folder}/over-time"),
        ('kind = "csv", path = "../out"', "path", "{above}/out-over-time"),
    ],
)  # fmt: skip
def test_places_over_time(sink: str, field: str, place: str, tmp_path: Path) -> None:
    """Where the job's are, and with no part in the plan; a database holds one run."""
    job = survey(tmp_path / "project", text=JOB.replace(SINK, sink))
    made = with_own_places(job)
    folder = tmp_path / "project"
    assert getattr(made.sink, field) == place.format(folder=folder, above=tmp_path)
    assert made.state.path == folder / "people.store-over-time.db"
    assert made.dead_letter == f"{folder}/dead_letter/people-over-time"
    assert made.plan.hash == job.plan.hash and job.state.path == folder / "people.store.db"
    spanner = JOB.replace("contributions", 'store = "spanner://p/i/d"\ncontributions')
    job = survey(tmp_path / "other", text=spanner)
    assert with_own_places(job).state == job.state


def test_the_domain_is_part_of_the_plan(tmp_path: Path) -> None:
    """Other edges put other records into the same cells: never with the same noise."""
    job, hashes = survey(tmp_path), set()
    moved = [{"name": "age", "edges": [0, 10, 20, 40, 65, 80]}, DOMAIN[1]]
    turned = [DOMAIN[0], {"name": "sex", "values": ["m", "f"]}]
    for domain in (DOMAIN, moved, turned):
        for strategy in (None, identity(workload())):
            mixing = MIXING if strategy is None else mixed(strategy, workload().sizes)
            hashes.add(cells_job(job, workload(domain=domain), mixing, False).plan.hash)
    assert len(hashes) == 6


#: What of a job is changed, by what is then refused of it: of a run with a store.
STRANGE: dict[str, tuple[str, str]] = {
    "units": ('kind = "count"', 'kind = "units"'),
    "a mean": ('kind = "count"', 'kind = "mean", column = "amount", bounds = [0, 9]'),
    "another column": ('"sex", ', '"sx", '),
    "bytes": ('"sex"', '{{ column = "sex", type = "bytes" }}'),
    "a list of keys": ("window =", 'public_keys = "keys.csv"\nwindow ='),
    "a budget of days": ('covers = "lifetime"', 'covers = "1d"'),
    "a column of cells": ('unit_column = "user"', 'unit_column = "cell"'),
    "a bound of a key": ("contributions = 1", "contributions = 4\nper_key_bound = 1"),
}
#: The same of answers without a store.
STRANGE_ONCE = {
    "a sum": ('kind = "count"', 'kind = "sum", column = "amount", bounds = [0, 9]'),
    "no account": ("account =", "not_an_account ="),
    "a budget of days": ('covers = "lifetime"', 'covers = "1d"'),
    "a bound of a key": ("contributions = 1", "contributions = 1\nper_key_bound = 1"),
    "a limit": ("epsilon = 900.0", "epsilon = 1.0"),
    "another column": ('"sex"', '"amount"'),
}


def test_what_is_refused_before_a_charge(tmp_path: Path) -> None:
    jobs, calls = dict[str, Job](), dict[str, Callable[[], object]]()
    for name, (old, new) in STRANGE.items():
        assert old in JOB
        folder = tmp_path / "stored" / name
        folder.mkdir(parents=True)
        (folder / "keys.csv").write_text("sex,age\nf,1\n")
        jobs[name] = survey(folder, text=JOB.replace(old, new))
    tree = JOB.replace("contributions = 1", "contributions = 1\nmechanism.strategy = 'tree'")
    jobs["integers over time"] = survey(tmp_path / "stored" / "tree", text=tree)
    endless = JOB.replace('path = "records.parquet"', 'folder = "in"\nformat = "parquet"')
    endless = endless.replace('end = "2024-01-03T00:00:00Z"\n', "")
    jobs["no end"] = survey(tmp_path / "stored" / "endless", text=endless)
    for name, job in jobs.items():
        calls[name] = partial(cells_job, job, workload(), MIXING, "over time" in name)
    for name, (old, new) in STRANGE_ONCE.items():
        text = re.sub(r"(?m)^account = .*\n", "", JOB) if "not_a" in new else JOB.replace(old, new)
        assert text != JOB
        calls[f"once: {name}"] = partial(answered, tmp_path / name, "tables", text=text)
    job = survey(tmp_path / "job")
    absent = workload([{"ways": 1}], [*DOMAIN, {"name": "absent", "size": 2}])
    # Of the sexes only totals are measured.
    ages = workload([{"factors": {"age": "range"}}])
    pure, tables = pure_mechanism(ages, job, strategies(job)), mechanism("tables", job)[1]
    large = [{"name": name, "size": 2500} for name in "ab"] + [{"name": "c", "size": 2}]
    long = [{"name": "a", "size": 9000}, {"name": "b", "size": 2}]
    many = [{"name": name, "size": 257} for name in "abc"]
    out = tmp_path / "job" / "out"
    calls |= {
        "totals that are not negative": lambda: answer_once(ages, job, pure, out, nonnegative=True),
        "tables that are not negative": lambda: answer_once(
            TABLES, job, tables, out, nonnegative=True
        ),
        "an attribute that is no column": lambda: answer_once(
            absent, job, table_mechanism(absent, residual(absent)[0], job), out
        ),
        "no tables": lambda: table_mechanism(TABLES, identity(TABLES), job),
        "texts that are one": lambda: workload(
            domain=[DOMAIN[0], {"name": "sex", "values": ["é", "e\u0301"]}]
        ),
        "a folder that exists": lambda: answered(tmp_path / "taken", "pure"),
        **{
            name: partial(_tables_of, domain, ways, job)
            for name, domain, ways in (
                ("a table too large", large, 2), ("an attribute too large", long, 1),
                ("numbers too many", many, 3),
            )
        },
    }  # fmt: skip
    (tmp_path / "taken" / "out").mkdir(parents=True)
    check(Path(__file__).with_name("refusals_registered.txt"), of_refusals(calls))
    accounts_made = [path for path in tmp_path.rglob("ledger.db") if charges(path.parent)]
    assert accounts_made == []


def _tables_of(domain: list[dict[str, Any]], ways: int, job: Job) -> Mechanism:
    query_set = workload([{"ways": ways}], domain)
    return table_mechanism(query_set, residual(query_set)[0], job)


def test_integer_nodes_are_mixed_once(tmp_path: Path) -> None:
    text = JOB.replace("contributions = 1", "contributions = 1\nmechanism.strategy = 'tree'")
    job = cells_job(survey(tmp_path, text=text), workload(), MIXING, False)
    assert job.plan.privacy.strategy == "dense"


def cells_of(job: Job) -> Rows:
    """The cells of a job's records."""
    job, domain = asked_once(workload(), job)
    return bounded(job.with_key(domain.key), domain, secret_source(job).ring())


def test_cells_of_all_records_in_the_domain(tmp_path: Path) -> None:
    bounded_cells = cells_of(survey(tmp_path))
    assert bounded_cells.codes.shape == (2000 - bounded_cells.dead_letters, 2)
    [[inside]] = duckdb.execute(
        f"SELECT count(*) FROM '{tmp_path}/records.parquet'"
        " WHERE age >= 0 AND age < 80 AND sex <> 'x'"
    ).fetchall()
    assert len(bounded_cells.codes) == inside and bounded_cells.codes.max(axis=0).tolist() == [4, 1]


def test_the_first_c_by_their_stamps(tmp_path: Path) -> None:
    """Whatever the order of rows: a unit's records are compared with each other alone."""
    job = survey(tmp_path, text=JOB.replace("contributions = 1", "contributions = 5"))
    table = pq.read_table(tmp_path / "records.parquet")
    users = np.arange(table.num_rows) % 40
    table = table.set_column(0, "user", [users])
    path, counts = tmp_path / "records.parquet", []
    for order in (np.arange(len(users)), np.random.default_rng(1).permutation(len(users))):
        pq.write_table(table.take(order), path)
        bounded_cells = cells_of(job)
        assert len(bounded_cells.codes) == 200
        counts.append(
            np.bincount(bounded_cells.codes[:, 0] * 2 + bounded_cells.codes[:, 1], minlength=10)
        )
    rows = duckdb.execute(
        f"""SELECT age, sex FROM '{path}' WHERE age >= 0 AND age < 80 AND sex <> 'x'
        QUALIFY row_number() OVER (PARTITION BY "user" ORDER BY "at") <= 5"""
    ).fetchall()
    age, sex = zip(*rows, strict=True)
    bins = np.digitize(age, [0, 10, 20, 40, 65.5, 80]) - 1
    expected = np.bincount(bins * 2 + (np.array(sex) == "m"), minlength=10)
    for found_counts in counts:
        assert np.abs(found_counts - expected).sum() <= 4  # ties of a unit's stamps
    assert np.abs(counts[0] - counts[1]).sum() <= 4


def test_nothing(tmp_path: Path) -> None:
    assert cells_of(survey(tmp_path, 0)).codes.shape == (0, 2)


RANGES = workload([{"factors": {"age": "range", "sex": "identity"}}])
TABLES = workload([{"ways": 2}, {"ways": 1}, {"factors": {}}])
#: Ages are measured by a basis that is fitted to ranges.
FITTED = workload([
    {"factors": {"age": "range", "sex": "identity"}}, {"weight": 3, "factors": {"age": "range"}},
])  # fmt: skip
KINDS = ("pure", "tables", "fitted")


def strategies(job: Job) -> Path:
    """A cache beside the ledger."""
    assert job.ledger is not None
    return Path(job.ledger.path).parent / "strategies"


def mechanism(kind: str, job: Job) -> tuple[Workload, Mechanism]:
    if kind == "pure":
        return RANGES, pure_mechanism(RANGES, job, strategies(job))
    if kind == "fitted":
        return FITTED, table_mechanism(FITTED, fit(FITTED).strategy, job)
    return TABLES, table_mechanism(TABLES, residual(TABLES)[0], job)


def answered(folder: Path, kind: str, out: str = "out", **options: Any) -> Answered:
    job = survey(folder, text=options.pop("text", JOB))
    query_set, chosen = mechanism(kind, job)
    return answer_once(query_set, job, chosen, folder / out, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_without_noise_answers_are_exact(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        OneShot, "discrete_laplace", lambda self, items, scale: np.zeros(len(items), np.int64)
    )
    monkeypatch.setattr(noise, "mixed", lambda c, m: np.zeros(m.size, np.int64))
    done = answered(tmp_path, kind)
    assert done.charged and done.dead_letters > 100
    for row in rows(tmp_path):
        assert row["value"] == pytest.approx(exact(tmp_path, row), abs=1e-6)


def test_costs(tmp_path: Path) -> None:
    # Of less epsilon: geometric noise of cells is mostly 0 at 6, and rarely far beyond its sd.
    answered(tmp_path, "pure", text=JOB.replace("{epsilon}", "0.5", 1))
    answered(tmp_path, "tables", "other")
    answered(tmp_path, "fitted", "fitted")
    pure, tables, fitted = charges(tmp_path)
    assert (pure.kind, pure.epsilon, pure.delta, pure.mu, pure.rho) == (
        "workload",
        0.5,
        0,
        None,
        None,
    )
    assert (tables.epsilon, tables.delta) == (6.0, 1e-9) and tables.mu is not None
    planned = np.concatenate(residual(TABLES)[0].variances(TABLES)) ** 0.5 / tables.mu
    sds = pq.read_table(tmp_path / "other" / "answers.parquet").column("sd").to_numpy()
    assert np.allclose(sds, planned, rtol=1e-6)
    assert (fitted.epsilon, fitted.delta, fitted.mu) == (6.0, 1e-9, tables.mu)
    planned = np.concatenate(fit(FITTED).strategy.variances(FITTED)) ** 0.5 / tables.mu
    sds = pq.read_table(tmp_path / "fitted" / "answers.parquet").column("sd").to_numpy()
    assert np.allclose(sds, planned, rtol=1e-6)
    for out in ("out", "fitted"):
        off = [(row["value"] - exact(tmp_path, row)) / row["sd"] for row in rows(tmp_path, out)]
        assert 0.1 < np.sqrt(np.mean(np.square(off))) < 4


def test_answers_of_fitted_tables_agree(tmp_path: Path) -> None:
    """Whatever was asked of one release: a range is the difference of two prefixes."""
    answered(tmp_path, "fitted")
    estimate = read_release(tmp_path / "out").estimate
    query_set = workload([
        {"factors": {"age": "range"}}, {"factors": {"age": "identity", "sex": "identity"}},
        {"factors": {"age": "prefix"}}, {"factors": {}},
    ])  # fmt: skip
    [answers] = estimate.answers(query_set)
    ranges, cells, prefixes, total = np.split(answers.estimates, [15, 25, 30])
    assert np.allclose(ranges[:5], prefixes) and prefixes[-1] == pytest.approx(total[0])
    assert np.allclose(np.cumsum(cells.reshape(5, 2).sum(1)), prefixes)


@pytest.mark.parametrize("kind", KINDS)
def test_cut_off_anywhere_it_is_one_charge_and_the_same_bytes(kind: str, tmp_path: Path) -> None:
    for place in ("bounded", "answers", "write_release"):
        with (
            mock.patch.object(registered, place, side_effect=KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            answered(tmp_path, kind)
        assert len(charges(tmp_path)) == 1 and not (tmp_path / "out").exists()
    done = answered(tmp_path, kind)
    assert not done.charged
    files = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert answered(tmp_path, kind).receipt == done.receipt
    shutil.rmtree(tmp_path / "out")
    answered(tmp_path, kind)
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == files
    assert len(charges(tmp_path)) == 1
    # Another form is made of the same estimate.
    assert answered(tmp_path, kind, "csv", form="csv").receipt.run_id == done.receipt.run_id
    assert (tmp_path / "csv" / "answers.csv").exists() and len(charges(tmp_path)) == 1


def test_other_records_are_no_other_question(tmp_path: Path) -> None:
    first = answered(tmp_path, "tables")
    table = pq.read_table(tmp_path / "records.parquet").slice(1)
    job = survey(tmp_path)
    pq.write_table(table, tmp_path / "records.parquet")
    query_set, chosen = mechanism("tables", job)
    again = answer_once(query_set, job, chosen, tmp_path / "second")
    assert not again.charged and again.receipt == first.receipt
    fresh = Asking(fresh=True)
    other = answer_once(query_set, job, chosen, tmp_path / "third", how=fresh)
    assert other.charged and other.receipt.run_id != first.receipt.run_id
    one, two = (read_release(tmp_path / out).estimate for out in ("out", "third"))
    assert not np.array_equal(one.measured[0], two.measured[0])  # type: ignore[union-attr]
    assert len(charges(tmp_path)) == 2


def test_without_the_archive_nothing_is_drawn_again(tmp_path: Path) -> None:
    answered(tmp_path, "pure")
    shutil.rmtree(tmp_path / "ledger.db.answers")
    calls = {"no archive": partial(answered, tmp_path, "pure", "elsewhere")}
    check(Path(__file__).with_name("refusals_archive.txt"), of_refusals(calls))
    assert len(charges(tmp_path)) == 1


def test_no_more_than_c_records_of_a_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "mixed", lambda c, m: np.zeros(m.size, np.int64))
    for limit in (1, 3):
        folder = tmp_path / str(limit)
        job = survey(folder, text=JOB.replace("contributions = 1", f"contributions = {limit}"))
        table = pq.read_table(folder / "records.parquet")
        table = table.set_column(0, "user", [np.zeros(table.num_rows, np.int64)])
        pq.write_table(table, folder / "records.parquet")
        query_set, chosen = mechanism("tables", job)
        answer_once(query_set, job, chosen, folder / "out")
        assert rows(folder)[-1]["value"] == limit


def test_windows_of_the_job_do_not_matter_for_one_answer(tmp_path: Path) -> None:
    slide = 'end = "2024-01-03T00:00:00Z"\nslide = "6h"\n'
    text = JOB.replace('end = "2024-01-03T00:00:00Z"\n', slide)
    assert text != JOB and answered(tmp_path, "tables", text=text).charged


@pytest.mark.parametrize("kind", ["pure", "tables"])
def test_the_place_of_another_answer_costs_nothing(
    kind: str, tmp_path: Path, refused: Refused
) -> None:
    answered(tmp_path, "pure" if kind == "tables" else "tables")
    refused(answered, tmp_path, kind)
    assert len(charges(tmp_path)) == 1
