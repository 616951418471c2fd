"""Images and the local stack, as far as they can be checked without a container engine."""

import os
import re
import shlex
import tomllib
from pathlib import Path

import yaml
from click.testing import CliRunner

from dpstream.dp_transforms.noise.secret_source import parse_reference
from dpstream.pipelines.cli.main import cli
from dpstream.pipelines.cli.run import run
from dpstream.pipelines.jobs.job import load_job
from tests.deploy.stack import DEPLOY, SERVICES, STACK, images, in_order, needs, shared
from tests.runners.engines import ROOT

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
    made = re.findall(r"pip install.*", (ROOT / "Makefile").read_text())
    assert len(made) == 2 and "--require-hashes" in made[0]
    assert {"--no-deps", "--no-build-isolation"} <= set(made[1].split())


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
