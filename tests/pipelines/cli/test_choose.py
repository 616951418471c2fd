"""``dpstream choose``: its examples, a place for the answer, what it says of cut and noise."""

import tomllib
from pathlib import Path

import pytest

from dpstream.accounting.tuning.answer import PerKey
from dpstream.pipelines.cli.choose import outcome_text, plan_text
from dpstream.pipelines.tuning.choose import Outcome
from tests.pipelines.cli.called import call, examples_of, refused
from tests.projects import write_project


def test_examples() -> None:
    assert len(examples_of("choose")) == 4


def test_a_name_for_the_answer_is_needed(tmp_path: Path) -> None:
    project = ("--project", write_project(tmp_path))
    assert "--as" in refused("choose", *project)
    assert "--first" in refused("choose", *project, "--dry-run")


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


def test_words_say_what_it_costs() -> None:
    public = {
        "how": "private", "rule": "R", "bias": "B", "epsilon": 0.5, "delta": 1e-9, "mu": 0.1,
        "histograms": [{"name": "pairs", "candidates": 7, "rank_error_95": 12.0,
                        "units_for_5_points": 1000, "no_answer_below": 30}], "warnings": [],
    }  # fmt: skip
    rendered = plan_text(public)
    assert rendered.startswith("Cost        (0.5") and "good from 1,000 units" in rendered
    assert "without noise" in plan_text({**public, "how": "proxy"})


def test_words_say_what_is_cut() -> None:
    outcome = Outcome(
        job="new", releases="releases-new", how="proxy", contributions=80, bounds={}, cut=0.31,
        sd=232.0,
        per_key=(PerKey(1, 448, 0.07, 128.0), PerKey(4, 200, 0.2, 250.0)), notes=(), run_id=None,
        resumed=False, insecure=False,
    )  # fmt: skip
    rendered = outcome_text(outcome, 1_000)
    assert (
        "Cut         about 31% of all pairs" in rendered and "is about 310 short, ±232" in rendered
    )
    assert "or per_key_bound = 1, contributions = 448: cuts about 7%" in rendered
    assert "beyond 4 records of a key" in rendered and "Job         new" in rendered
    assert rendered.endswith("Releases    releases-new\n")
    private = outcome_text(outcome._replace(run_id="ab"), 1_000)
    assert "at least about 31%" in private and "not seen" in private
    old = outcome_text(outcome._replace(cut=None, sd=None, per_key=()), 1_000)
    assert "Cut" not in old and "Noise" not in old
