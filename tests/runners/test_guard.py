"""Engines end with the process that started them, however that one ends."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dpstream.pipelines.runners.guard import with_parent
from dpstream.pipelines.runners.job_servers import descendants, listeners
from tests.faults.flink import job_at
from tests.runners import prism
from tests.runners.engines import ROOT, need_flink
from tests.runners.golden import write_stream
from tests.runners.prism import wait_for

#: A command that has a child, and says the numbers of both.
FAMILY = [
    "import os, subprocess, sys, time",
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])",
    "print(os.getpid(), child.pid, flush=True)",
    "time.sleep(600)",
]
#: A parent that starts it behind a guard; ``{thread}`` starts the guard in a thread that ends.
PARENT = """\
import subprocess, sys, threading, time
from dpstream.pipelines.runners.guard import with_parent
def go():
    global guard
    guard = subprocess.Popen(with_parent([sys.executable, "-c", {family!r}]))
thread = threading.Thread(target=go)
thread.start()
thread.join()
print(guard.pid, flush=True)
time.sleep(600)
"""


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(*pids: int) -> Callable[[], bool]:
    return lambda: not any(alive(pid) for pid in pids)


@pytest.fixture
def family() -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A parent, and (the command, its child, the guard) in any order of their names."""
    program = PARENT.format(family="\n".join(FAMILY))
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    assert parent.stdout is not None
    with parent:
        lines = [parent.stdout.readline().split() for _ in range(2)]
        both, [guard] = sorted(lines, key=len, reverse=True)
        pids = [int(both[0]), int(both[1]), int(guard)]
        try:
            yield parent, pids
        finally:
            parent.kill()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def test_a_killed_parent_takes_all_with_it(
    family: tuple[subprocess.Popen[str], list[int]],
) -> None:
    parent, pids = family
    time.sleep(1.0)  # the thread that started it is long gone: that alone ends nothing
    assert all(alive(pid) for pid in pids)
    parent.kill()
    wait_for(gone(*pids), 20)


def test_a_killed_guard_takes_its_command_with_it(
    family: tuple[subprocess.Popen[str], list[int]],
) -> None:
    parent, (command, _, guard) = family
    os.kill(guard, signal.SIGKILL)
    wait_for(gone(command), 20)
    assert parent.poll() is None


def test_without_a_guard_it_goes_on() -> None:
    """What a guard is for: the same command started plainly outlives its parent."""
    program = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]])"
    command = [sys.executable, "-c", program, "\n".join(FAMILY)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        parent.wait(20)
        try:
            assert all(alive(pid) for pid in pids)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("code", [0, 7])
def test_the_exit_code_comes_through(code: int) -> None:
    command = [sys.executable, "-c", f"raise SystemExit({code})"]
    assert subprocess.run(with_parent(command), check=False).returncode == code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_come_through(number: signal.Signals) -> None:
    program = (
        "import signal, time\n"
        f"def told(n, _): print('told', flush=True); raise SystemExit(3)\n"
        f"signal.signal({int(number)}, told)\n"
        "print('there', flush=True)\n"
        "while True: time.sleep(0.1)\n"
    )
    command = with_parent([sys.executable, "-c", program])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as guard:
        assert guard.stdout is not None and guard.stdout.readline() == "there\n"
        guard.send_signal(number)
        assert guard.stdout.readline() == "told\n"
        assert guard.wait(20) == 3


def test_a_parent_that_is_gone_already_starts_nothing(tmp_path: Path) -> None:
    command = with_parent([sys.executable, "-c", f"open({str(tmp_path / 'ran')!r}, 'w')"])
    at = command.index(str(os.getpid()))
    command[at] = str(os.getppid())  # not the parent of what is started here
    assert subprocess.run(command, check=False).returncode == 1
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("runner", ["PrismRunner", "FlinkRunner"])
def test_a_killed_run_leaves_nothing_behind(runner: str, tmp_path: Path) -> None:
    """kill -9 of `dpstream run` in the middle of its stream: no engine, no pool, no worker."""
    stream = tmp_path / "stream"
    stream.mkdir()
    write_stream(stream, users=300)
    job = job_at(tmp_path / "job", stream)
    if runner == "PrismRunner":
        flags = [f"--prism_location={prism.binary()}"]
    else:
        need_flink()
        flags = ["--parallelism=2", "--experiments=use_loopback_process_worker"]
    command = [
        sys.executable, "-m", "tests.paced", "600", "run",
        "--project", str(tmp_path / "job"), f"--runner={runner}", "--quiet", *flags,
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (tmp_path / "told").open("wb") as log:
        run = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        releases = Path(job.sink.path)

        def in_the_middle() -> bool:  # on Flink: its task managers serve workers
            open_ports = listeners(descendants(run.pid)) if runner == "FlinkRunner" else []
            return len(open_ports) >= 8 or any(releases.glob("window-*/trigger-*"))

        wait_for(in_the_middle, 300)
        started = descendants(run.pid)[1:]
        # A guard and its engine; on Flink also those of a worker that is a process.
        assert len(started) >= (4 if runner == "FlinkRunner" else 2)
    finally:
        run.kill()
        run.wait()
    wait_for(gone(*started), 30)
