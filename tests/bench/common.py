"""What the benchmarks share: job files, child processes with their peak memory, JSON results."""

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

JOB = """
[source]
kind = "parquet"
path = "{data}"
[schema]
unit = {{ column = "user", type = "int" }}
key = [{{ column = "key", type = "string" }}]
event_time = {{ column = "time" }}
{aggregates}
[time]
start = "2024-01-01T00:00:00Z"
end = "2024-01-02T00:00:00Z"
window = "1d"
trigger_every = "{every}"
[privacy]
epsilon = {epsilon}
delta = {delta}
contributions = {contributions}
mode = "{mode}"
allow_unsound = {unsound}
final_flush = {flush}
key_file = "noise.key"
[state]
store = "sqlite:{name}/state.db"
shards = {shards}
[sink]
kind = "parquet"
path = "{name}/releases"
"""
COUNT = '[[aggregate]]\nname = "count"\nkind = "count"\n'


def write_job(folder: Path, name: str, triggers: int, **fields: Any) -> Path:
    """A job file on the generated day, with a fresh noise key; returns its path."""
    from pipelines.keys import new_key

    defaults = {
        "data": "records.parquet",
        "aggregates": COUNT,
        "epsilon": 6.0,
        "delta": 1e-9,
        "contributions": 32,
        "mode": "sticky",
        "flush": "false",
        "shards": 4,
    }
    values = {**defaults, **fields}
    values["unsound"] = "true" if values["mode"] == "paper" else "false"
    text = JOB.format(name=name, every=f"{86_400_000_000 // triggers / 1e6:g}s", **values)
    (folder / name).mkdir(parents=True, exist_ok=True)
    if not (folder / "noise.key").exists():
        new_key(folder / "noise.key")
    path = folder / f"{name}.toml"
    path.write_text(text)
    return path


def in_child(module: str, *args: str) -> dict[str, Any]:
    """Run ``python -m module args`` and return the JSON of its last line."""
    command = [sys.executable, "-W", "ignore", "-m", module, *args]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(out.stdout.strip().splitlines()[-1])
    return result


def peak_gib() -> float:
    """Largest resident size of this process so far.

    Not ``ru_maxrss``: a child begins with its parent's, however small it is itself.
    """
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 2**20


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
