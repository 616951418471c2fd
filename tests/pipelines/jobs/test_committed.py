"""A job's figures against those that were committed; the life of tunings is in tuning/."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dpstream.pipelines.jobs.committed import (
    check_tuning,
    committed,
    tuned_of,
    unit_of,
)
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.project.job_section import ChoiceSection
from dpstream.state.ledger.open import AccountPlace
from tests import accounts
from tests.golden.refusals import Refused


@pytest.fixture
def job(make_job: Callable[..., Job]) -> Job:
    return make_job()


def tuned(job: Job, **fields: Any) -> Job:
    section = msgspec.structs.replace(job.section, choice=ChoiceSection(**fields))
    return msgspec.structs.replace(job, section=section)


def test_the_unit_by_name(job: Job, refused: Refused) -> None:
    ledger = AccountPlace("book.db", "data", accounts.ID, unit="person", unit_columns=("user",))
    assert unit_of(job).name == "user"
    assert unit_of(msgspec.structs.replace(job, ledger=ledger)).name == "person"
    other = AccountPlace("book.db", "data", accounts.ID, unit="person", unit_columns=("visitor",))
    refused(lambda: unit_of(msgspec.structs.replace(job, ledger=other)))


@pytest.mark.parametrize(
    "fields",
    [
        {"how": "data"},
        {"how": "public", "run_id": "0" * 32},
        {"how": "proxy", "mu": 1.0},
        {"how": "private"},
    ],
)
def test_figures_that_nobody_paid_for(fields: dict[str, Any], job: Job, refused: Refused) -> None:
    refused(lambda: check_tuning(tuned(job, **fields)))


def test_public_figures_need_no_charge(job: Job) -> None:
    for free in (job, tuned(job), tuned(job, how="proxy", first="1d")):
        check_tuning(free)
    assert tuned_of(job) is None
    tuning = tuned_of(tuned(job, how="proxy", bounds=("total",)))
    assert tuning is not None and (tuning.how, tuning.bounds, tuning.run_id) == (
        "proxy", ("total",), "",
    )  # fmt: skip


def test_a_ledger_that_is_not_there_is_not_made(job: Job, tmp_path: Path, refused: Refused) -> None:
    path = tmp_path / "book.db"
    ledger = AccountPlace(str(path), "data", accounts.ID)
    private = msgspec.structs.replace(tuned(job, how="private", run_id="0" * 32), ledger=ledger)
    error = refused(check_tuning, private)
    assert error.field == "account.path" and not path.exists()


def test_without_a_store_nothing_is_committed(job: Job, tmp_path: Path) -> None:
    assert committed(job) is None
    path = tmp_path / "state.db"
    path.write_bytes(b"no store")
    state = msgspec.structs.replace(job.state, store=f"sqlite:{path}")
    assert committed(msgspec.structs.replace(job, state=state)) is None
