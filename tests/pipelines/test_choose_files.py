"""What is wrong with the files that a choice reads is said before it is charged."""

import gzip
import json
from pathlib import Path

import pytest

from tests.pipelines.test_choose import ASK, choose, closed, entries, job

__all__ = ["closed", "job"]


@pytest.mark.parametrize("ask", [ASK, ("--proxy", "in/a.csv", "--first", "12h")])
def test_a_file_that_is_cut_off_is_refused_before_the_charge(
    job: Path, ask: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(job.parent)
    whole = gzip.compress((job.parent / "in" / "a.csv").read_bytes())
    (job.parent / "in" / "a.csv").write_bytes(whole[:-5])
    if ask is not ASK:
        (job.parent / "in").rename(job.parent / "old")
        (job.parent / "in").mkdir()
        ask = ("--proxy", "old/a.csv", *ask[2:])
    result = choose(job, "new.toml", "--json", ask=ask)
    field = "source.path" if ask is ASK else "--proxy"
    assert result.exit_code == 2 and json.loads(result.stderr)["field"] == field
    assert entries(job) == 0
