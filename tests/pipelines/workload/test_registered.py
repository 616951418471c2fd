"""Answers through the register, from end to end."""

import contextlib
import re
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow.parquet as pq
import pytest

from dpstream.accounting.errors import DpstreamError, PolicyError, UsageError
from dpstream.accounting.strategies.cells.fitted import fit
from dpstream.accounting.strategies.cells.residual import residual
from dpstream.accounting.strategies.cells.strategy import identity
from dpstream.accounting.workloads.workload import Workload
from dpstream.dp_transforms import residual as noise
from dpstream.dp_transforms.noise.oneshot import OneShot
from dpstream.pipelines.ask.question import Asking
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.workload import planning, registered
from dpstream.pipelines.workload.registered import (
    Answered,
    Mechanism,
    answer_once,
    pure_mechanism,
    table_mechanism,
)
from dpstream.pipelines.workload.release import read_release
from dpstream.state.ledger.events import Charge
from tests import accounts
from tests.pipelines.workload.survey import DOMAIN, JOB, exact, survey, workload

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


def charges(folder: Path) -> list[Charge]:
    with contextlib.closing(accounts.opened(folder / "ledger.db", "people")) as ledger:
        return ledger.entries()


def rows(folder: Path, out: str = "out") -> list[dict[str, Any]]:
    return pq.read_table(folder / out / "answers.parquet").to_pylist()


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
    with pytest.raises(PolicyError) as caught:
        answered(tmp_path, "pure", "elsewhere")
    assert "--fresh" in caught.value.fix and len(charges(tmp_path)) == 1


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


@pytest.mark.parametrize(
    ("old", "new"),
    [('end = "2024-01-03T00:00:00Z"\n', 'end = "2024-01-03T00:00:00Z"\nslide = "6h"\n'),
     ('kind = "count"', 'kind = "sum", column = "amount", bounds = [0, 9]'),
     ("account =", "not_an_account ="), ('covers = "lifetime"', 'covers = "1d"'),
     ("contributions = 1", "contributions = 1\nper_key_bound = 1"),
     ("epsilon = 900.0", "epsilon = 1.0"), ('"sex"', '"amount"')],
)  # fmt: skip
def test_refused_before_a_charge(old: str, new: str, tmp_path: Path) -> None:
    assert old in JOB
    text = JOB.replace(old, new)
    if "slide" in new:  # windows of the job do not matter for one answer
        assert answered(tmp_path, "tables", text=text).charged
        return
    if "not_a" in new:
        text = re.sub(r"(?m)^account = .*\n", "", JOB)
    with pytest.raises(DpstreamError):
        answered(tmp_path, "tables", text=text)
    assert not (tmp_path / "ledger.db").exists() or charges(tmp_path) == []


@pytest.mark.parametrize("kind", ["pure", "tables"])
def test_what_cannot_be_written_is_not_charged(kind: str, tmp_path: Path) -> None:
    job = survey(tmp_path)
    query_set, chosen = mechanism(kind, job)
    if kind == "pure":  # of the sexes only totals are measured
        query_set = workload([{"factors": {"age": "range"}}])
        chosen = pure_mechanism(query_set, job, strategies(job))
    with pytest.raises(UsageError, match="all cells"):
        answer_once(query_set, job, chosen, tmp_path / "out", nonnegative=True)
    absent = workload([{"ways": 1}], [*DOMAIN, {"name": "absent", "size": 2}])
    chosen = table_mechanism(absent, residual(absent)[0], job)
    with pytest.raises(UsageError, match="absent"):
        answer_once(absent, job, chosen, tmp_path / "out")
    assert not (tmp_path / "ledger.db").exists() or charges(tmp_path) == []
    answered(tmp_path, "pure" if kind == "tables" else "tables")
    with pytest.raises(UsageError, match="not of this answer"):
        answered(tmp_path, kind)
    assert len(charges(tmp_path)) == 1


@pytest.mark.parametrize("sizes", [(9000,), (2500, 2500)])
def test_tables_too_large_to_be_noised(sizes: tuple[int, ...], tmp_path: Path) -> None:
    domain = [{"name": f"a{k}", "size": size} for k, size in enumerate(sizes)]
    large = workload([{"ways": len(sizes)}], [*domain, {"name": "b", "size": 2}])
    with pytest.raises(UsageError, match="smaller tables"):
        table_mechanism(large, residual(large)[0], survey(tmp_path))


def test_strategies_and_places_that_do_not_fit(tmp_path: Path) -> None:
    job = survey(tmp_path)
    with pytest.raises(UsageError):
        table_mechanism(TABLES, identity(TABLES), job)
    with (
        mock.patch.object(planning, "MAX_PUBLISHED", 3),
        pytest.raises(UsageError, match="published"),
    ):
        mechanism("tables", job)
    (tmp_path / "out").mkdir()
    with pytest.raises(UsageError, match="exists"):
        answered(tmp_path, "pure")
    assert charges(tmp_path) == []
