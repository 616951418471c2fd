"""The stack of services, its containers and what operators see of them."""

import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from dpstream.dp_transforms.noise.secret_source import parse_reference
from dpstream.dp_transforms.telemetry import PRIVATE_COUNTERS
from dpstream.pipelines.cli.main import cli
from dpstream.pipelines.cli.run import run
from dpstream.pipelines.formats.encodings import read_releases
from dpstream.pipelines.jobs.job import load_job
from dpstream.pipelines.operate.metrics import METRICS, runner_name
from tests.deploy.stack import (
    DEPLOY,
    SERVICES,
    STACK,
    Stack,
    images,
    in_order,
    load,
    needs,
    own_key,
    shared,
    words,
)
from tests.emulator import binary, missing
from tests.kafka_broker import jars
from tests.kafka_broker import missing as no_kafka
from tests.runners.engines import ROOT, need, need_flink, worker_pool

TOPIC = "visits"
#: The job's calendar at the speed of a test.
FASTER = {
    'start = "2026-01-01T00:00:00Z"': 'start = "{start}"', 'window = "1h"': 'window = "6s"',
    'release_every = "1m"': 'release_every = "2s"', 'covers = "1h"': 'covers = "6s"',
}  # fmt: skip


def job_of(stack: Stack) -> Path:
    """The stack's project file, with this machine's places and a faster calendar."""
    text = (DEPLOY / "compose" / "dpstream.toml").read_text()
    start = datetime.fromtimestamp(time.time() // 6 * 6, UTC)
    for old, new in FASTER.items():
        assert old in text
        text = text.replace(old, new.format(start=start.strftime("%Y-%m-%dT%H:%M:%SZ")))
    path = stack.folder / "bind" / "compose" / "dpstream.toml"
    path.parent.mkdir(parents=True)
    path.write_text(stack.local(text, SERVICES["job"]))
    return path


def send(stack: Stack, users: int) -> None:
    """A visit of each of many users now, and a message that is none."""
    assert stack.broker is not None
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    visits = [{"user": f"u{n}", "page": "/home", "time": now} for n in range(users)]
    stack.broker.produce(TOPIC, [*visits, b"{"], users % 4)


def create_topic(stack: Stack) -> None:
    """What `kafka-topics.sh` does with the service's command."""
    line = words(SERVICES["kafka-topics"]["command"])
    given = dict(pairwise(line))
    assert "--create" in line and "--if-not-exists" in line and given["--topic"] == TOPIC
    name, _, value = given["--config"].partition("=")
    assert stack.broker is not None
    stack.broker.create(TOPIC, int(given["--partitions"]), {name: value})


def step(stack: Stack, name: str, lib: Path) -> None:
    """Start a service, or run it to its end, and wait as its dependents wait."""
    if name == "kafka":
        stack.start_kafka()
    elif name == "kafka-topics":
        create_topic(stack)
    elif name == "jobmanager":
        stack.start_cluster(lib)
        stack.wait(name)
    elif name == "taskmanager":
        assert stack.cluster is not None
        stack.cluster.add_worker()
        stack.cluster.wait_for(1)
    elif name == "workers":
        stack.wait(name)
    elif SERVICES[name]["restart"] == "no" and "healthcheck" not in SERVICES[name]:
        completed = stack.once(name)
        assert completed.returncode == 0, completed.stderr
    else:
        stack.start(name, **{"/opt/flink/lib/*": f"{lib}/*"})
        stack.wait(name)


def visits(stack: Stack) -> int:
    """Records of all that was released."""
    folder = stack.volumes["releases"] / "out"
    return read_releases(folder).num_rows if list(folder.rglob("window-*/*.parquet")) else 0


#: Reads a key of several modes as several users, which a process of root's can become.
AS_USERS = """
import json, os, sys
from dpstream.accounting.errors import DpstreamError
from dpstream.dp_transforms.noise.secret_source import read_secret
for user, mode in json.loads(sys.argv[2]):
    os.chmod(sys.argv[1], mode)
    child = os.fork()
    if child == 0:
        os.setgroups([]), os.setgid(user), os.setuid(user)
        try:
            print(len(read_secret(f"file:{sys.argv[1]}")), flush=True)
        except DpstreamError as error:
            print(error, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.fixture
def root() -> None:
    """The service `secret` gives the key to another user."""
    need(os.geteuid() == 0, "a user who can give files to others is missing (run as root)")


@pytest.mark.usefixtures("root")
def test_the_key_is_its_users_alone() -> None:
    """The service's own command: user 10001 reads it, no other does, nor if more could."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    stack = Stack(folder)
    try:
        own_key(folder)
        key = stack.volumes["keys"] / "secret"
        assert not key.exists() and not stack.healthy("secret")
        step(stack, "secret", Path())
        status = key.stat()
        assert (stat.S_IMODE(status.st_mode), status.st_uid) == (0o400, 10001)

        cases = [(10001, 0o400), (10002, 0o400), (10001, 0o440), (10001, 0o444)]
        line = [sys.executable, "-c", AS_USERS, str(key), json.dumps(cases)]
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True)
        mine, theirs, group, all_ = done.stdout.splitlines()
        assert mine == "32" and "cannot be read" in theirs
        assert "can be read or changed by other users" in group and group == all_

        stack.unmount()
        assert key.exists(), "gone before those that read it can have started"
        stack.started[0].terminate()
        assert stack.started[0].wait(30) is not None
        stack.unmount()
        assert not key.exists()
    finally:
        stack.close()
        shutil.rmtree(folder)


