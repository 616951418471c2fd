"""Which tests ``make test`` leaves to ``make extended``: those that reach no line of their own.

    pip install pytest-cov
    python -m tests.bench.lanes                   # half an hour; writes tests/extended.txt
    python -m tests.bench.lanes --measured FOLDER  # chooses again from a run's measurements

All tests but the slow ones run with coverage by test, and the CPU seconds of each are noted.
``make test`` keeps

* the first cases of each test (in the order of `tests.lanes.in_order`) while each takes less than
  0.05 CPU seconds; those of less than 5 CPU seconds of sabotage and of some folders (`ALWAYS`);
  all of the modules whose figures stand in a document, and `KILLERS`;
* one case of each test whose id has a word of `ONE_CASE`, if it takes less than 5 CPU seconds;
* and of the others, by lines for a CPU second, those that reach a line which none before reached.

So each line that any of these tests runs in its own process is run by ``make test``.  What only
other processes run (workers, killed commands) is not seen.  CI makes both runs.  Tests of two CPU
seconds and more may be added to the list by hand where ``make test`` takes too long.
"""

import argparse
import heapq
import os
import re
import resource
import sqlite3
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import NamedTuple

import numpy as np
import pytest

from dpstream.accounting.arrays import Bool
from tests.lanes import EXTENDED, in_order

