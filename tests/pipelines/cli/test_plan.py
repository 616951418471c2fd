"""``dpstream plan``: its examples; a load must be stated, and prices be numbers."""

import json
from collections.abc import Callable

import pytest

from dpstream.accounting.errors import UsageError
from dpstream.pipelines.cli.plan import _prices
from dpstream.pipelines.jobs.job import Job
from tests.pipelines.cli.called import call, examples_of, refused


def test_examples() -> None:
    assert len(examples_of("plan")) == 3


def test_prices_are_names_with_numbers() -> None:
    assert _prices(("a=1", "b=0.5")) == {"a": 1.0, "b": 0.5}
    assert _prices(None) == {}
    for text in ("a", "a=", "a=b", "=,"):
        with pytest.raises(UsageError) as error:
            _prices((text,))
        assert error.value.field == "--price"


def test_a_load_must_be_stated(make_job: Callable[..., Job]) -> None:
    path = make_job().path
    assert "--keys" in refused("plan", path, "--scale")
    assert "--records-per-day" in refused("plan", path, "--scale", "--keys", "5")


def test_a_plan_reads_no_data(make_job: Callable[..., Job]) -> None:
    job = make_job()  # its folder of files is empty
    said = json.loads(call("plan", job.path, "--json").output)
    assert said["plan_hash"] == job.plan.hash and said["run_id"] is None
