"""The local stack, service by service in compose's order, on real parts: see `stack.py`."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner

from dpstream.pipelines.cli.main import cli
from dpstream.pipelines.formats.encodings import read_releases
from tests.deploy.stack import DEPLOY, SERVICES, Stack, in_order, needs, own_key, words
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
    return read_releases(folder).num_rows if list(folder.rglob("*.parquet")) else 0


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
