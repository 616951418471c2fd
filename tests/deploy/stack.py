"""`deploy/compose.yaml` as processes of this machine, where there is no container engine.

Each service's own command, environment, settings and health check run against the real program:
host names and ports become free ports of this machine, volumes become folders.  What stands in
images only is replaced by the same program from elsewhere: Kafka's scripts by its class and an
admin client, Flink's start scripts by its classes, Beam's boot program by its worker harness.
"""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from tests import guarded
from tests.emulator import free_port
from tests.kafka_broker import Broker
from tests.runners.engines import ROOT
from tests.runners.flink import session

DEPLOY = ROOT / "deploy"
sys.path.insert(0, str(DEPLOY))
import images  # noqa: E402

__all__ = ["images"]

STACK: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = STACK["services"]
HOST = "127.0.0.1"
#: Seconds that a start may take on a busy machine.
WAIT = 600.0


def needs(service: dict[str, Any]) -> dict[str, str]:
    """Service -> what must have become of it before this one starts."""
    given = service.get("depends_on", {})
    return {name: how["condition"] for name, how in given.items()}


def in_order(profiles: tuple[str, ...] = ()) -> list[str]:
    """The services as they start, each after what it depends on."""
    left = {
        name: set(needs(service)) for name, service in SERVICES.items()
        if set(service.get("profiles", ())) <= set(profiles)
    }  # fmt: skip
    names: list[str] = []
    while left:
        ready = [name for name, before in left.items() if before <= set(names)]
        assert ready, f"these wait for each other: {sorted(left)}"
        names += ready
        for name in ready:
            del left[name]
    return names


def shared(service: dict[str, Any]) -> set[str]:
    """The named volumes that a service mounts."""
    return {v.partition(":")[0] for v in service.get("volumes", ())} & set(STACK["volumes"])


def words(command: str | list[str]) -> list[str]:
    """A command as compose splits it."""
    return shlex.split(command) if isinstance(command, str) else list(command)


class KafkaService(Broker):
    """A broker with the settings that the image makes of the service's environment."""

    def __init__(self, folder: Path, environment: dict[str, Any], read: Callable[[str], str]):
        super().__init__(folder)
        settings = {
            name.removeprefix("KAFKA_").lower().replace("_", "."): read(str(value))
            for name, value in environment.items()
        }
        self._lines = [f"{name}={value}" for name, value in settings.items()]

    def _settings(self) -> str:
        return "\n".join([*self._lines, f"log.dirs={self.folder / 'data'}"])


