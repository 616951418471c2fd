"""The whole flow on a real Flink session cluster, for the tests that kill parts of it.

`Stage` is a job in a folder, its launcher ``dpstream run`` as a process of its own, the cluster
and the pool of Python workers; what is published is compared with a bounded run of the same job.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import tomlkit

from dpstream.pipelines.connectors.write import dead_letter_folder
from dpstream.pipelines.jobs.job import Job, load_job
from dpstream.pipelines.stream.run import run_job
from tests.faults.processes import files
from tests.runners.engines import ROOT, Pool
from tests.runners.flink import session
from tests.runners.golden import golden_job
from tests.written import read_dead_letters

#: Seconds that a start of all, or going on after a kill, may take on a busy machine.
LONGEST = 600.0


def poisoned(stream: Path) -> None:
    """Rows without a unit, rows out of the job's time, and broken lines, the last one of a file
    among them."""
    for number in range(3):
        path = stream / f"{number}.jsonl"
        lines = path.read_bytes().splitlines(keepends=True)
        for at in range(5, len(lines), len(lines) // 7):
            lines[at] = lines[at].replace(b'"user":"', b'"user":null,"was":"', 1)
        lines[3] = lines[3].replace(b'"time":"2024', b'"time":"1999', 1)
        lines[len(lines) // 2] = lines[-1] = b"{not json\n"
        path.write_bytes(b"".join(lines))


def job_at(folder: Path, stream: Path, store: str | None = None) -> Job:
    """The job of the kills: sliding windows over JSON lines with bad ones among them."""
    path = golden_job("sliding", stream, folder).path
    sections = tomlkit.loads(path.read_text()).unwrap()
    sections["table"]["records"]["path"] = "stream/*.jsonl"
    if store is not None:
        sections["job"]["golden"]["store"] = store
    path.write_text(tomlkit.dumps(sections))
    return load_job(path)


def undisturbed(folder: Path, stream: Path) -> Job:
    """The same job, run in one process over bounded input."""
    job = job_at(folder, stream)
    run_job(job)
    return job


def published(job: Job) -> dict[str, bytes]:
    """Every file of the sink."""
    return files(Path(job.sink.path))


def letters(job: Job) -> list[dict[str, Any]]:
    """Every dead letter, once."""
    return read_dead_letters(dead_letter_folder(job)).to_pylist()


class Stage:
    """A cluster, a pool of workers and the launcher of one job.

    Args:
        cluster, pool: running.
        job: to run.
        speed: seconds of stream a second; ``None``: as fast as the files can be read.
    """

    def __init__(
        self,
        cluster: "session.Cluster",
        pool: Pool,
        job: Job,
        folder: Path,
        speed: float | None = None,
    ) -> None:
        self.cluster, self.pool, self.job, self.folder = cluster, pool, job, folder
        self._flags = [
            "--runner=FlinkRunner", f"--flink_master={cluster.master}", "--parallelism=2",
            "--environment_type=EXTERNAL",
            f"--environment_config={pool.address}", "--quiet",
        ]  # fmt: skip
        self._program = ["dpstream"] if speed is None else ["tests.paced", str(speed)]
        self.launcher: subprocess.Popen[bytes] | None = None
        self._groups: list[int] = []
        self.log_path = folder / "launcher.log"

    def launch(self) -> None:
        """Start ``dpstream run``."""
        with self.log_path.open("ab") as log:
            self.launcher = subprocess.Popen(
                [
                    sys.executable, "-m", *self._program,
                    "run", "--project", str(self.folder), *self._flags,
                ],
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=self.folder,
            )  # fmt: skip
        self._groups.append(self.launcher.pid)

    def count(self) -> int:
        """Releases in the sink."""
        return len(list(Path(self.job.sink.path).glob("window-*/trigger-*")))

    def until(self, condition: Callable[[], bool], seconds: float = LONGEST) -> float:
        """Wait; returns the seconds it took."""
        begin = time.monotonic()
        while not condition():
            assert time.monotonic() < begin + seconds, f"in time; {self.count()} releases"
            assert self.launcher is None or self.launcher.poll() in (None, 0), (
                self.log_path.read_text()
            )
            time.sleep(0.1)
        return time.monotonic() - begin

    def more(self, releases: int) -> float:
        """Wait for so many releases more; returns the seconds it took."""
        before = self.count()
        return self.until(lambda: self.count() >= before + releases)

    def finish(self) -> None:
        """Wait until the launcher has ended by itself."""
        assert self.launcher is not None
        self.launcher.wait(LONGEST)
        assert self.launcher.returncode == 0, self.log_path.read_text()

    def stop(self, number: int) -> float:
        """Send the launcher a signal and wait until it has ended; returns the seconds it took."""
        assert self.launcher is not None
        begin = time.monotonic()
        self.launcher.send_signal(number)
        self.finish()
        return time.monotonic() - begin

    def kill_worker(self, number: int = 0) -> None:
        """kill -9 of a Python worker: the pool's first, second, ..."""
        os.kill(self.pool.workers()[number], signal.SIGKILL)

    def kill_task_manager(self) -> None:
        """kill -9 of a task manager; another takes its place."""
        first = self.cluster.workers.pop(0)
        first.kill()
        first.wait()
        self.cluster.add_worker()

    def kill_launcher(self) -> None:
        """kill -9 of ``dpstream run``; its job goes on without it."""
        assert self.launcher is not None
        self.launcher.kill()
        self.launcher.wait()
        self.launcher = None

    def jobs(self, state: str = "RUNNING") -> list[str]:
        """Ids of the cluster's jobs in a state."""
        jobs: Any = self.cluster.ask("jobs")["jobs"]
        return [job["id"] for job in jobs if job["status"] == state]

    def cancel(self, job: str) -> None:
        """Cancel a job on the cluster, as its operator would."""
        url = f"http://{self.cluster.master}/jobs/{job}"
        with urlopen(Request(url, method="PATCH"), timeout=30):
            self.until(lambda: job not in self.jobs())

    def restarts(self) -> int:
        """How often the cluster has started its running jobs again."""
        return sum(max(self._attempts(job)) for job in self.jobs())

    def _attempts(self, job: str) -> Iterator[int]:
        details: Any = self.cluster.ask(f"jobs/{job}")
        for vertex in details["vertices"]:
            tasks: Any = self.cluster.ask(f"jobs/{job}/vertices/{vertex['id']}")
            yield from (task["attempt"] for task in tasks["subtasks"])

    def end(self) -> None:
        """End every process that was started here, job servers too."""
        for group in self._groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        if self.launcher is not None:
            self.launcher.wait()


@contextlib.contextmanager
def staged(
    cluster: "session.Cluster", pool: Pool, job: Job, folder: Path, speed: float | None = None
) -> Iterator[Stage]:
    """A stage that is cleared at the end."""
    stage = Stage(cluster, pool, job, folder, speed)
    try:
        yield stage
    finally:
        stage.end()
