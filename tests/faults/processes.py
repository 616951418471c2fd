"""Child processes that are forked from a clean server with the imports done."""

import functools
import multiprocessing
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from tests.faults.child import BEATEN, attempt

#: No child needs this long; one that does has hung.
LONGEST = 120


@functools.cache
def forkserver_context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.faults.child"])
    return context


def start(*args: Any, **options: Any) -> ForkServerProcess:
    """Start ``attempt`` in a child."""
    process = forkserver_context().Process(target=attempt, args=args, kwargs=options, daemon=True)
    process.start()
    return process


def finish(process: ForkServerProcess) -> int:
    """Exit code of a child; one that hangs is an error."""
    process.join(LONGEST)
    if process.exitcode is None:
        process.kill()
        raise AssertionError("a child process hung")
    return process.exitcode


def run_to_the_end(*args: Any, **options: Any) -> None:
    """Run children until one is done; only losing a race is a reason to try again."""
    for _ in range(20):
        code = finish(start(*args, **options))
        if code == 0:
            return
        assert code == BEATEN, f"a child failed with exit code {code}"
    raise AssertionError("no attempt came to an end")


def files(folder: Path) -> dict[str, bytes]:
    """Every file below a folder and its bytes; drafts of killed writers (hidden) do not count."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }
