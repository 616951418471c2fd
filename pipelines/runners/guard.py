"""Run a command that ends with the process that started it, however that one ends.

``python guard.py PARENT COMMAND...`` stands between a launcher and an engine.  It sleeps until
either ends.  If the parent has ended, also by ``kill -9``, it kills the command and what that
started.  The command in turn gets SIGKILL from the kernel when the guard is killed: that is safe
only here, because Linux ties it to the *thread* that started the command, and the guard has one.
SIGINT and SIGTERM are passed on; those of a terminal do not reach it, so an engine ends when its
launcher says so.  At the end it removes the command's folder, which may hold private rows.
"""

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

#: Variable of the environment that names the command's folder.
FOLDER = "DPSTREAM_GUARDED_FOLDER"
_PR_SET_PDEATHSIG = 1
#: Milliseconds between two looks where the system has no descriptors of processes.
_LOOK = 500


def with_parent(command: Sequence[object]) -> list[str]:
    """Return the command, to be started by this process, as one that ends with it."""
    guard = [sys.executable, "-I", "-S", __file__, str(os.getpid())]
    return [*guard, *(str(word) for word in command)]


def stop(process: "subprocess.Popen[bytes]", seconds: float) -> None:
    """End what was started so, in order if it does so in time."""
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()  # the command dies with its guard
        process.wait()


def main(parent: int, command: Sequence[str]) -> int:
    """Run the command until it or the parent ends; its exit code."""
    os.setsid()
    signals: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, _frame: object) -> None:
        signals.append(number)
        if child is not None:
            child.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, pass_on)
    own = os.getpid()

    def die_with_guard() -> None:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != own:
                os._exit(1)

    parents = _descriptor(parent)
    if os.getppid() != parent or signals:
        return 1
    child = subprocess.Popen(command, process_group=0, preexec_fn=die_with_guard)  # noqa: PLW1509
    for late in signals:  # one that came meanwhile
        child.send_signal(late)
    try:
        _wait(child, parent, parents)
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)  # it, or what it has left behind
    code = child.wait()
    if folder := os.environ.get(FOLDER):
        shutil.rmtree(folder, ignore_errors=True)
    return code


def _wait(child: "subprocess.Popen[bytes]", parent: int, parents: int | None) -> None:
    """Until one of the two has ended."""
    ends = select.poll()
    for descriptor in (parents, _descriptor(child.pid)):
        if descriptor is not None:
            ends.register(descriptor, select.POLLIN)
    while os.getppid() == parent and child.poll() is None:
        ends.poll(None if parents is not None else _LOOK)


def _descriptor(pid: int) -> int | None:
    """What becomes readable when a process ends, where there is such a thing."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # another system, or it has ended
        return None


if __name__ == "__main__":
    code = main(int(sys.argv[1]), sys.argv[2:])
    sys.exit(code if code >= 0 else 128 - code)
