"""A job's query between its source and the flow: rows, dead letters, releases, stores.

Batches with the cells of their rows.
"""

from pathlib import Path

import apache_beam as beam
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from apache_beam.testing.util import assert_that, equal_to
from msgspec.structs import replace

from dpstream.accounting.strategies.cells.mixing import mixed
from dpstream.accounting.strategies.cells.strategy import identity
from dpstream.pipelines.connectors.files.source import batches, recorded
from dpstream.pipelines.connectors.query import (
    QueryRows,
    add_cells,
    apply_query,
    query_of,
    with_cells,
    with_query,
)
from dpstream.pipelines.connectors.write import dead_letter_folder
from dpstream.pipelines.formats.encodings import read_releases
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.pipelines.stream.run import run_job
from dpstream.pipelines.workload.registered import cells_job
from dpstream.state import open as stores
from tests.golden.refusals import Refused
from tests.pipelines.sql.visited import all_rows, rows, with_text
from tests.pipelines.workload.survey import survey, workload

_TEXT = (
    "SELECT s.section AS page, v.n AS x FROM visits AS v LEFT JOIN sections AS s "
    "ON v.page = s.page WHERE v.flag"
)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return with_text(tmp_path, _TEXT)


def _dead(folder: Path) -> list[tuple[int, int, str]]:
    files = sorted(folder.rglob("*.parquet"))
    letters = [one for file in files for one in pq.read_table(file).to_pylist()]
    return sorted((one["partition"], one["offset"], one["reason"]) for one in letters)


def test_the_same_rows_with_and_without_beam(job: Job) -> None:
    wanted = [batch.to_pylist() for batch in apply_query(job, batches(job))]
    assert wanted and all(wanted)

    def same(outputs: list[pa.RecordBatch]) -> None:
        key = lambda rows: str(rows[0])  # noqa: E731
        assert sorted((b.to_pylist() for b in outputs), key=key) == sorted(wanted, key=key)

    with beam.Pipeline() as pipeline:
        read = pipeline | beam.Create(list(batches(job)))
        assert_that(with_query(read, job), same)


def test_a_batch_of_which_nothing_stays_is_none(job: Job) -> None:
    dofn = QueryRows(query_of(job))
    dofn.setup()
    assert len(list(dofn.process(all_rows(job)))) == 1
    assert list(dofn.process(all_rows(job).slice(0, 0))) == []
    dofn.teardown()
    dofn.teardown()


def test_a_job_without_query_is_left_alone(job: Job) -> None:
    bare = replace(job, source=replace(job.source, query=None))
    inputs = [all_rows(job)]
    assert with_query(inputs, bare) is inputs and list(apply_query(bare, inputs)) == inputs


def test_bad_rows_are_dead_letters_at_their_own_positions(job: Job, tmp_path: Path) -> None:
    run_job(job)
    table, wanted = rows(), list[tuple[int, int, str]]()
    sections = {"p0": "shop", "p1": "help", "p2": "shop"}
    for i, row in enumerate(table.to_pylist()):
        if row["flag"] != "true":
            continue  # left out by the query: no dead letter
        reason = None
        if row["user"] is None:
            reason = "unit"
        elif row["page"] not in sections:
            reason = "key"
        elif row["at"] == "noon":
            reason = "time"
        elif row["n"] == "many":
            reason = "value"
        if reason is not None:
            wanted.append((i // 300, i % 300, reason))
    letters = _dead(dead_letter_folder(job))
    assert letters == sorted(wanted) and len(letters) > 30
    stores.close_all()


def test_another_text_is_refused_by_the_store(job: Job, tmp_path: Path, refused: Refused) -> None:
    run_job(job)
    path = tmp_path / "live.sql"
    text = path.read_text()
    path.write_text(text.replace("WHERE v.flag", "WHERE NOT v.flag"))
    other = load_job(tmp_path)
    assert other.plan.hash != job.plan.hash
    refused(run_job, other)
    path.write_text(text)
    (tmp_path / "sections.csv").write_text("page,section,weight\np0,other,1\n")
    refused(lambda: run_job(load_job(tmp_path)))
    stores.close_all()


def test_recorded_files_go_through_the_query_too(job: Job, tmp_path: Path) -> None:
    other = recorded(job, str(tmp_path / "in" / "0.csv"), "--proxy")
    [batch] = apply_query(other, batches(other))
    assert batch.schema.names == ["user", "at", "page", "x"]


@pytest.mark.parametrize("batch_rows", [7, 100])
def test_releases_do_not_depend_on_batches(batch_rows: int, tmp_path: Path) -> None:
    releases = []
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
        job = with_text(tmp_path / folder, _TEXT)
        if folder == "other":
            job = msgspec.structs.replace(job, batch_rows=batch_rows)
        run_job(job)
        stores.close_all()
        releases.append(read_releases(job.sink.path))
    assert releases[0].num_rows > 0 and releases[0].equals(releases[1])


def test_with_and_without_beam(tmp_path: Path) -> None:
    plain = survey(tmp_path, 50)
    job = cells_job(plain, workload(), mixed(identity(workload()), workload().sizes), False)
    read = list(batches(job))
    assert list(add_cells(plain, read)) == read
    numbers = [cell for b in add_cells(job, read) for cell in b.column("cell").to_pylist()]
    assert len(numbers) == 50 and None in numbers and max(c for c in numbers if c is not None) < 10
    with beam.Pipeline() as pipeline:
        given = pipeline | beam.Create(read)
        cells = with_cells(given, job) | beam.FlatMap(lambda b: b.column("cell").to_pylist())
        assert_that(cells, equal_to(numbers))
    assert with_cells(given, plain) is given
    assert isinstance(read[0], pa.RecordBatch)