#: Tests that stay unless they are long: leaks, released bytes, documentation, oracles, sabotage.
ALWAYS = re.compile(r"tests/(audit/|golden/|test_|docs/|statistical/|oracle/)|.*sabotage")
#: Tests that alone killed a mutant of a sample of 300: lines do not show what they hold.
KILLERS = re.compile(
    "test_a_combined_test_takes_the_counts_noise_of_its_own_trigger|test_a_unit_of_nulls_adds|"
    "test_every_kind_of_change_is_there|test_the_widest_and_narrowest_bounds_end_in_a_plan|"
    "test_suppression_is_below_the_state_only|test_without_an_account_and_with_bad_records|"
    "test_workloads"
)
#: Tests of which one case stays, whatever lines it reaches.
ONE_CASE = re.compile(
    "neighbour|kill|golden|leak|privacy|private|same_bytes|charge|histories|schedules|sensitiv|"
    "damage|changes_nothing|restored|lost|two_runs|at_once|other_noise|one_noise|power_noise|"
    "every_path|overspend|within_the_budget|is_seen|is_noticed|is_caught"
)
CHEAP_SECONDS, LONG_SECONDS = 0.05, 5.0
FIGURES = Path(__file__).with_name("figures.json")
_FOLDER = "DPSTREAM_LANES_FOLDER"
_SOURCE = ("accounting", "state", "dp_transforms", "pipelines")
_HEADER = (
    "# What `make test` leaves to `make extended`: lines NUMBER TEST, and so many cases stay.",
    "# Each line that they run in pytest's own process is run by a test that stays; but for tests",
    "# of two CPU seconds and more, which were added by hand.",
    "# Written by `python -m tests.bench.lanes`.",
)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Note the CPU seconds of a test and of the processes that it waited for."""
    before = _cpu_seconds()
    outcome = yield
    name = os.environ.get("PYTEST_XDIST_WORKER", "main")
    with (Path(os.environ[_FOLDER]) / f"{name}.cpu").open("a") as file:
        file.write(f"{_cpu_seconds() - before:.4f} {item.nodeid}\n")
    return outcome


def _cpu_seconds() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def measure(folder: Path) -> None:
    """Run all tests but the slow ones with coverage by test."""
    config = folder / "lanes.ini"  # pytest-cov deletes coverage.*
    source = "".join(f"\n    {Path(name).resolve()}" for name in _SOURCE)
    config.write_text(f"[run]\nsource ={source}\ndata_file = {folder}/coverage\n")
    options = ["-m", "not slow", "-n", "3", "--dist", "worksteal", "-p", "tests.bench.lanes"]
    coverage = ["--cov", f"--cov-config={config}", "--cov-context=test", "--cov-report="]
    command = [sys.executable, "-m", "pytest", "-p", "pytest_cov", *options, *coverage]
    subprocess.run(command, env={**os.environ, _FOLDER: str(folder)}, check=True)


class Measured(NamedTuple):
    """The tests of a run.

    Attributes:
        seconds: CPU seconds by test id.
        lines: by test id, (bytes,) packed bits of the lines of all source files it ran.
    """

    seconds: dict[str, float]
    lines: dict[str, np.ndarray[tuple[int], np.dtype[np.uint8]]]

    def ran(self, test: str) -> Bool:
        """Return (lines,) whether a test ran each line."""
        return np.unpackbits(self.lines[test]).astype(np.bool_)


def read(folder: Path) -> Measured:
    """Read what ``measure`` has written."""
    seconds = {}
    for path in folder.glob("*.cpu"):
        for line in path.read_text().splitlines():
            used, test = line.split(" ", 1)
            seconds[test] = float(used)
    rows, begins, size = list[tuple[str, str, bytes]](), dict[str, int](), 0
    for path in folder.glob("coverage*"):
        rows += sqlite3.connect(path).execute(
            "SELECT context, path, numbits FROM line_bits"
            " JOIN context ON context.id = context_id JOIN file ON file.id = file_id"
        )
    longest: Counter[str] = Counter()
    for _, path_name, bits in rows:
        longest[path_name] = max(longest[path_name], len(bits))
    for path_name, length in longest.items():
        begins[path_name], size = size, size + length
    lines = {test: np.zeros(size, np.uint8) for test in seconds}
    for context, path_name, bits in rows:
        test = context.rpartition("|")[0]
        if test in lines:
            begin = begins[path_name]
            lines[test][begin : begin + len(bits)] |= np.frombuffer(bits, np.uint8)
    return Measured(seconds, lines)


def chosen(measured: Measured) -> Iterator[tuple[str, int]]:
    """Yield each test function of which not all cases stay in ``make test``, and how many do."""
    if not measured.seconds:
        raise ValueError("no test was measured: name the folder of a run")
    cited = set(re.findall(r"tests/\S+\.py", FIGURES.read_text()))
    cases = defaultdict[str, list[str]](list)
    for test in in_order(measured.seconds):
        cases[test.partition("[")[0]].append(test)
    staying: Counter[str] = Counter()
    reached = np.zeros(8 * len(next(iter(measured.lines.values()))), np.bool_)

    def keep(function: str) -> None:
        reached[measured.ran(cases[function][staying[function]])] = True
        staying[function] += 1

    for function, tests in cases.items():
        while staying[function] < len(tests) and (
            (ALWAYS.match(function) and measured.seconds[tests[staying[function]]] < LONG_SECONDS)
            or KILLERS.search(function)
            or function.partition("::")[0] in cited
            or measured.seconds[tests[staying[function]]] < CHEAP_SECONDS
            or (not staying[function] and _deserves_one(function, measured.seconds[tests[0]]))
        ):
            keep(function)

    def new_lines(function: str) -> float:
        """New lines for a CPU second of a function's next case."""
        if staying[function] == len(cases[function]):
            return 0.0
        test = cases[function][staying[function]]
        return np.count_nonzero(measured.ran(test) & ~reached) / max(measured.seconds[test], 0.02)

    waiting = [(-new_lines(function), function) for function in cases]
    heapq.heapify(waiting)
    while waiting and waiting[0][0] < 0:
        _, function = heapq.heappop(waiting)
        rate = new_lines(function)  # others may have reached its lines meanwhile
        if rate and (not waiting or rate >= -waiting[0][0]):
            keep(function)
            rate = new_lines(function)
        if rate:
            heapq.heappush(waiting, (-rate, function))
    for function, tests in cases.items():  # a line that only a later case reaches
        for number in range(staying[function], len(tests)):
            if (measured.ran(tests[number]) & ~reached).any():
                while staying[function] <= number:
                    keep(function)
    for function in sorted(cases):
        if staying[function] < len(cases[function]):
            yield function, staying[function]


def _deserves_one(function: str, seconds: float) -> bool:
    """Whether one case of a test stays whatever lines it reaches."""
    return ONE_CASE.search(function) is not None and seconds < LONG_SECONDS


def main() -> None:
    """Measure, or take a run's measurements, and write the list."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measured", type=Path, help="the folder of an earlier run")
    folder = parser.parse_args().measured
    if folder is None:
        folder = Path(mkdtemp(prefix="lanes-"))
        print(f"Measurements go to {folder}")
        measure(folder)
    lines = [f"{number} {function}" for function, number in chosen(read(folder))]
    EXTENDED.write_text("\n".join([*_HEADER, *lines]) + "\n")
    print(f"{len(lines)} tests in {EXTENDED.name}")


if __name__ == "__main__":
    main()
