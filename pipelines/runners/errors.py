"""Coded errors for exceptions of runners, whose text may hold anything, and warnings."""

import re
import sys
from collections.abc import Callable, Iterable

from dpstream.accounting.errors import DpstreamError, PolicyError, RunError, UsageError
from dpstream.dp_transforms.telemetry import first_error
from dpstream.state.disk_errors import memory_error, out_of_memory
from dpstream.state.private_log import unexpected

#: First words of the fields that stages name; no other word of a runner's text is shown.
_FIELDS = (
    "account",
    "aggregate",
    "budget",
    "cells",
    "coder",
    "contributions",
    "data",
    "dead_letter",
    "end",
    "key",
    "mechanism",
    "memory",
    "per_key_bound",
    "public_keys",
    "records",
    "release_every",
    "remember_keys",
    "run",
    "runner",
    "secret",
    "shards",
    "sink",
    "source",
    "stage",
    "start",
    "statement",
    "store",
    "table",
    "threads",
    "window",
)
_CODED = re.compile(
    rf"accounting\.errors\.(UsageError|PolicyError|RunError): ((?:{'|'.join(_FIELDS)})"
    r"(?:\.[a-z_]{1,16})?): "
)
#: How the libraries of a worker elsewhere, whose error is a text only, say that memory ended.
_MEMORY = re.compile(r"MemoryError\b|can't start new thread|std::bad_alloc")
_KINDS: dict[str, type[DpstreamError]] = {
    "UsageError": UsageError,
    "PolicyError": PolicyError,
    "RunError": RunError,
}


def coded(error: BaseException, errors: Iterable[DpstreamError] = ()) -> DpstreamError:
    """Return the coded error behind a runner's exception; else its class only, never its text.

    The coded error is inside the exception (FnApiRunner), or was raised by a worker of this process
    (Prism, Flink with LOOPBACK), or by a worker elsewhere.  Of the last kind only the class and the
    public name of the field are taken from the runner's text, because the rest may hold data.

    Args:
        errors: errors that workers may raise and that have public text only.  The first one whose
            class and text are in the runner's text is returned.

    Raises:
        KeyboardInterrupt: the user has interrupted the runner, which wraps that as well.
    """
    seen: BaseException | None = error
    memory = False
    while seen is not None:
        if isinstance(seen, DpstreamError):
            return seen
        if isinstance(seen, KeyboardInterrupt):
            raise seen
        memory |= out_of_memory(seen)
        seen = seen.__cause__ or seen.__context__
    worker_error = first_error()
    if worker_error is not None:
        return worker_error
    text = str(error)
    for one in errors:
        if f".{type(one).__qualname__}: {one}" in text:
            return one
    named = _CODED.search(text)
    memory |= named is not None and named[2] == "memory"
    if memory or _MEMORY.search(text):
        return memory_error("a worker")
    if named is not None:
        return _KINDS[named[1]](named[2], "failed on a worker", "read that worker's log")
    return unexpected("runner", error)


#: Receives a warning that is to be printed.
Warn = Callable[[DpstreamError | str], None]


def say(warning: DpstreamError | str) -> None:
    """Print one plain line on stderr."""
    print(f"Warning: {warning}", file=sys.stderr, flush=True)