@pytest.fixture
def stack(root: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    """The stack with a key and its job; nothing is started."""
    if binary() is None:
        missing()
    if jars() is None:
        no_kafka("Kafka's broker is missing (`make kafka`)")
    deployment = Stack(tmp_path)
    own_key(tmp_path)
    job_of(deployment)
    for name, value in SERVICES["workers"]["environment"].items():
        monkeypatch.setenv(name, deployment.local(value, SERVICES["workers"]))
    try:
        yield deployment
    finally:
        deployment.close()


def test_the_store_is_there_before_the_job(stack: Stack) -> None:
    """Until the service `store` has ended there is no run to go on with; then there is."""
    before = {"store"}
    while more := {name for service in before for name in needs(SERVICES[service])} - before:
        before |= more
    project = str(stack.folder / "bind" / "compose" / "dpstream.toml")
    info = ["state", "info", "--project", project, "--json"]
    for name in in_order():
        if name == "store":
            refused = CliRunner().invoke(cli, info)
            assert refused.exit_code == 2 and "holds no run yet" in refused.stderr
        if name in before:
            step(stack, name, Path())
    assert before == {"spanner", "spanner-instance", "kafka", "kafka-topics", "secret", "store"}
    outcome = CliRunner().invoke(cli, info)
    assert outcome.exit_code == 0 and json.loads(outcome.stdout)["run_id"], outcome.stderr


@pytest.mark.slow
def test_every_service_starts_and_the_job_releases(stack: Stack) -> None:
    """Minutes of processors' time: on two idle ones about one of the clock."""
    lib = need_flink().parent / "lib"
    names = in_order()
    assert set(names) == {n for n, service in SERVICES.items() if "profiles" not in service}
    with worker_pool() as pool:
        stack.ports[50000] = int(pool.address.rpartition(":")[2])
        for name in names:
            step(stack, name, lib)

        def counted() -> bool:
            send(stack, 500)
            return visits(stack) > 0

        stack.until(counted, "job")
        launcher = stack.started[-1]
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(60) == 0, (stack.folder / "job.log").read_text()


IMAGES = images.read()


def beam_version() -> str:
    """The pin of apache-beam."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [pin] = [d for d in project["dependencies"] if d.startswith("apache-beam==")]
    return str(pin.partition("==")[2])


def stages() -> dict[str, str]:
    """Name -> text of each stage of the Dockerfile."""
    parts = re.split(r"^FROM ", (ROOT / "Dockerfile").read_text(), flags=re.M)[1:]
    return {part.split()[2]: part for part in parts}


def test_the_images_are_of_the_pinned_beam() -> None:
    version = beam_version()
    assert IMAGES["BEAM_SDK_IMAGE"].partition("@")[0] == f"apache/beam_python3.11_sdk:{version}"
    assert IMAGES["PYTHON_IMAGE"].startswith("python:3.11-")
    for lock in ("requirements.lock", "deploy/runtime.lock"):
        assert f"apache-beam=={version} " in (ROOT / lock).read_text()


def test_the_stack_runs_the_flink_that_the_tests_run() -> None:
    """One image of the jars of `make flink`, on Flink of their version, everywhere."""
    pom = (DEPLOY / "flink" / "pom.xml").read_text()
    [runner] = re.findall(r"beam-runners-flink-([0-9.]+)<", pom)
    [version] = re.findall(r"flink-statebackend-rocksdb</artifactId>\s*<version>([0-9.]+)<", pom)
    assert version.startswith(runner + ".")
    assert IMAGES["FLINK_IMAGE"].startswith(f"flink:{version}-java17")
    for name in ("jobmanager", "taskmanager", "job-server"):
        assert SERVICES[name]["image"] == "${DPSTREAM_FLINK_IMAGE}"
    cluster = (DEPLOY / "flink" / "session-cluster.yaml").read_text()
    assert f"flinkVersion: v{runner.replace('.', '_')}" in cluster


def test_the_default_image_is_a_worker() -> None:
    """The last stage is what ``docker build`` makes; its entry point is Beam's boot program."""
    texts = stages()
    assert list(texts)[-1] == "worker" and "ENTRYPOINT" not in texts["worker"]
    assert 'ENTRYPOINT ["/opt/apache/beam/boot"]' in texts["base"]
    assert re.search(r"^COPY --from=beam /opt/apache/beam/boot ", texts["base"], flags=re.M)
    [entry] = re.findall(r"FLEX_TEMPLATE_PYTHON_PY_FILE=(\S+)", texts["launcher"])
    [copied] = re.findall(r"^COPY (deploy/\S+\.py) (\S+)$", texts["launcher"], flags=re.M)
    assert copied[1] == entry and (ROOT / copied[0]).exists()


def test_only_dataflows_images_run_as_root() -> None:
    """Dataflow mounts folders of root's into them; all others end with another user."""
    users = {name: re.findall(r"^USER (\S+)$", text, flags=re.M) for name, text in stages().items()}
    assert users == {
        "beam": [], "launcher-base": [], "build": [], "base": [], "dataflow": ["0:0"],
        "launcher": ["0:0"], "worker": ["10001:10001"],
    }  # fmt: skip
    assert "useradd --uid 10001 --gid 10001 --create-home dpstream" in stages()["base"]
    flink = (DEPLOY / "flink" / "Dockerfile").read_text()
    assert flink.rstrip().endswith("USER 9999:9999")
    root = [name for name, service in SERVICES.items() if str(service.get("user", "")) == "0:0"]
    assert root == ["secret"] and SERVICES["secret"]["network_mode"] == "none"


def test_no_folder_of_compiled_functions_is_roots() -> None:
    """Any user of an image makes them; a build that has run dpstream has made them as root, in the
    layer that it ran in."""
    base = stages()["base"]
    folders = set(re.findall(r"=(/tmp/\S+)", base.partition("\nENV ")[2].partition("\nRUN ")[0]))
    assert folders == {"/tmp/numba", "/tmp/matplotlib"}
    runs = 0
    for name, text in stages().items():
        for line in re.findall(r"^RUN (.+)$", text.replace("\\\n", ""), flags=re.M):
            if re.search(r"\b(?:dpstream \w|python|pipelines)", line):
                _, separator, removed = line.partition("&& rm -rf ")
                assert separator and set(removed.split()) == folders, (name, line)
                runs += 1
    assert runs == 1


def test_installs_are_hashed() -> None:
    """Nothing is fetched but what a lock names with its hash, the build's tools included."""
    lines = re.findall(r"pip (?:install|wheel)[^&\n]*", (ROOT / "Dockerfile").read_text())
    assert len(lines) == 5
    for line in lines:
        assert "--require-hashes -r" in line or {"--no-index", "--no-deps"} <= set(line.split())
    [built] = [line for line in lines if line.startswith("pip wheel")]
    assert "--no-build-isolation" in built
    lines = re.findall(r"pip install.*", (ROOT / "Makefile").read_text())
    [own] = [line for line in lines if "--require-hashes" not in line]
    assert len(lines) > 2 and own.endswith("--no-deps --no-build-isolation -e .")


def test_services_name_each_other() -> None:
    for name, service in SERVICES.items():
        assert set(needs(service)) <= set(SERVICES), name
        shared = service.get("network_mode", "").partition("service:")[2]
        assert not shared or (shared in needs(service) and "ports" not in service)
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            if source.startswith("."):
                assert (DEPLOY / source).exists(), volume
            else:
                assert source in STACK["volumes"], volume
        build = service.get("build")
        if build is not None:
            file = DEPLOY / build["context"] / build.get("dockerfile", "Dockerfile")
            file = Path(os.path.normpath(file))
            assert set(build["args"]) == set(images.arguments(file)), name
    assert set(in_order(("watch",))) == set(SERVICES)


def test_what_is_waited_for_can_be() -> None:
    """Services that end are waited for to their end, others until they are healthy."""
    for name, service in SERVICES.items():
        for other, condition in needs(service).items():
            goes_on = "healthcheck" in SERVICES[other]
            wanted = "service_healthy" if goes_on else "service_completed_successfully"
            assert condition == wanted, (name, other)


def test_health_and_restarts() -> None:
    """What goes on has a health check and starts again; what ends does not."""
    once = {"spanner-instance", "kafka-topics", "store"}
    assert {name for name, service in SERVICES.items() if "healthcheck" not in service} == once
    policies = {name: service["restart"] for name, service in SERVICES.items()}
    # An emulator that comes back is empty; a launcher that was refused would be refused again.
    named = {**dict.fromkeys(once, "no"), "spanner": "no", "job": "on-failure:3"}
    assert {name: policies[name] for name in named} == named
    assert all(p == "unless-stopped" for name, p in policies.items() if name not in named)


def test_task_managers_have_what_was_staged() -> None:
    """The job server stages artifacts in a folder that task managers read under the same path."""
    command = SERVICES["job-server"]["command"]
    [folder] = [word.partition("=")[2] for word in command if word.startswith("--artifacts-dir=")]
    mounts = [{v.split(":")[1]: v.split(":")[0] for v in SERVICES[name]["volumes"]}
              for name in ("job-server", "taskmanager")]  # fmt: skip
    assert mounts[0][folder] == mounts[1][folder] and mounts[0][folder] in STACK["volumes"]


def test_no_secret_is_in_an_environment() -> None:
    """`docker inspect` shows environments: the key is a file there, of its reader's own."""
    job = tomllib.loads((DEPLOY / "compose" / "dpstream.toml").read_text())
    kind, path = parse_reference(job["data_set"]["visits"]["secret"])
    assert (kind, path) == ("file", "/run/secrets/secret")
    for service in SERVICES.values():
        assert not [name for name in service.get("environment", {}) if "KEY" in name]
        assert "SECRET_FILE" not in str(service)
    for name in ("store", "workers", "job"):
        assert "keys:/run/secrets:ro" in SERVICES[name]["volumes"]
    assert STACK["volumes"]["keys"]["driver_opts"]["type"] == "tmpfs"
    made, _, then = SERVICES["secret"]["command"][0].partition(" && ")
    assert {"--mode=0400", "--owner=10001"} <= set(made.split()) and then == "exec sleep infinity"


def test_what_is_in_memory_is_held() -> None:
    """A volume with options lasts as long as a container of it: all that mount one of these wait
    for one that fills it and goes on, and those that wait for none are no part of it."""
    for name in [n for n, volume in STACK["volumes"].items() if (volume or {}).get("driver_opts")]:
        users = {service for service in SERVICES if name in shared(SERVICES[service])}
        before = {u: needs(SERVICES[u]) for u in users}
        [holder] = [u for u in users if not set(before[u]) & users]
        assert "healthcheck" in SERVICES[holder] and SERVICES[holder]["restart"] != "no"
        for user in users - {holder}:
            assert before[user].get(holder) == "service_healthy", user


def test_nothing_is_open_to_other_machines() -> None:
    for service in SERVICES.values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


def test_the_job_of_the_stack() -> None:
    job = load_job(DEPLOY / "compose" / "dpstream.toml")
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
    # Both the job and its workers have the releases' folder.
    for service in ("job", "workers"):
        mounts = [v.split(":") for v in SERVICES[service]["volumes"]]
        assert any(m[0] == "releases" and job.sink.path.startswith(m[1] + "/") for m in mounts)
    assert SERVICES["workers"]["network_mode"] == "service:taskmanager"
    # The store is made before the job, and looks at the key and the topic while it is.
    assert SERVICES["store"]["command"] == "state init"
    assert "store" in needs(SERVICES["job"])
    assert {"spanner-instance", "kafka-topics", "secret"} <= set(needs(SERVICES["store"]))


def test_the_jobs_command_line() -> None:
    """Every flag is the program's or Beam's."""
    from dpstream.pipelines.runners.table import RUNNERS, refuse_unknown

    words = shlex.split(SERVICES["job"]["command"])
    assert SERVICES["job"]["entrypoint"] == "dpstream" and words[0] == "run"
    with run.make_context("run", words[1:]) as context:
        assert context.params["metrics_port"] == 9464
        refuse_unknown(context.args, RUNNERS["FlinkRunner"].flags)
        assert "--environment_type=EXTERNAL" in context.args
    scraped = yaml.safe_load((DEPLOY / "compose" / "prometheus.yml").read_text())
    targets = [t for job in scraped["scrape_configs"] for s in job["static_configs"]
               for t in s["targets"]]  # fmt: skip
    assert "job:9464" in targets and all(t.partition(":")[0] in SERVICES for t in targets)
    assert CliRunner().invoke(cli, ["run", "--help"]).exit_code == 0


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
