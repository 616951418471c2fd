"""Servers of tests that end with the tests, however those end."""

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from dpstream.pipelines.runners.guard import with_parent
from dpstream.pipelines.runners.job_servers import descendants


def start(command: Sequence[object], **settings: Any) -> "subprocess.Popen[bytes]":
    """Start a server behind a guard."""
    return subprocess.Popen(with_parent(command), **settings)


def kill(process: "subprocess.Popen[bytes]") -> None:
    """kill -9 of the server, not of its guard; returns when it is gone."""
    for pid in descendants(process.pid)[1:]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
