"""A job of the project file: what its sections mean, and where an error about it stands."""

from pathlib import Path

import pytest

from dpstream.accounting.fields import Field
from dpstream.pipelines.jobs.job import load_job
from tests.golden.refusals import Refused
from tests.projects import write_project

DAY, HOUR = 86_400_000_000, 3_600_000_000


def test_sections_make_one_job(tmp_path: Path) -> None:
    job = load_job(write_project(tmp_path), "daily")
    plan = job.plan
    assert (job.name, job.path) == ("daily", tmp_path / "dpstream.toml")
    assert (plan.unit, plan.key, plan.event_time) == (Field("user"), (Field("page"),), "time")
    assert [aggregate.name for aggregate in plan.aggregates] == ["views", "seconds"]
    assert (plan.timeline.window, plan.timeline.trigger_every) == (DAY, 6 * HOUR)
    assert (plan.timeline.period, plan.privacy.contributions) == (DAY, 8)
    assert job.source.path == str(tmp_path / "visits/*.parquet")
    assert job.state.store == f"sqlite:{tmp_path / 'daily.store.db'}"
    assert job.ledger is None


@pytest.mark.parametrize(
    ("covers", "period"),
    [("window", DAY), ("lifetime", None), ("week", 7 * DAY), ("7 days", 7 * DAY), ("7d", 7 * DAY)],
)
def test_what_the_budget_covers(tmp_path: Path, covers: str, period: int | None) -> None:
    job = load_job(write_project(tmp_path, ('covers = "window"', f'covers = "{covers}"')))
    assert job.plan.timeline.period == period


def test_the_plan_is_the_same_wherever_the_places_are(tmp_path: Path) -> None:
    path = write_project(tmp_path, more='[env.prod]\ntable.visits.path = "/data/*.parquet"\n')
    here, there = load_job(path), load_job(path, environment="prod")
    assert here.plan == there.plan and here.plan.hash == there.plan.hash
    assert there.source.path == "/data/*.parquet"
    set_here = load_job(path, settings=["job.daily.store=spanner://pro/inst/daily"])
    assert set_here.plan == here.plan and set_here.state.path is None


def test_an_account_is_of_the_data_set_and_its_unit(tmp_path: Path) -> None:
    account = 'account = { id = "7f3a0c5d9e1b2846", path = "shop.db" }\n\n[table.visits]'
    job = load_job(write_project(tmp_path, ("\n[table.visits]", account)))
    assert job.ledger is not None
    assert (job.ledger.data_set, job.ledger.unit) == ("shop", "customer")
    assert job.ledger.path == str(tmp_path / "shop.db")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("epsilon = 4", "epsilon = -4"),
        ("delta = 1e-6", "delta = 2.0"),
        ('covers = "window"', 'covers = "windows"'),
        ("contributions = 8", "contributions = 0"),
        ("[0, 120]", "[120, 0]"),
        ('release_every = "6 hours"', 'release_every = "a while"'),
        ('end = "2024-01-08T00:00:00Z"\n', ""),
        ('table = "visits"', 'table = "visit"'),
        ('time_column = "time"\n', ""),
        ('unit_column = "user"', "public = true"),
        ('"visits/*.parquet"', '"visits/*.xlsx"'),
        ('path = "visits/*.parquet"', 'folder = "visits"'),
        ('path = "visits/*.parquet"', ""),
        ("insecure_test_secret", "secret"),
        ("contributions = 8", 'contributions = 8\npublic_keys = "no.csv"'),
        ("contributions = 8", "contributions = 8\nshards = 0"),
        ("contributions = 8", "contributions = 8\nthreads = 0"),
        ("contributions = 8", "contributions = 8\nmechanism.pre_threshold = 3.5"),
        ("contributions = 8", 'contributions = 8\nquery = "no.sql"'),
        ('path = "releases"', 'path = ""'),
    ],
)
def test_an_error_names_the_section_that_it_is_about(
    tmp_path: Path, old: str, new: str, refused: Refused
) -> None:
    refused(lambda: load_job(write_project(tmp_path, (old, new))))
