"""Jobs on a Flink cluster, by its REST interface.

Beam's job server takes a cancelled job for ended, but only stops watching it: on a cluster it
runs on.  So what a launcher started is ended here, by its name, which nobody else has.
"""

import json
import secrets
import time
from typing import Any
from urllib.request import Request, urlopen

from dpstream.accounting.errors import RunError

_ENDED = ("FINISHED", "CANCELED", "FAILED", "SUSPENDED")
#: Seconds that a cluster may take to cancel a job; between two looks; for one answer.
_PATIENCE, _LOOK, _ANSWER = 120.0, 0.2, 20.0
#: Seconds after which a job that was never seen is not on its way to the cluster either.
_UNSEEN = 15.0


def unique(name: str | None) -> str:
    """A job's name, or ``dpstream``, with a random end."""
    return f"{name or 'dpstream'}-{secrets.token_hex(4)}"


def cancel(master: str, name: str) -> None:
    """Cancel the jobs of a name and wait until they have ended; none is fine.

    Args:
        master: ``HOST:PORT`` or URL of the job manager.

    Raises:
        RunError: the cluster does not answer, or does not cancel them in time.
    """
    root = (master if "://" in master else f"http://{master}").rstrip("/")
    begin = time.monotonic()
    while True:
        seen, left = _cancelled(root, name)
        waited = time.monotonic() - begin
        if not left and (seen or waited > _UNSEEN):
            return
        if waited > _PATIENCE:
            raise RunError(
                "--flink_master",
                "did not cancel the job, which may live on there",
                "cancel it on the cluster (`flink cancel`, or its web page)",
            )
        time.sleep(_LOOK)


def _cancelled(root: str, name: str) -> tuple[bool, bool]:
    """Ask for it once; whether such jobs are known there, and whether any has not ended."""
    try:
        jobs = [
            job for job in _answer(Request(f"{root}/jobs/overview"))["jobs"] if job["name"] == name
        ]
        left = [job for job in jobs if job["state"] not in _ENDED]
        for job in left:
            if job["state"] != "CANCELLING":
                _answer(Request(f"{root}/jobs/{job['jid']}", method="PATCH"))
    except (OSError, ValueError):  # not reached, or it has ended meanwhile
        return False, True
    return bool(jobs), bool(left)


def _answer(request: Request) -> Any:
    with urlopen(request, timeout=_ANSWER) as answer:
        return json.loads(answer.read() or b"{}")
