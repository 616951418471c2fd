"""The commands ``success`` and ``failure`` of a job, which tell others how a run has ended.

Each is a list of arguments and starts without a shell, in the project file's folder.  Its
environment has three variables and no other, so that it gets no secret of this process:
``DPSTREAM_JOB``, ``DPSTREAM_WINDOW`` (the first and the last instant of the newest window that was
due) and ``DPSTREAM_STATE`` (``complete``; ``incomplete``: released without expected files;
``failed``).  A run that is stopped starts neither: not all that is due is out.

**Public.**  All three are functions of the job, of the clock and of which expected names are there;
that a run has failed is told by its exit code too.  No message, duration or number of rows goes to
a command, because those depend on the records.
"""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from dpstream.accounting.errors import DpstreamError, RunError
from dpstream.accounting.figures import moment_of, time_text
from dpstream.pipelines.jobs.job import Job
from dpstream.pipelines.runners.errors import say
from dpstream.pipelines.stream.passes import trigger_time_of
from dpstream.pipelines.stream.run import Result

#: Seconds that a command may take.
_MOST_SECONDS = 300


@contextmanager
def announcing(job: Job, through: str | None) -> Iterator[Callable[[Result], None]]:
    """Start the job's command when the run in the block has ended; the block notes its result.

    Args:
        through: the instant of a pass.

    Raises:
        RunError: ``success`` cannot be started, or ends with an error.  Where the run has failed,
            its own error is raised and that of ``failure`` is a warning.
    """
    results = list[Result]()
    try:
        yield results.append
    except Exception:
        try:
            _start(job, "failure", "failed", through)
        except RunError as error:
            say(error)
        raise
    for result in results:
        if result.stopped:
            continue
        state = "incomplete" if result.missing else "complete"
        _start(job, "success", state, result.through)


def _start(job: Job, field: str, state: str, through: str | None) -> None:
    command = job.section.success if field == "success" else job.section.failure
    if command is None:
        return
    names = {"DPSTREAM_JOB": job.name, "DPSTREAM_WINDOW": _window(job, through)}
    failed, folder = f"job.{job.name}.{field}", job.path.parent
    again = "correct it, and type the same command again: what is released is not charged again"
    try:
        code = subprocess.run(
            command,
            env={**names, "DPSTREAM_STATE": state},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=2,  # what a person or --json reads stays this program's own
            timeout=_MOST_SECONDS,
            check=False,
        ).returncode
    except subprocess.TimeoutExpired:
        raise RunError(failed, f"has not ended within {_MOST_SECONDS} s", again) from None
    except (OSError, ValueError):
        raise RunError(failed, "cannot be started", again) from None
    if code:
        raise RunError(failed, f"has ended with exit code {code}", again)


def _window(job: Job, through: str | None) -> str:
    """Return the newest window that is due at an instant; empty if none is."""
    timeline = job.plan.timeline
    until = through or ("now" if timeline.end is None else "end")
    with suppress(DpstreamError):  # the flag is none, which the run has reported
        window = timeline.windows_at(trigger_time_of(timeline, until))[-1]
        return "/".join(time_text(moment_of(each)) for each in timeline.window_bounds(window))
    return ""
