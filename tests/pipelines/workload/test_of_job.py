"""Jobs of the project file as the jobs of workloads."""

from pathlib import Path

import pytest

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.errors import DpstreamError, PolicyError, UsageError
from dpstream.accounting.strategies.cells.mixing import mixed
from dpstream.accounting.strategies.cells.optimum import optimum
from dpstream.accounting.strategies.cells.strategy import identity
from dpstream.pipelines.workload.of_job import cells_job, with_own_places
from tests.pipelines.workload.survey import DOMAIN, JOB, survey, workload

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
    assert made.sink.dead_letter == f"{folder}/dead_letter/people-over-time"
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


@pytest.mark.parametrize(
    ("old", "new"),
    [('kind = "count"', 'kind = "units"'),
     ('kind = "count"', 'kind = "mean", column = "amount", bounds = [0, 9]'),
     ('"sex", ', '"sx", '),
     ('"sex"', '{{ column = "sex", type = "bytes" }}'),
     ("window =", 'public_keys = "keys.csv"\nwindow ='),
     ('covers = "lifetime"', 'covers = "1d"'),
     ('unit_column = "user"', 'unit_column = "cell"'),
     ("contributions = 1", "contributions = 4\nper_key_bound = 1"),
     ("contributions = 1", "contributions = 1\nmechanism.mode = 'rounds'")],
)  # fmt: skip
def test_jobs_that_do_not_fit(old: str, new: str, tmp_path: Path) -> None:
    (tmp_path / "keys.csv").write_text("sex,age\nf,1\n")
    assert old in JOB
    job = survey(tmp_path, text=JOB.replace(old, new))
    with pytest.raises((UsageError, PolicyError)):
        cells_job(job, workload(), MIXING, False)


@pytest.mark.parametrize("strategy", ["tree"])
def test_integer_nodes_are_not_mixed_over_time(strategy: str, tmp_path: Path) -> None:
    text = JOB.replace("contributions = 1", f"contributions = 1\nmechanism.strategy = '{strategy}'")
    job = survey(tmp_path, text=text)
    with pytest.raises(DpstreamError, match="integers"):
        cells_job(job, workload(), MIXING, True)
    assert cells_job(job, workload(), MIXING, False).plan.privacy.strategy == "dense"


def test_a_stream_without_end_has_no_one_answer(tmp_path: Path) -> None:
    assert 'path = "records.parquet"' in JOB
    text = JOB.replace('path = "records.parquet"', 'folder = "in"\nformat = "parquet"')
    job = survey(tmp_path, text=text.replace('end = "2024-01-03T00:00:00Z"\n', ""))
    with pytest.raises(UsageError, match="end"):
        cells_job(job, workload(), MIXING, False)


def test_texts_that_are_one() -> None:
    """Records have them in normal form; the workload itself refuses, so that plans do."""
    domain = [DOMAIN[0], {"name": "sex", "values": ["é", "e\u0301"]}]
    with pytest.raises(UsageError, match="normal form"):
        workload(domain=domain)
