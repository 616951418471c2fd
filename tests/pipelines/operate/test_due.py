"""Which releases are overdue, against a model that knows days alone; and the alarms."""

import random
import re
import shutil
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from dpstream.pipelines.jobs.job import load_job
from dpstream.pipelines.operate.due import due_at
from dpstream.pipelines.operate.metrics import DUE_METRICS, METRICS
from dpstream.pipelines.stream.completeness import Terms
from dpstream.pipelines.stream.run import run_job
from dpstream.state import open as stores
from tests.growing import JOB, released
from tests.pipelines.cli.called import call, printed
from tests.pipelines.stream.test_completeness import DAYS, WEEK, run, week, write

FIRST, LAST = date(2024, 1, 1), 90
RULES = Path(__file__).parents[3] / "deploy" / "observability" / "rules.yml"


@pytest.fixture(autouse=True)
def closed_stores() -> Iterator[None]:
    yield
    stores.close_all()


def micros(moment: datetime) -> int:
    return (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


@pytest.fixture(scope="module")
def quarter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job of 90 days whose releases, one a day, are all made."""
    folder = tmp_path_factory.mktemp("quarter")
    text = JOB.replace("KIND", "csv").replace("LATE", "0s").replace("2024-01-05", "2024-03-31")
    text = text.replace('"6h"', '"1d"').replace("shards = 3", "shards = 1")
    (folder / "dpstream.toml").write_text(text)
    (folder / "in").mkdir()
    rows = [f"{n},p,{FIRST + timedelta(n)}T12:00:00Z,1.0" for n in range(LAST)]
    (folder / "in" / "a.csv").write_text("\n".join(["user,page,at,amount", *rows, ""]))
    run_job(load_job(folder))
    stores.close_all()
    assert len(released(folder)) == LAST
    return folder


@pytest.mark.parametrize("seed", range(3))
def test_90_days_with_outages(quarter: Path, seed: int) -> None:
    """Releases come in the night, some days late, some never, some are lost again."""
    job, rng = load_job(quarter), random.Random(seed)
    out, apart = quarter / "out", quarter / "apart"
    paths = [out / f"window-{n:06d}" / "trigger-000001.parquet" for n in range(LAST)]
    comes = [n + 1 + (rng.random() < 0.15) * rng.randrange(1, 9) for n in range(LAST)]
    for n in range(30, 34):
        comes[n] = 34 + 1  # an outage, after which all come at once
    gone = {n: comes[n] + rng.randrange(1, 5) for n in rng.sample(range(LAST), 3)}
    shutil.rmtree(apart, ignore_errors=True)
    wrong = list[tuple[int, object]]()
    for day in range(LAST + 12):
        for n, path in enumerate(paths):
            there = comes[n] <= day and not gone.get(n, day + 1) <= day
            hidden = apart / f"{n}.parquet"
            hidden.parent.mkdir(exist_ok=True)
            if path.exists() and not there:
                path.rename(hidden)
            elif hidden.exists() and there:
                hidden.rename(path)
        due = [n for n in range(LAST) if n + 1 <= day]
        late = [n for n in due if not (comes[n] <= day and not gone.get(n, day + 1) <= day)]
        midnight = datetime.combine(FIRST, datetime.min.time(), UTC) + timedelta(day)
        moment = midnight + timedelta(hours=rng.randrange(24))
        through = late[0] if late else len(due)
        model = (
            [f"{FIRST + timedelta(n)}T00:00:00Z" for n in late],
            f"{FIRST + timedelta(len(due))}T00:00:00Z" if due else None,
            f"{FIRST + timedelta(through)}T00:00:00Z" if through else None,
            f"{FIRST + timedelta(day + 1)}T00:00:00Z" if day < LAST else None,
        )
        seen = due_at(job, micros(moment))
        answer = (
            [each.window for each in seen.overdue],
            seen.due_through,
            seen.out_through,
            seen.next,
        )
        if answer != model:
            wrong.append((day, answer))
    for n, path in enumerate(paths):
        if not path.exists():
            (apart / f"{n}.parquet").rename(path)
    assert wrong == []


def test_the_command_and_the_metrics(tmp_path: Path) -> None:
    folder, file = week(tmp_path / "job", days=DAYS[:6]), tmp_path / "weekly.prom"
    look = ("due", "--project", folder, "--as-of")
    assert call(*look, "2024-01-07").exit_code == 0
    before = {*folder.rglob("*")}
    outcome = call(*look, WEEK, "--metrics", file, "--json")
    fields = printed(outcome.stdout)
    assert outcome.exit_code == 5 and {*folder.rglob("*")} == before
    assert fields["missing"] == ["raw/date=2024-01-07/*.csv.gz"]
    assert fields["overdue"] == [
        {"window": "2024-01-01T00:00:00Z", "trigger_time": "2024-01-08T00:00:00Z"}
    ]
    assert figures(file)["dpstream_due_overdue_releases"] == 1
    assert "dpstream_due_out_timestamp_seconds" not in figures(file)
    result = run(folder, WEEK, Terms(incomplete=True))
    assert result.missing
    stores.close_all()
    write(folder, DAYS[6])
    outcome = call(*look, WEEK, "--metrics", file)
    assert outcome.exit_code == 0 and "date=2024-01-07" in outcome.stderr
    assert "Incomplete  window 2024-01-01T00:00:00Z, without raw/date=2024-01-07" in outcome.stdout
    values = figures(file)
    assert [*values] == [name.name for name in DUE_METRICS]
    assert values["dpstream_due_incomplete_windows"] == 1
    due, out = (values[f"dpstream_due_{name}timestamp_seconds"] for name in ("", "out_"))
    assert due == out == datetime(2024, 1, 8, tzinfo=UTC).timestamp()
    shutil.rmtree(folder / "out" / "window-000000")  # the store has it, the sink does not
    assert call(*look, WEEK).exit_code == 5
    other = tmp_path / "other.txt"
    other.write_text("mine")
    assert call(*look, WEEK, "--metrics", other).exit_code == 2


def figures(path: Path) -> dict[str, float]:
    samples = [s for f in text_string_to_metric_families(path.read_text()) for s in f.samples]
    assert all(sample.labels == {"dpstream_job": "daily"} for sample in samples)
    return {sample.name: sample.value for sample in samples}


def test_alert_rules_name_what_is_exported() -> None:
    rules = [r for g in yaml.safe_load(RULES.read_text())["groups"] for r in g["rules"]]
    exported = {name.name for name in (*METRICS, *DUE_METRICS)}
    names = {name for rule in rules for name in re.findall(r"dpstream_\w+", rule["expr"])}
    names -= {"dpstream_job"}
    assert names <= exported and len(rules) == len({rule["alert"] for rule in rules}) == 4
    assert {"dpstream_due_overdue_releases", "dpstream_due_checked_timestamp_seconds"} <= names
    prometheus = yaml.safe_load(RULES.with_name("prometheus.yml").read_text())
    assert prometheus["rule_files"] == [RULES.name]
