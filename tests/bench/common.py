"""What the benchmarks share: the machine they ran on, and JSON results."""

import contextlib
import json
import os
import platform
import resource
import time
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """What the figures were measured on, without names."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "load_1m": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d"),
    }


def emit(result: dict[str, Any], out: Path | None) -> None:
    """Print the result as JSON and append it to a file, if one is named."""
    text = json.dumps(result)
    print(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        with open(out, "a", encoding="utf-8") as file:
            file.write(text + "\n")


def child_seconds() -> float:
    """CPU seconds of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def tree_seconds(root: int | None = None) -> float:
    """CPU seconds of a process, by default this one, and of all that it has started: job servers,
    workers; 0 if it has ended."""
    root = os.getpid() if root is None else root
    parents, used = dict[int, int](), dict[int, int]()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # After the name, which may hold anything: state, parent, ...; see proc(5).
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                number = int(entry.name)
                parents[number], used[number] = int(fields[1]), sum(map(int, fields[11:15]))
    tree, size = {root}, 0
    while len(tree) > size:
        size = len(tree)
        tree |= {number for number, parent in parents.items() if parent in tree}
    return sum(used.get(number, 0) for number in tree) / os.sysconf("SC_CLK_TCK")
