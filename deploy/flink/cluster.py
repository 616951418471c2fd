"""A Flink session cluster of processes on this machine, from the jars that `make flink` fetched.

``python deploy/flink/cluster.py --folder RUN --task-managers 2`` starts one job manager and the
task managers, prints their address and ends them when it is interrupted; they end with it if it is
killed.  Checkpoints are taken every second into RUN/checkpoints; a failed job starts again from
the last one.
"""

import argparse
import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from dpstream.pipelines.runners.guard import stop, with_parent

sys.path.insert(0, str(Path(__file__).parent))
from assemble import OPENS

_MANAGER = "org.apache.flink.runtime.entrypoint.StandaloneSessionClusterEntrypoint"
_WORKER = "org.apache.flink.runtime.taskexecutor.TaskManagerRunner"
_START_SECONDS = 300
_STOP_SECONDS = 10

SETTINGS = """\
jobmanager.rpc.address: localhost
jobmanager.rpc.port: {rpc}
jobmanager.bind-host: localhost
rest.address: localhost
rest.port: {rest}
rest.bind-address: localhost
blob.server.port: 0
taskmanager.host: localhost
taskmanager.bind-host: localhost
taskmanager.numberOfTaskSlots: {slots}
taskmanager.cpu.cores: 1
taskmanager.memory.framework.heap.size: 128m
taskmanager.memory.framework.off-heap.size: 128m
taskmanager.memory.jvm-metaspace.size: 256m
taskmanager.memory.jvm-overhead.min: 192m
taskmanager.memory.jvm-overhead.max: 192m
taskmanager.memory.task.heap.size: 512m
taskmanager.memory.task.off-heap.size: 64m
taskmanager.memory.network.min: 64m
taskmanager.memory.network.max: 64m
taskmanager.memory.managed.size: 128m
cluster.evenly-spread-out-slots: true
heartbeat.interval: 2000
heartbeat.timeout: 10000
classloader.resolve-order: parent-first
state.backend.type: {backend}
state.checkpoints.dir: file://{folder}/checkpoints
state.savepoints.dir: file://{folder}/savepoints
state.checkpoints.num-retained: 2
execution.checkpointing.interval: 1s
execution.checkpointing.mode: EXACTLY_ONCE
execution.checkpointing.externalized-checkpoint-retention: RETAIN_ON_CANCELLATION
restart-strategy.type: fixed-delay
restart-strategy.fixed-delay.attempts: {attempts}
restart-strategy.fixed-delay.delay: 1s
io.tmp.dirs: {folder}/tmp
"""


class Cluster:
    """One job manager and some task managers, each a process of its own.

    Args:
        lib: folder of the jars.
        folder: for settings, logs, checkpoints; it is made.
        slots: of each task manager.
        attempts: how often a failed job is started again.
        backend: ``hashmap`` (in memory) or ``rocksdb``.
    """

    def __init__(
        self,
        lib: Path,
        folder: Path,
        slots: int = 2,
        attempts: int = 1000,
        backend: str = "hashmap",
    ) -> None:
        self._lib, self.folder = lib.resolve(), folder.resolve()
        (self.folder / "tmp").mkdir(parents=True, exist_ok=True)
        self.rest = _free_port()
        text = SETTINGS.format(
            rpc=_free_port(),
            rest=self.rest,
            slots=slots,
            folder=self.folder,
            attempts=attempts,
            backend=backend,
        )
        (self.folder / "flink-conf.yaml").write_text(text)
        self.manager: subprocess.Popen[bytes] | None = None
        self.workers: list[subprocess.Popen[bytes]] = []

    @property
    def master(self) -> str:
        """For ``--flink_master``."""
        return f"localhost:{self.rest}"

    def start(self, workers: int) -> None:
        """Start all processes and wait until every task manager has reported.

        Raises:
            RuntimeError: they did not within five minutes.
        """
        self.manager = self._java(_MANAGER, "jobmanager", 256)
        for _ in range(workers):
            self.add_worker()
        self.wait_for(workers)

    def add_worker(self) -> "subprocess.Popen[bytes]":
        """Start one more task manager."""
        process = self._java(_WORKER, f"taskmanager-{len(self.workers)}", 640)
        self.workers.append(process)
        return process

    def wait_for(self, workers: int) -> None:
        """Wait until the job manager knows that many task managers.

        Raises:
            RuntimeError: it does not in time, or has ended.
        """
        until = time.monotonic() + _START_SECONDS
        while time.monotonic() < until:
            if self.manager is None or self.manager.poll() is not None:
                break
            with contextlib.suppress(OSError, urllib.error.URLError, ValueError):
                if self.ask("overview")["taskmanagers"] >= workers:
                    return
            time.sleep(0.2)
        raise RuntimeError(f"the cluster did not start; see the logs in {self.folder.name}")

    def ask(self, path: str) -> dict[str, int]:
        """An answer of the job manager's REST interface."""
        with urllib.request.urlopen(f"http://{self.master}/{path}", timeout=5) as answer:
            status: dict[str, int] = json.load(answer)
        return status

    def stop(self) -> None:
        """End all processes; those that do not within ten seconds are killed."""
        processes = [*self.workers, *([self.manager] if self.manager else [])]
        for process in processes:
            process.terminate()
        for process in processes:
            stop(process, _STOP_SECONDS)
        self.workers, self.manager = [], None

    def _java(self, main: str, name: str, heap: int) -> "subprocess.Popen[bytes]":
        opens = [f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in OPENS]
        command = [
            "java",
            f"-Xmx{heap}m",
            "-Dorg.slf4j.simpleLogger.defaultLogLevel=info",
            *opens,
            "-cp",
            f"{self._lib}/*",
            main,
            "--configDir",
            str(self.folder),
        ]
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(with_parent(command), stdout=log, stderr=subprocess.STDOUT)


@contextlib.contextmanager
def running(lib: Path, folder: Path, workers: int = 2, **settings: int) -> Iterator[Cluster]:
    """A cluster while the block runs."""
    cluster = Cluster(lib, folder, **settings)  # type: ignore[arg-type]
    try:
        cluster.start(workers)
        yield cluster
    finally:
        cluster.stop()


def _free_port() -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    """Run a cluster until SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lib", type=Path, default=Path(".tools/flink/lib"))
    parser.add_argument("--folder", type=Path, default=Path("runs/flink"))
    parser.add_argument("--task-managers", type=int, default=2)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--backend", choices=("hashmap", "rocksdb"), default="hashmap")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with (
        contextlib.suppress(KeyboardInterrupt),
        running(
            given.lib, given.folder, given.task_managers, slots=given.slots, backend=given.backend
        ) as cluster,
    ):
        print(f"--flink_master={cluster.master}", flush=True)
        signal.pause()


if __name__ == "__main__":
    main()
