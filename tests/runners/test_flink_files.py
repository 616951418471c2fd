"""What is shipped for Flink fits together: manifest, settings, Kubernetes files."""

import re
from typing import Any

import pytest
import yaml

from pipelines.runners import worker_pool
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
    command = pool["command"]
    assert command[:3] == ["python", "-m", worker_pool.__name__] and "args" not in pool
    given = worker_pool.parser().parse_args(command[3:])
    assert given.container_executable == "/opt/apache/beam/boot"
    port = given.service_port
    assert "ports" not in pool and str(port) in pool["readinessProbe"]["exec"]["command"][-1]
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


def test_policies_let_in_only_whom_flink_needs(objects: dict[str, Any]) -> None:
    """Every pod is covered, every rule names who, and ports are those that listen."""
    text = (FOLDER / "network-policies.yaml").read_text()
    policies = {p["metadata"]["name"]: p["spec"] for p in yaml.safe_load_all(text)}
    assert {p["kind"] for p in yaml.safe_load_all(text)} == {"NetworkPolicy"}
    for spec in policies.values():
        assert spec["policyTypes"] == ["Ingress"] and spec["podSelector"]["matchLabels"]
        for rule in spec["ingress"]:
            assert rule["from"], "an empty list lets everybody in"
            for peer in rule["from"]:
                assert peer["podSelector"]["matchLabels"] and "ipBlock" not in peer
    name = objects["FlinkDeployment"]["metadata"]["name"]
    jobs = objects["Deployment"]["spec"]["template"]["metadata"]["labels"]
    covered = [spec["podSelector"]["matchLabels"] for spec in policies.values()]
    assert {"app": name} in covered and jobs in covered
    [rule] = policies["dpstream-jobs"]["ingress"]
    assert {p["port"] for p in rule["ports"]} == {
        p["port"] for p in objects["Service"]["spec"]["ports"]
    }
    [rest] = policies["dpstream-rest"]["ingress"]
    assert [p["port"] for p in rest["ports"]] == [8081]
    assert {"podSelector": {"matchLabels": jobs}} in rest["from"]


def _pom() -> str:
    return (FOLDER / "pom.xml").read_text()
