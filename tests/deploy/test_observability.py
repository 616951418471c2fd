"""Dashboards and scrape configuration: every metric exists, nothing private in the public one."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipelines import dashboards
from pipelines.dashboards import FILES, dashboard, text
from pipelines.metrics import METRICS, runner_name

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "observability"
#: PromQL's own words, and labels.
WORDS = {"rate", "sum", "by", "le", "stage", "histogram_quantile", "time"}


def expressions(found: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in found["panels"] for target in panel["targets"]]


def metrics_in(expression: str) -> set[str]:
    """Names of metrics in an expression, without a histogram's suffix."""
    plain = re.sub(r"\[[^]]*\]", "", expression)
    names = set(re.findall(r"[a-zA-Z_:][a-zA-Z0-9_:]*", plain)) - WORDS
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}


def foreign(found: dict[str, Any], public: bool) -> set[str]:
    """Metrics of a dashboard that are not of its side."""
    known = {name.name for name in METRICS if name.public == public}
    if not public:
        known |= {runner_name(name.counter) for name in METRICS if name.counter}
    return set().union(*map(metrics_in, expressions(found))) - known


@pytest.mark.parametrize("public", [True, False])
def test_the_files_are_what_the_list_gives(public: bool) -> None:
    """After a change: ``python -m pipelines.dashboards deploy/observability``."""
    assert (FOLDER / FILES[public]).read_text(encoding="utf-8") == text(public)


@pytest.mark.parametrize("public", [True, False])
def test_every_metric_exists_and_is_of_its_side(public: bool) -> None:
    found = json.loads((FOLDER / FILES[public]).read_text())
    assert expressions(found) and foreign(found, public) == set()
    if public:
        assert "operator" not in json.dumps(found)


@pytest.mark.parametrize("public", [True, False])
def test_every_metric_is_shown(public: bool) -> None:
    shown = set().union(*map(metrics_in, expressions(dashboard(public))))
    assert {name.name for name in METRICS if name.public == public} <= shown


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
        found = dashboard(public)
        places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in found["panels"]]
        assert len(set(places)) == len(places)
        assert len({p["id"] for p in found["panels"]}) == len(places)
        for panel in found["panels"]:
            refs = [target["refId"] for target in panel["targets"]]
            assert len(set(refs)) == len(refs) and all(ref.isalpha() for ref in refs)


def test_the_scrape_configuration() -> None:
    jobs = {
        job["job_name"]: job
        for job in yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    }
    assert set(jobs) == {"dpstream", "dpstream-operator", "flink-operator"}
    targets = [str(job["static_configs"]) for job in jobs.values()]
    assert len(set(targets)) == len(targets)
    [rule] = jobs["dpstream"]["metric_relabel_configs"]
    assert rule["action"] == "drop" and rule["source_labels"] == ["__name__"]
    for name in METRICS:
        assert bool(re.fullmatch(rule["regex"], name.name)) != name.public