class Stack:
    """The services of a run, in a folder; ``close`` ends all that were started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.volumes = {name: folder / "volumes" / name for name in STACK["volumes"]}
        for place in self.volumes.values():
            place.mkdir(parents=True)
        self.ports = {number: free_port() for number in
                      (8081, 8098, 8099, 9010, 9020, 9092, 9093, 9094, 9464, 50000)}  # fmt: skip
        self.started: list[subprocess.Popen[bytes]] = []
        self._names: list[str] = []
        self.broker: KafkaService | None = None
        self.cluster: session.Cluster | None = None

    def local(self, text: str, service: dict[str, Any]) -> str:
        """A text of the service as it is here: paths of its volumes, host names, ports."""
        for volume in service.get("volumes", ()):
            source, target = volume.split(":")[:2]
            place = self.volumes.get(source, self.folder / "bind" / Path(source).name)
            text = re.sub(rf"(?<![\w.]){re.escape(target)}(?=[/\s\"']|$)", str(place), text)
        for secret in service.get("secrets", ()):
            text = text.replace(f"/run/secrets/{secret}", str(self.folder / secret))
        names = "|".join(map(re.escape, [*SERVICES, "localhost"]))
        text = re.sub(rf"(?<![\w-])(?:{names})(?=[:/]\d)|0\.0\.0\.0|(?<=://)(?=:\d)", HOST, text)
        return re.sub(
            r"(?:^|(?<=[:/=]))(\d{4,5})\b", lambda m: str(self.ports.get(int(m[1]), m[1])), text
        )

    def environment(self, service: dict[str, Any]) -> dict[str, str]:
        """What the service's process sees, on top of this one's environment."""
        given = {name: self.local(str(v), service) for name, v in service["environment"].items()}
        if "CLOUDSDK_CONFIG" in given:
            given["CLOUDSDK_CONFIG"] = str(self.folder / "gcloud")
        return {**os.environ, "PYTHONPATH": str(ROOT), **given}

    def command(self, name: str) -> list[str]:
        """The service's entry point and command."""
        service = SERVICES[name]
        line = [*words(service.get("entrypoint", [])), *words(service.get("command", []))]
        local = [self.local(word, service) for word in line]
        return [sys.executable, "-m", "dpstream", *local[1:]] if line[0] == "dpstream" else local

    def once(self, name: str) -> "subprocess.CompletedProcess[str]":
        """Run a service that ends."""
        service = SERVICES[name]
        self.unmount()
        completed = subprocess.run(
            self.command(name), env=self.environment(service), capture_output=True, text=True,
            cwd=self._place(service), timeout=WAIT, check=False,
        )  # fmt: skip
        self.unmount()
        return completed

    def unmount(self) -> None:
        """Docker's local driver mounts a volume with options for its first container and unmounts
        it after its last: what one of memory held is gone."""
        used = set[str]()
        for name, process in zip(self._names, self.started, strict=True):
            used |= shared(SERVICES[name]) if process.poll() is None else set()
        for name, place in self.volumes.items():
            if (STACK["volumes"][name] or {}).get("driver_opts") and name not in used:
                shutil.rmtree(place)
                place.mkdir()

    def _place(self, service: dict[str, Any]) -> Path:
        here = service.get("working_dir") == "/job"
        return self.folder / "bind" / "compose" if here else self.folder

    def start(self, name: str, **other: str) -> "subprocess.Popen[bytes]":
        """Start a service that goes on, its output in a file; ``other``: words to exchange."""
        service = SERVICES[name]
        self.unmount()
        with (self.folder / f"{name}.log").open("wb") as log:
            process = guarded.start(
                [other.get(word, word) for word in self.command(name)],
                env=self.environment(service), stdout=log, stderr=subprocess.STDOUT,
                cwd=self._place(service),
            )  # fmt: skip
        self.started.append(process)
        self._names.append(name)
        return process

    def healthy(self, name: str) -> bool:
        """What the service's health check says now."""
        test = SERVICES[name]["healthcheck"]["test"]
        line = ["sh", "-c", test] if isinstance(test, str) else test[1:]
        line = [self.local(word, SERVICES[name]) for word in line]
        line[0] = sys.executable if line[0] == "python" else line[0]
        completed = subprocess.run(line, capture_output=True, timeout=30, check=False)
        return completed.returncode == 0

    def wait(self, name: str) -> None:
        """Until the service is healthy."""
        self.until(lambda: self.healthy(name), name)

    def until(self, done: Callable[[], bool], name: str) -> None:
        """Until something of a service is so; its log is shown where it is not in time."""
        end = time.monotonic() + WAIT
        while not done():
            dead = [p.args for p in self.started if p.poll() is not None]
            log = self.folder / f"{name}.log"
            log_tail = log.read_text()[-3000:] if log.exists() else ""
            assert time.monotonic() < end and not dead, f"{name}: {dead}\n{log_tail}"
            time.sleep(0.2)

    def start_kafka(self) -> None:
        """The broker of the service `kafka`."""
        service = SERVICES["kafka"]
        made = KafkaService(
            self.folder / "kafka", service["environment"], lambda text: self.local(text, service)
        )
        made.servers = f"{HOST}:{self.ports[9092]}"
        made.__enter__()
        self.broker = made

    def start_cluster(self, lib: Path) -> None:
        """The job manager, with the properties of the service; task managers join it."""
        service = SERVICES["jobmanager"]
        made = session.Cluster(lib, self.folder / "flink", backend="rocksdb")
        properties = [
            self.local(line, service) for line in
            service["environment"]["FLINK_PROPERTIES"].splitlines()
            if not line.startswith(("jobmanager.rpc.address", "metrics.reporter"))
        ]  # fmt: skip
        with (made.folder / "flink-conf.yaml").open("a") as file:
            file.write("\n".join(properties) + "\n")
        self.ports[8081] = made.rest
        self.cluster = made
        made.start(0)

    def close(self) -> None:
        """End everything."""
        for process in self.started:
            guarded.kill(process)
        if self.cluster is not None:
            self.cluster.stop()
        if self.broker is not None:
            self.broker.kill()


def own_key(folder: Path) -> None:
    """The host's key file, as the text at the top of compose.yaml makes it."""
    line = f"(umask 077; {shutil.which('openssl')} rand -hex 32 > secret)"
    subprocess.run(["sh", "-c", line], cwd=folder, check=True)


# The scripts of deploy/, which are no package.


def load(path: str) -> ModuleType:
    """A script of deploy/ as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / "deploy" / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
