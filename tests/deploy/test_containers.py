"""Images and the local stack, as far as they can be checked without a container engine."""

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from dp_transforms.noise.references import parse_reference
from pipelines.commands.main import cli, run
from pipelines.jobs.job import load_job
from pipelines.operating.metrics import METRICS

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
STACK: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = STACK["services"]


def beam_version() -> str:
    """The pin of apache-beam."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [pin] = [d for d in project["dependencies"] if d.startswith("apache-beam==")]
    return str(pin.partition("==")[2])


def test_the_images_are_of_the_pinned_beam() -> None:
    text = (ROOT / "Dockerfile").read_text()
    version = beam_version()
    assert f"FROM apache/beam_python3.11_sdk:{version} AS base" in text
    assert f"apache-beam=={version} " in (ROOT / "requirements.lock").read_text()
    assert SERVICES["job-server"]["image"].endswith(f":{version}")
    flink = SERVICES["jobmanager"]["image"].partition(":")[2]
    assert f"beam_flink{flink}_job_server" in SERVICES["job-server"]["image"]
    assert SERVICES["taskmanager"]["image"] == SERVICES["jobmanager"]["image"]
    from apache_beam.options.pipeline_options import FlinkRunnerOptions

    assert flink in FlinkRunnerOptions.PUBLISHED_FLINK_VERSIONS


def test_the_default_image_is_a_worker() -> None:
    """The last stage is what ``docker build`` makes; an entry point there would hide Beam's."""
    stages = re.split(r"^FROM ", (ROOT / "Dockerfile").read_text(), flags=re.M)[1:]
    assert stages[-1].startswith("base AS worker") and "ENTRYPOINT" not in stages[-1]
    [launcher] = [s for s in stages if s.startswith("base AS launcher")]
    [entry] = re.findall(r"FLEX_TEMPLATE_PYTHON_PY_FILE=(\S+)", launcher)
    [copied] = re.findall(r"^COPY (deploy/\S+) (\S+)$", launcher, flags=re.M)
    assert copied[1] == entry and (ROOT / copied[0]).exists()
    assert "python311-template-launcher-base" in launcher


def test_services_name_each_other() -> None:
    for name, service in SERVICES.items():
        needed = service.get("depends_on", [])
        assert set(needed) <= set(SERVICES), name
        shared = service.get("network_mode", "").partition("service:")[2]
        assert not shared or (shared in SERVICES and "ports" not in service)
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            if source.startswith("."):
                assert (DEPLOY / source).exists(), volume
            else:
                assert source in STACK["volumes"], volume


def test_nothing_is_open_to_other_machines() -> None:
    for service in SERVICES.values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


def test_the_job_of_the_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    job = load_job(DEPLOY / "compose" / "job.toml")
    assert job.source.servers == "kafka:9092" and job.plan.stamp == "_append_time"
    assert (
        job.source.topic and f"--topic {job.source.topic} " in SERVICES["kafka-topics"]["command"]
    )
    assert "message.timestamp.type=LogAppendTime" in SERVICES["kafka-topics"]["command"]
    store = (job.state.store or "").removeprefix("spanner://").split("/")
    setup, environment = SERVICES["spanner-instance"], SERVICES["job"]["environment"]
    assert store[0] == setup["environment"]["CLOUDSDK_CORE_PROJECT"]
    assert store[0] == environment["GOOGLE_CLOUD_PROJECT"]
    assert f"instances create {store[1]} " in setup["command"]
    # Both the job and its workers have the key, and the releases' folder.
    kind, name = parse_reference(job.privacy.reference or "")
    assert kind == "env"
    for service in ("job", "workers"):
        assert str(name) in SERVICES[service]["environment"]
        mounts = [v.split(":") for v in SERVICES[service]["volumes"]]
        assert any(m[0] == "releases" and job.sink.path.startswith(m[1] + "/") for m in mounts)
    assert SERVICES["workers"]["network_mode"] == "service:taskmanager"


def test_the_jobs_command_line() -> None:
    """Every flag is the program's or Beam's."""
    from pipelines.runners.table import RUNNERS, _refuse_unknown

    words = shlex.split(SERVICES["job"]["command"])
    assert SERVICES["job"]["entrypoint"] == "dpstream" and words[0] == "run"
    with run.make_context("run", words[1:]) as context:
        assert context.params["metrics_port"] == 9464
        _refuse_unknown(context.args, RUNNERS["FlinkRunner"].flags)
        assert "--environment_type=EXTERNAL" in context.args
    scraped = yaml.safe_load((DEPLOY / "compose" / "prometheus.yml").read_text())
    targets = [t for job in scraped["scrape_configs"] for s in job["static_configs"]
               for t in s["targets"]]  # fmt: skip
    assert "job:9464" in targets and all(t.partition(":")[0] in SERVICES for t in targets)
    assert all(name.public or "operator" in name.name for name in METRICS)
    assert CliRunner().invoke(cli, ["run", "--help"]).exit_code == 0
