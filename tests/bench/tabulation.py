"""Tables of a made-up office: 1M persons, 3 states, 1,820 tracts, iterations like production's.

    python -m tests.bench.tabulation [--persons N] [--folder DIR] [--runner NAME] [--out FILE]

All groups are released (no suppression).  ``warm`` is `execute` in a process that has loaded its
modules; ``cold`` is the whole command in a process of its own.  Seconds, CPU seconds, peak memory,
and how many groups and rows there are.  Files are made in DIR once, or for this run alone.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dpstream.pipelines.tabulation.generate import PRODUCTION, generate
from tests.bench.common import emit, machine
from tests.pipelines.tabulation.office import Office, project

KEY = "3f7a91c4d2e85b60718293a4b5c6d7e8f90a1b2c3d4e5f60718293a4b5c6d7e8"
#: CPU seconds, seconds of an idle machine and MiB that are not to be exceeded, by persons.
LIMITS = {1_000_000: (20.0, 15.0, 2_048.0), 10_000_000: (150.0, 150.0, 4_096.0)}
_WARM = """
import json, pathlib, resource, sys, time
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.pipelines.runners.bounded import Runner
from dpstream.pipelines.tabulation.config import Choice
from dpstream.pipelines.tabulation.execute import Order, execute
from dpstream.pipelines.tabulation.inputs import inputs_of, prepared
from tests.bench.common import tree_seconds
folder, out, key, runner = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), *sys.argv[3:]
wall, cpu = time.perf_counter(), tree_seconds()
inputs = inputs_of(folder / "parameters", folder / "data", Choice("p"))
workers = Runner(runner) if runner else None
done = execute(Order(inputs, out, SecretSource(None, key), runner=workers))
wall, cpu = time.perf_counter() - wall, tree_seconds() - cpu
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
groups = sum(level.groups for level in prepared(inputs).domain.levels)
print(json.dumps({"seconds": wall, "cpu_seconds": cpu, "peak_mib": peak, "groups": groups,
                  "bytes": sum(file.bytes for file in done.manifest.files.values())}))
"""


@contextlib.contextmanager
def office(folder: Path | None, persons: int) -> Iterator[Path]:
    """A folder with the files; what is there already is used again."""
    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if not (folder / "data" / "person-records.txt").exists():
            size = PRODUCTION._replace(persons=persons)
            generate(folder / "parameters", folder / "data", size, overwrite=True)
            config = folder / "parameters" / "config.json"
            settings = json.loads(config.read_text()) | {"zero_suppression_chance": 0.0}
            config.write_text(json.dumps(settings))
        yield folder


def warm(folder: Path, out: Path, runner: str) -> dict[str, Any]:
    """`execute` in a process that has loaded its modules."""
    words = [sys.executable, "-c", _WARM, str(folder), str(out), KEY, runner]
    output = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout
    return dict(json.loads(output.splitlines()[-1]))


def cold(folder: Path, out: Path) -> dict[str, float]:
    """The command in a process of its own, with a key in a file."""
    key = folder / "noise.secret"
    if not key.exists():
        key.write_text(KEY + "\n")
        key.chmod(0o600)
    file = project(folder, Office(folder / "parameters", folder / "data"), secret=f"file:{key}")
    words = [sys.executable, "-m", "dpstream", "census", "execute", "--project", str(file),
             "--out", str(out)]  # fmt: skip
    wall = time.perf_counter()
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as command:
        _, status, used = os.wait4(command.pid, 0)  # of this process alone
        command.returncode = os.waitstatus_to_exitcode(status)
    assert command.returncode == 0
    return {
        "seconds": time.perf_counter() - wall,
        "cpu_seconds": used.ru_utime + used.ru_stime,
        "peak_mib": used.ru_maxrss / 1024,
    }


def rows_of(out: Path) -> int:
    """Rows of all tables; there are as many of margins."""
    files = out.glob("t[1-4]/**/*.csv")
    return sum(path.read_bytes().count(b"\n") - 1 for path in files)


def over(persons: int, figures: dict[str, Any]) -> list[str]:
    """Which limits a result exceeds; none are set for other numbers of persons."""
    names = ("cpu_seconds", "seconds", "peak_mib")
    limits = LIMITS.get(persons, ())
    return [name for name, limit in zip(names, limits, strict=False) if figures[name] > limit]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--persons", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--runner", default="")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with (
        office(options.folder, options.persons) as folder,
        tempfile.TemporaryDirectory(dir=folder) as place,
    ):
        figures: dict[str, Any] = {"warm": warm(folder, Path(place) / "warm", options.runner)}
        figures["rows"] = rows_of(Path(place) / "warm")
        if options.cold:
            figures["cold"] = cold(folder, Path(place) / "cold")
    shape = {"persons": options.persons, "runner": options.runner or "in process"}
    exceeded = over(options.persons, figures["warm"]) if not options.runner else []
    result = {"bench": "tabulation", **shape, **figures, "over": exceeded, "machine": machine()}
    emit(result, options.out)


if __name__ == "__main__":
    main()
