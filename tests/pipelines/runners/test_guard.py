"""The guard's command line, and an end that does not wait for ever (see also tests/runners)."""

import os
import subprocess
import sys

from dpstream.pipelines.runners.guard import stop, with_parent


def test_the_command_follows_this_process() -> None:
    words = with_parent(["java", "-port", 8080])
    assert words[0] == sys.executable and words[-4:] == [str(os.getpid()), "java", "-port", "8080"]
    assert all(isinstance(word, str) for word in words)


def test_a_command_that_ignores_the_request_is_killed() -> None:
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True)\n"
    stubborn = subprocess.Popen(
        [sys.executable, "-S", "-c", f"{code}time.sleep(60)"], stdout=subprocess.PIPE
    )
    assert stubborn.stdout is not None
    with stubborn.stdout as stdout:
        stdout.readline()
        stop(stubborn, 0.1)
    assert stubborn.returncode == -9
