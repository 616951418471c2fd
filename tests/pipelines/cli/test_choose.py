"""``dpstream choose``: its examples, a place for the answer, what it says of cut and noise."""

import tomllib
from pathlib import Path

import pytest

from tests.pipelines.cli.called import call, examples_of, refused
from tests.projects import write_project


def test_examples() -> None:
    assert len(examples_of("choose")) == 4


def test_a_name_for_the_answer_is_needed(tmp_path: Path) -> None:
    project = ("--project", write_project(tmp_path))
    for flags, missing in (
        ((), "--as, --first, --epsilon"),
        (("--dry-run",), "--first, --epsilon"),
        (("--dry-run", "--epsilon", "1"), "--first"),
        (("--proxy", "old.csv"), "--as"),
    ):
        error = refused("choose", *project, *flags)
        assert f"usage: {missing}: " in error
        assert "`dpstream choose daily --first 2h --epsilon 0.5 --as chosen --project" in error


def test_a_job_of_any_name_can_be_looked_at(tmp_path: Path) -> None:
    """Without a name for the answer one is taken that a section can have."""
    write_project(tmp_path, ("[job.daily]", f"[job.{'d' * 64}]"))
    words = ("--proxy", "none.csv", "--dry-run", "--project", tmp_path)
    assert call("choose", *words).exit_code == 0


@pytest.mark.parametrize(
    ("sink", "place"),
    [
        ('kind = "kafka", topic = "clicks", servers = "s:9092"', "kafka clicks-tuned"),
        ('kind = "pubsub", topic = "projects/p/topics/t"', "pubsub projects/p/topics/t-tuned"),
        ('kind = "bigquery", table = "p.d.daily"', "bigquery p.d.tuned"),
        ('kind = "csv", path = "releases"', "releases-tuned"),
    ],
)
def test_the_new_job_writes_to_a_place_of_its_own(sink: str, place: str, tmp_path: Path) -> None:
    """The output names it, because no service makes a topic or table; so does --emit of sql."""
    changes = (('kind = "parquet", path = "releases"', sink), ("*.parquet", "*.csv"))
    path = write_project(tmp_path, *changes)
    (tmp_path / "visits").mkdir()
    (tmp_path / "old.csv").write_text("user,page,time,seconds\na,p,2024-01-01T00:00:00Z,3\n")
    words = ("--proxy", tmp_path / "old.csv", "--as", "tuned", "--project", path)
    result = call("choose", "daily", *words)
    assert result.exit_code == 0, result.output
    last = result.output.splitlines()[-1]
    made = "" if "path" in sink else ": make it before the first run"
    assert last == f"Releases    {place}{made}"
    jobs = tomllib.loads(path.read_text())["job"]
    assert jobs["daily"]["sink"] == tomllib.loads(f"sink = {{ {sink} }}")["sink"]
    assert place.rpartition(" ")[2] in jobs["tuned"]["sink"].values()
