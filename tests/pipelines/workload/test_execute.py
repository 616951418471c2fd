"""Answers of a job's records, from end to end."""

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import duckdb
import numpy as np
import pyarrow.parquet as pq
import pytest

from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.accounting.strategies.cells.auto import auto
from dpstream.accounting.strategies.cells.strategy import identity
from dpstream.dp_transforms.noise import mixing as noise
from dpstream.pipelines.workload import execute as module
from dpstream.pipelines.workload.estimate import Estimate
from dpstream.pipelines.workload.execute import Done, Order, execute
from dpstream.pipelines.workload.release import read_release
from dpstream.state import open as stores
from tests import accounts
from tests.bench.paper.cell_baselines import haar
from tests.pipelines.workload.survey import JOB, exact, survey, workload

STRATEGY = auto(workload()).strategy


def answered(folder: Path, out: str = "out", text: str = JOB, **options: Any) -> Done:
    job = survey(folder, epsilon=options.pop("epsilon", 6.0), text=text)
    order = Order(workload(), job, options.pop("strategy", STRATEGY), folder / out)
    return execute(order._replace(**options))


def rows(folder: Path, out: str = "out") -> list[dict[str, Any]]:
    return pq.read_table(folder / out / "answers.parquet").to_pylist()


def charges(folder: Path) -> list[str]:
    with contextlib.closing(accounts.opened(folder / "ledger.db", "people")) as ledger:
        return [charge.kind for charge in ledger.entries()]


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "mixed", lambda components, mixing: np.zeros(mixing.size, np.int64))


@pytest.mark.usefixtures("silent")
def test_without_noise_answers_are_exact(tmp_path: Path) -> None:
    answered(tmp_path)
    for row in rows(tmp_path):
        assert row["value"] == exact(tmp_path, row)
    release = read_release(tmp_path / "out")
    assert release.receipt.aggregate == ("n", "count") and release.receipt.insecure
    dead = (tmp_path / "dead_letter").rglob("*")
    assert any(path.is_file() for path in dead)


@pytest.mark.usefixtures("silent")
def test_sums_at_every_trigger(tmp_path: Path) -> None:
    text = JOB.replace('kind = "count"', 'kind = "sum", column = "amount", bounds = [0, 9]')
    answered(tmp_path, text=text, over_time=True)
    answer_rows = rows(tmp_path)
    assert len(answer_rows) == 8 * workload().queries
    for row in [*answer_rows[:3], *answer_rows[-3:], *answer_rows[40:400:37]]:
        begin, until = row["window_start"], row["trigger_time"].isoformat()
        expected = exact(
            tmp_path, row, f"sum(amount) FILTER (WHERE records.at >= '{begin.isoformat()}')", until
        )
        assert row["value"] == expected


@pytest.mark.usefixtures("silent")
def test_rows_that_went_through_a_query(tmp_path: Path) -> None:
    (tmp_path / "halves.sql").write_text("SELECT age / 2 AS age, sex FROM records WHERE amount > 3")
    columns = 'columns = {{ age = "FLOAT64", sex = "STRING", amount = "INT64" }}'
    text = JOB.replace("time_column", f"{columns}\ntime_column")
    answered(tmp_path, text=text.replace("\nkey =", '\nquery = "halves.sql"\nkey ='))
    total = rows(tmp_path)[-1]["value"]
    path = tmp_path / "records.parquet"
    [[expected]] = duckdb.execute(
        f"SELECT count(*) FROM '{path}' WHERE amount > 3 AND age BETWEEN 0 AND 159.9"
        " AND sex IN ('f', 'm')"
    ).fetchall()
    assert total == expected > 0


def test_errors_are_those_of_the_release_in_its_own_units(tmp_path: Path) -> None:
    """Of sums in steps of 0.5, where the sink has each cell's sd too."""
    text = JOB.replace(
        'kind = "count"', 'kind = "sum", column = "amount", bounds = [0, 9], grid = 0.5'
    )
    done = answered(tmp_path, text=text)
    estimate = read_release(tmp_path / "out").estimate
    assert isinstance(estimate, Estimate) and done.receipt.aggregate == ("n", "sum")
    [file] = (tmp_path / "releases").rglob("*.parquet")
    released = pq.read_table(file, partitioning=None).sort_by("cell")
    assert np.array_equal(released.column("n").to_numpy(), estimate.cells[0])
    mix_matrix = estimate.mix[0] if len(estimate.mix) == 1 else np.kron(*estimate.mix)
    sds = estimate.scale[0] * np.linalg.norm(mix_matrix, axis=1)
    assert np.allclose(released.column("n_sd").to_numpy(), sds, rtol=1e-9)


