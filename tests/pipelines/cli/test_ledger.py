"""``dpstream ledger``: its examples, and limits that are none."""

from collections.abc import Callable
from pathlib import Path

import pytest

from dpstream.pipelines.jobs.job import Job
from tests.pipelines.cli.called import examples_of, refused


def test_examples() -> None:
    assert len(examples_of("ledger", "show")) == 2


@pytest.mark.parametrize(
    "limit",
    [["--epsilon", "1"], ["--delta", "1e-9"], ["--epsilon", "0", "--delta", "1e-9"],
     ["--epsilon", "1", "--delta", "1"]],
)  # fmt: skip
def test_half_a_limit_is_none(limit: list[str], tmp_path: Path) -> None:
    assert "--epsilon" in refused("ledger", "show", tmp_path / "ledger.db", *limit)


def test_a_job_without_a_ledger(make_job: Callable[..., Job]) -> None:
    assert "ledger" in refused("ledger", "show", make_job().path)
