"""What is shipped for Flink fits together: manifest, settings, Kubernetes files."""

import re
from typing import Any

import pytest
import yaml

from tests.runners.engines import ROOT
from tests.runners.flink import session

FOLDER = ROOT / "deploy" / "flink"


@pytest.fixture(scope="module")
def objects() -> dict[str, Any]:
    """The Kubernetes objects, by kind."""
    text = (FOLDER / "session-cluster.yaml").read_text()
    return {found["kind"]: found for found in yaml.safe_load_all(text)}


def test_the_manifest_can_be_read() -> None:
    from assemble import MAIN, OPENS, manifest

    jars = [f"a-rather-long-name-of-a-jar-{n}.jar" for n in range(40)]
    text = manifest(jars)
    assert all(len(line.encode()) <= 72 for line in text.splitlines())
    values = dict(line.split(": ", 1) for line in text.replace("\r\n ", "").splitlines())
    assert values["Main-Class"] == MAIN
    assert values["Class-Path"].split() == [f"lib/{name}" for name in jars]
    assert values["Add-Opens"].split() == [f"java.base/{package}" for package in OPENS]


def test_both_clusters_keep_what_jobs_rest_on(objects: dict[str, Any]) -> None:
    here = yaml.safe_load(session.SETTINGS.replace("{", "").replace("}", ""))
    there = objects["FlinkDeployment"]["spec"]["flinkConfiguration"]
    for name in (
        "execution.checkpointing.interval", "execution.checkpointing.mode",
        "classloader.resolve-order",
    ):  # fmt: skip
        assert here[name] == there[name]
    opens = {f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in session.OPENS}
    assert set(there["env.java.opts.all"].split()) == opens
    server = objects["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    assert set(server["env"][0]["value"].split()) == opens


def test_ports_and_versions_agree(objects: dict[str, Any]) -> None:
    spec = objects["FlinkDeployment"]["spec"]
    pods = spec["taskManager"]["podTemplate"]["spec"]["containers"]
    pool = next(c for c in pods if c["name"] == "worker-pool")
    assert pool["args"] == ["--worker_pool"]
    port = pool["ports"][0]["containerPort"]
    text = (FOLDER / "session-cluster.yaml").read_text()
    assert f"--environment_config=localhost:{port}" in text
    version = re.search(r"flink-statebackend-rocksdb</artifactId>\s*<version>([\d.]+)", _pom())
    assert version is not None
    assert spec["flinkVersion"] == "v" + "_".join(version[1].split(".")[:2])
    assert f"FROM flink:{version[1]}-" in (FOLDER / "Dockerfile").read_text()
    server = objects["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    asked = {int(a.partition("=")[2]) for a in server["args"] if "-port=8" in a}
    assert asked == {p["port"] for p in objects["Service"]["spec"]["ports"]}
    name = objects["FlinkDeployment"]["metadata"]["name"]
    assert f"--flink-master={name}-rest:8081" in server["args"]


def _pom() -> str:
    return (FOLDER / "pom.xml").read_text()