def test_noise_has_the_size_that_is_said(tmp_path: Path) -> None:
    answered(tmp_path)
    answer_rows = rows(tmp_path)
    off = np.array([(row["value"] - exact(tmp_path, row)) / row["sd"] for row in answer_rows])
    assert 0.2 < np.sqrt(np.mean(off**2)) < 3 and np.abs(off).max() < 6
    receipt = read_release(tmp_path / "out").receipt
    assert receipt.mu is not None
    planned = np.concatenate(STRATEGY.variances(workload())) ** 0.5 / receipt.mu
    assert np.allclose([row["sd"] for row in answer_rows], planned, rtol=2e-3)


def test_cut_off_anywhere_it_is_one_charge_and_the_same_bytes(tmp_path: Path) -> None:
    for place in ("run_job", "write_release"):
        folder = tmp_path / place
        with mock.patch.object(module, place, side_effect=KeyboardInterrupt):
            if place == "run_job":
                from dpstream.pipelines.stream import run as stream

                with (
                    mock.patch.object(stream, "_connect", side_effect=KeyboardInterrupt),
                    mock.patch.object(module, "run_job", stream.run_job),
                    pytest.raises(KeyboardInterrupt),
                ):
                    answered(folder)
            else:
                with pytest.raises(KeyboardInterrupt):
                    answered(folder)
        stores.close_all()
        assert charges(folder) == ["workload"] and not (folder / "out").exists()
        done = answered(folder)
        assert done.result.resumed and charges(folder) == ["workload"]
        files = {path.name: path.read_bytes() for path in (folder / "out").iterdir()}
        assert answered(folder).receipt == done.receipt
        shutil.rmtree(folder / "out")
        answered(folder)
        assert {p.name: p.read_bytes() for p in (folder / "out").iterdir()} == files
        assert charges(folder) == ["workload"]


def test_another_strategy_is_another_run(tmp_path: Path) -> None:
    answered(tmp_path)
    with pytest.raises(PolicyError):
        answered(tmp_path, "second", strategy=haar(workload()))
    assert charges(tmp_path) == ["workload"]


def test_the_identity_is_a_workload_too(tmp_path: Path) -> None:
    answered(tmp_path, strategy=identity(workload()))
    assert charges(tmp_path) == ["workload"]
    receipt = read_release(tmp_path / "out").receipt
    cells = next(r for r in rows(tmp_path) if (r["age"], r["sex"]) == ("[0, 10)", "f"))
    assert receipt.mu is not None and cells["sd"] == pytest.approx(1 / receipt.mu, rel=1e-3)


def test_refused_before_a_charge(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir(parents=True)
    with pytest.raises(UsageError, match="exists"):
        answered(tmp_path)
    with pytest.raises(PolicyError):
        answered(tmp_path, "much", epsilon=950.0)
    assert not (tmp_path / "people.store.db").exists()
    assert not (tmp_path / "ledger.db").exists() or charges(tmp_path) == []


def test_the_place_of_another_answer_costs_nothing(tmp_path: Path) -> None:
    answered(tmp_path / "first", "out")
    other = tmp_path / "other"
    with pytest.raises(UsageError, match="not of this answer"):
        answered(other, "../first/out", strategy=haar(workload()))
    assert not (other / "ledger.db").exists() or charges(other) == []


def test_the_receipt_is_json(tmp_path: Path) -> None:
    answered(tmp_path, form="csv", nonnegative=True)
    receipt = json.loads((tmp_path / "out" / "release.json").read_bytes())
    assert receipt["strategy"] == STRATEGY.name and set(receipt["files"]) == {
        "answers.csv", "estimate.npz",
    }  # fmt: skip
