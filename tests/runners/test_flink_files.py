"""What is shipped for Flink fits together: manifest, settings, Kubernetes files."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from dpstream.pipelines.cli.run import run
from dpstream.pipelines.runners import worker_pool
from dpstream.pipelines.runners.table import RUNNERS, refuse_unknown
from tests.runners.engines import ROOT
from tests.runners.flink import session

FOLDER = ROOT / "deploy" / "flink"


@pytest.fixture(scope="module")
def objects() -> dict[str, Any]:
    """The Kubernetes objects, by kind."""
    texts = [(FOLDER / name).read_text() for name in ("session-cluster.yaml", "launch.yaml")]
    return {document["kind"]: document for text in texts for document in yaml.safe_load_all(text)}


def pods(objects: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The pods' specifications: of task managers, of the job server, of a launcher."""
    return {
        "workers": objects["FlinkDeployment"]["spec"]["taskManager"]["podTemplate"]["spec"],
        "server": objects["Deployment"]["spec"]["template"]["spec"],
        "launcher": objects["Job"]["spec"]["template"]["spec"],
    }


def containers(pod: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Its containers by name, those that run before it too."""
    return {c["name"]: c for c in [*pod.get("initContainers", ()), *pod["containers"]]}


def launcher(objects: dict[str, Any]) -> dict[str, Any]:
    return containers(pods(objects)["launcher"])["launcher"]


def mounts(container: dict[str, Any]) -> dict[str, str]:
    """Path -> volume."""
    return {m["mountPath"]: m["name"] for m in container.get("volumeMounts", ())}


def test_the_manifest_can_be_read() -> None:
    from assemble import MAIN, OPENS, manifest

    jars = [f"a-rather-long-name-of-a-jar-{n}.jar" for n in range(40)]
    text = manifest(jars)
    assert all(len(line.encode()) <= 72 for line in text.splitlines())
    values = dict(line.split(": ", 1) for line in text.replace("\r\n ", "").splitlines())
    assert values["Main-Class"] == MAIN
    assert values["Class-Path"].split() == [f"lib/{name}" for name in jars]
    assert values["Add-Opens"].split() == [f"java.base/{package}" for package in OPENS]


def test_no_folder_of_jars_that_is_done_has_the_open_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job server's jar says to `make` that all is done: whatever ends the work before it is
    there, the next one mends the jars again; nothing is left to do after it."""
    import assemble
    import loopback

    lib = tmp_path / "lib"
    lib.mkdir()

    def fetched(*_: object, **__: object) -> None:
        (lib / loopback.JAR).touch()

    monkeypatch.setattr(assemble.subprocess, "run", fetched)
    monkeypatch.setattr(loopback, "mend", lambda lib: (lib / loopback.MENDED).touch())
    real = Path.replace

    def replace(path: Path, target: Path) -> Path:
        assert [jar.name for jar in lib.iterdir()] == [loopback.MENDED]
        return real(path, target)

    monkeypatch.setattr(Path, "replace", replace)
    assert assemble.assemble(tmp_path).exists()


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
    pool = containers(pods(objects)["workers"])["worker-pool"]
    command = pool["command"]
    assert command[:3] == ["python", "-m", worker_pool.__name__] and "args" not in pool
    given = worker_pool.parser().parse_args(command[3:])
    assert given.container_executable == "/opt/apache/beam/boot"
    port = given.service_port
    assert "ports" not in pool and str(port) in pool["readinessProbe"]["exec"]["command"][-1]
    assert f"--environment_config=localhost:{port}" in launcher(objects)["args"]
    version = re.search(r"flink-statebackend-rocksdb</artifactId>\s*<version>([\d.]+)", _pom())
    assert version is not None
    assert spec["flinkVersion"] == "v" + "_".join(version[1].split(".")[:2])
    server = objects["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    server_ports = {int(a.partition("=")[2]) for a in server["args"] if "-port=8" in a}
    assert server_ports == {p["port"] for p in objects["Service"]["spec"]["ports"]}
    name = objects["FlinkDeployment"]["metadata"]["name"]
    assert f"--flink-master={name}-rest:8081" in server["args"]


def test_task_managers_have_what_was_staged(objects: dict[str, Any]) -> None:
    """The job server and every task manager mount one claim, which many may, under one path."""
    server = containers(pods(objects)["server"])["job-server"]
    [folder] = [a.partition("=")[2] for a in server["args"] if a.startswith("--artifacts-dir=")]
    claims = set()
    for name, container in (("server", "job-server"), ("workers", "flink-main-container")):
        pod = pods(objects)[name]
        volume = mounts(containers(pod)[container])[folder]
        [pod_volume] = [v for v in pod["volumes"] if v["name"] == volume]
        claims.add(pod_volume["persistentVolumeClaim"]["claimName"])
    claim = objects["PersistentVolumeClaim"]
    assert claims == {claim["metadata"]["name"]}
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


def test_the_key_is_a_file_of_the_workers_user_alone(objects: dict[str, Any]) -> None:
    """A copy of mode 0400 in memory; the secret itself is seen by the container that copies it."""
    for name, readers in (("workers", {"worker-pool"}), ("launcher", {"store", "launcher"})):
        pod = pods(objects)[name]
        pod_containers = containers(pod)
        assert not [
            c for c in pod_containers.values() for e in c.get("env", ()) if "valueFrom" in e
        ]
        copy = pod_containers["secret"]
        assert copy["command"][:2] == ["install", "--mode=0400"]
        made = mounts(copy)
        source, target = (made[word.rpartition("/")[0]] for word in copy["command"][2:])
        volumes = {v["name"]: v for v in pod["volumes"]}
        assert "secret" in volumes[source] and volumes[target]["emptyDir"]["medium"] == "Memory"
        seen = {name for name, c in pod_containers.items() if source in mounts(c).values()}
        reads = {
            name for name, c in pod_containers.items() if mounts(c).get("/run/secrets") == target
        }
        assert seen == {"secret"} and reads == readers
        users = [pod.get("securityContext", {}) | pod_containers[c].get("securityContext", {})
                 for c in ("secret", *readers)]  # fmt: skip
        assert all(u["runAsNonRoot"] and u["runAsUser"] == 10001 for u in users)
        assert all(u["allowPrivilegeEscalation"] is False for u in users)


def test_what_goes_on_is_probed(objects: dict[str, Any]) -> None:
    for pod, name in (("workers", "worker-pool"), ("server", "job-server"),
                      ("launcher", "launcher")):  # fmt: skip
        assert "livenessProbe" in containers(pods(objects)[pod])[name]
    assert pods(objects)["server"]["securityContext"]["runAsUser"] == 9999


def test_the_launchers_command_line(objects: dict[str, Any]) -> None:
    """Every flag is the program's or Beam's, and names services that are there."""
    container = launcher(objects)
    words = [*container["command"], *container["args"]]
    assert words[:2] == ["dpstream", "run"]
    with run.make_context("run", words[2:]) as context:
        assert context.params["metrics_port"] == container["ports"][0]["containerPort"]
        refuse_unknown(context.args, RUNNERS["FlinkRunner"].flags)
    named = {word.partition("=")[2] for word in words}
    service = objects["Service"]["metadata"]["name"]
    assert {f"{service}:{p['port']}" for p in objects["Service"]["spec"]["ports"]} <= named
    assert f"{objects['FlinkDeployment']['metadata']['name']}-rest:8081" in named
    before = pods(objects)["launcher"]["initContainers"]
    assert [c["name"] for c in before] == ["secret", "store"]
    assert before[1]["command"] == ["dpstream", "state", "init", *words[2:4]]


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
    own = objects["Job"]["spec"]["template"]["metadata"]["labels"]
    for ingress in (rule, rest):  # a launcher submits its job and cancels it
        assert any(
            set(peer) == {"podSelector"}
            and peer["podSelector"]["matchLabels"].items() <= own.items()
            for peer in ingress["from"]
        )


def _pom() -> str:
    return (FOLDER / "pom.xml").read_text()
