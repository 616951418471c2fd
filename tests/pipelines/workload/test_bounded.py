"""Records of files as cells, at most C of each unit."""

from pathlib import Path

import duckdb
import numpy as np

from dpstream.pipelines.jobs.secret import secret_source
from dpstream.pipelines.workload.of_job import domain_of_job, one_shot_job
from dpstream.pipelines.workload.registered import bounded
from tests.pipelines.workload.survey import JOB, survey, workload


def test_cells_of_all_records_in_the_domain(tmp_path: Path) -> None:
    job = one_shot_job(survey(tmp_path))
    domain = domain_of_job(job, workload())
    bounded_cells = bounded(job.reading(domain.key), domain, secret_source(job).ring())
    assert bounded_cells.beyond == 0 and bounded_cells.codes.shape == (
        2000 - bounded_cells.dead_letters,
        2,
    )
    [[inside]] = duckdb.execute(
        f"SELECT count(*) FROM '{tmp_path}/records.parquet'"
        " WHERE age >= 0 AND age < 80 AND sex <> 'x'"
    ).fetchall()
    assert len(bounded_cells.codes) == inside and bounded_cells.codes.max(axis=0).tolist() == [4, 1]


def test_the_first_c_by_their_stamps(tmp_path: Path) -> None:
    """Whatever the order of rows: a unit's records are compared with each other alone."""
    import pyarrow.parquet as pq

    job = one_shot_job(survey(tmp_path, text=JOB.replace("contributions = 1", "contributions = 5")))
    domain = domain_of_job(job, workload())
    table = pq.read_table(tmp_path / "records.parquet")
    users = np.arange(table.num_rows) % 40
    table = table.set_column(0, "user", [users])
    path, counts = tmp_path / "records.parquet", []
    for order in (np.arange(len(users)), np.random.default_rng(1).permutation(len(users))):
        pq.write_table(table.take(order), path)
        bounded_cells = bounded(job.reading(domain.key), domain, secret_source(job).ring())
        assert len(bounded_cells.codes) == 200 and bounded_cells.beyond > 1000
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
    job = one_shot_job(survey(tmp_path, 0))
    domain = domain_of_job(job, workload())
    assert bounded(job.reading(domain.key), domain, secret_source(job).ring()).codes.shape == (0, 2)
