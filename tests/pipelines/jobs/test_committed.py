"""A job's figures against those that were committed; the life of tunings is in tuning/."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dpstream.accounting.errors import PolicyError, UsageError
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


@pytest.fixture
def job(make_job: Callable[..., Job]) -> Job:
    return make_job()


def tuned(job: Job, **fields: Any) -> Job:
    section = msgspec.structs.replace(job.section, choice=ChoiceSection(**fields))
    return msgspec.structs.replace(job, section=section)


def test_the_unit_by_name(job: Job) -> None:
    ledger = AccountPlace("book.db", "data", accounts.ID, unit="person", unit_columns=("user",))
    assert unit_of(job).name == "user"
    assert unit_of(msgspec.structs.replace(job, ledger=ledger)).name == "person"
    other = AccountPlace("book.db", "data", accounts.ID, unit="person", unit_columns=("visitor",))
    with pytest.raises(PolicyError, match="declared: person, visitor"):
        unit_of(msgspec.structs.replace(job, ledger=other))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"how": "data"}, "choice.how"),
        ({"how": "public", "run_id": "0" * 32}, "choice.how"),
        ({"how": "proxy", "mu": 1.0}, "choice.how"),
        ({"how": "private"}, "account"),
    ],
)
def test_figures_that_nobody_paid_for(fields: dict[str, Any], field: str, job: Job) -> None:
    with pytest.raises(PolicyError) as error:
        check_tuning(tuned(job, **fields))
    assert error.value.field == field


def test_public_figures_need_no_charge(job: Job) -> None:
    for free in (job, tuned(job), tuned(job, how="proxy", first="1d")):
        check_tuning(free)
    assert tuned_of(job) is None
    tuning = tuned_of(tuned(job, how="proxy", bounds=("total",)))
    assert tuning is not None and (tuning.how, tuning.bounds, tuning.run_id) == (
        "proxy", ("total",), "",
    )  # fmt: skip


def test_a_ledger_that_is_not_there_is_not_made(job: Job, tmp_path: Path) -> None:
    path = tmp_path / "book.db"
    ledger = AccountPlace(str(path), "data", accounts.ID)
    private = msgspec.structs.replace(tuned(job, how="private", run_id="0" * 32), ledger=ledger)
    with pytest.raises(UsageError) as error:
        check_tuning(private)
    assert error.value.field == "account.path" and not path.exists()


def test_without_a_store_nothing_is_committed(job: Job, tmp_path: Path) -> None:
    assert committed(job) is None
    path = tmp_path / "state.db"
    path.write_bytes(b"no store")
    state = msgspec.structs.replace(job.state, store=f"sqlite:{path}")
    assert committed(msgspec.structs.replace(job, state=state)) is None
