"""``dpstream ledger``: its examples, and limits that are none."""

from collections.abc import Callable
from pathlib import Path

import pytest

from dpstream.pipelines.jobs.job import Job
from tests.pipelines.cli.called import call, examples_of, refused


def test_examples() -> None:
    assert len(examples_of("ledger", "show")) == 3
    assert len(examples_of("ledger", "init")) == 2


def test_a_ledgers_file_is_made_where_the_job_says(tmp_path: Path) -> None:
    """By a file that need not be a whole job; what names no ledger is refused."""
    (tmp_path / "some.toml").write_text('[ledger]\npath = "book/ledger.db"\n')
    for said in ("is made", "was there already"):
        assert said in call("ledger", "init", tmp_path / "some.toml").output
    assert (tmp_path / "book" / "ledger.db").exists()
    (tmp_path / "none.toml").write_text("ledger = 3\n")
    for name in ("none.toml", "missing.toml"):
        assert "ledger" in refused("ledger", "init", tmp_path / name)


@pytest.mark.parametrize(
    "limit",
    [["--epsilon", "1"], ["--delta", "1e-9"], ["--epsilon", "0", "--delta", "1e-9"],
     ["--epsilon", "1", "--delta", "1"]],
)  # fmt: skip
def test_half_a_limit_is_none(limit: list[str], tmp_path: Path) -> None:
    assert "--epsilon" in refused("ledger", "show", tmp_path / "ledger.db", *limit)


def test_a_job_without_a_ledger(make_job: Callable[..., Job]) -> None:
    assert "ledger" in refused("ledger", "show", make_job().path)
