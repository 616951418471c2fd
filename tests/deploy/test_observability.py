"""Dashboards and scrape configuration: every metric exists, nothing private in the public one."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from dpstream.dp_transforms.telemetry import PRIVATE_COUNTERS
from dpstream.pipelines.operate.metrics import METRICS, runner_name
from tests.deploy.scripts import load

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "observability"
dashboards = load("observability/dashboards.py")
FILES, dashboard, text = dashboards.FILES, dashboards.dashboard, dashboards.text
#: PromQL's own words, and labels.
WORDS = {"rate", "sum", "by", "le", "stage", "histogram_quantile", "time"}


def expressions(board: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in board["panels"] for target in panel["targets"]]


def metrics_in(expression: str) -> set[str]:
    """Names of metrics in an expression, without a histogram's suffix."""
    plain = re.sub(r"\[[^]]*\]", "", expression)
    names = set(re.findall(r"[a-zA-Z_:][a-zA-Z0-9_:]*", plain)) - WORDS
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}


#: Metrics of each dashboard: of the job's own process, or private ones of Flink's workers.
SIDES = {
    True: {name.name for name in METRICS},
    False: {runner_name(name) for name in PRIVATE_COUNTERS},
}


def foreign(board: dict[str, Any], public: bool) -> set[str]:
    """Metrics of a dashboard that are not of its side."""
    return set().union(*map(metrics_in, expressions(board))) - SIDES[public]


@pytest.mark.parametrize("public", [True, False])
def test_the_files_are_what_the_list_gives(public: bool) -> None:
    """After a change:
    ``python deploy/observability/dashboards.py``."""
    assert (FOLDER / FILES[public]).read_text(encoding="utf-8") == text(public)


@pytest.mark.parametrize("public", [True, False])
def test_every_metric_exists_and_is_of_its_side(public: bool) -> None:
    board = json.loads((FOLDER / FILES[public]).read_text())
    assert expressions(board) and foreign(board, public) == set()
    if public:
        assert "operator" not in json.dumps(board)


@pytest.mark.parametrize("public", [True, False])
def test_every_metric_is_shown(public: bool) -> None:
    assert SIDES[public] <= set().union(*map(metrics_in, expressions(dashboard(public))))


def test_an_operators_metric_in_the_public_one_would_be_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leak = dashboards.Panel("x", "s", (("rate(dpstream_operator_records_in_total[5m])", "x"),))
    monkeypatch.setattr(dashboards, "PUBLIC", (*dashboards.PUBLIC, leak))
    assert foreign(dashboard(True), True) == {"dpstream_operator_records_in_total"}
    typing_error = leak._replace(queries=(("dpstream_step_committed_total", "x"),))
    monkeypatch.setattr(dashboards, "PUBLIC", (typing_error,))
    assert foreign(dashboard(True), True)


def test_grafana_can_place_the_panels() -> None:
    for public in FILES:
        board = dashboard(public)
        places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in board["panels"]]
        assert len(set(places)) == len(places)
        assert len({p["id"] for p in board["panels"]}) == len(places)
        for panel in board["panels"]:
            refs = [target["refId"] for target in panel["targets"]]
            assert len(set(refs)) == len(refs) and all(ref.isalpha() for ref in refs)


def relabelled(rules: list[dict[str, Any]], name: str) -> str | None:
    """What Prometheus makes of a metric's name; ``None`` where it is dropped."""
    for rule in rules:
        assert rule["source_labels"] == ["__name__"]
        match = re.fullmatch(rule["regex"], name)
        if rule.get("action", "replace") == "replace":
            if match:
                assert rule["target_label"] == "__name__"
                name = match.expand(rule["replacement"].replace("${1}", r"\g<1>"))
        elif bool(match) != (rule["action"] == "keep"):
            return None
    return name


def scrapes(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Job -> its relabelling rules."""
    jobs = yaml.safe_load(path.read_text())["scrape_configs"]
    return {job["job_name"]: job.get("metric_relabel_configs", []) for job in jobs}


@pytest.mark.parametrize("path", ["observability/prometheus.yml", "compose/prometheus.yml"])
def test_the_scrape_configuration(path: str) -> None:
    """Public jobs let public names through, Flink's under ours, and nothing else of Flink's."""
    jobs = scrapes(FOLDER.parent / path)
    local = path.startswith("observability")
    assert set(jobs) == {"dpstream", "dpstream-flink"} | ({"flink-operator"} if local else set())
    for name in METRICS:
        assert relabelled(jobs["dpstream"], name.name) == name.name
        if name.counter:
            assert relabelled(jobs["dpstream-flink"], runner_name(name.counter)) == name.name
    for private in PRIVATE_COUNTERS:
        assert relabelled(jobs["dpstream"], f"dpstream_{private}_total") is None
        assert relabelled(jobs["dpstream-flink"], runner_name(private)) is None
    for own in ("flink_taskmanager_job_task_operator_numRecordsIn", "flink_jobmanager_Status_x"):
        assert relabelled(jobs["dpstream-flink"], own) is None
