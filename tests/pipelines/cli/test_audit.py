"""``dpstream audit``: its examples, and figures that prove nothing."""

from collections.abc import Callable

import pytest

from dpstream.pipelines.jobs.job import Job
from tests.pipelines.cli.called import examples_of, refused


def test_examples() -> None:
    assert "dpstream audit daily" in examples_of("audit")


@pytest.mark.parametrize(
    ("flag", "value"), [("--trials", "10"), ("--confidence", "1"), ("--seed", "-1")]
)
def test_figures_that_prove_nothing(flag: str, value: str, make_job: Callable[..., Job]) -> None:
    assert flag in refused("audit", "--project", make_job().path, flag, value)
