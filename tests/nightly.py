"""All slow tests in slices of a given time: ``make nightly HOURS=1`` or ``MINUTES=20``.

Tests that never ran come first, then those that ran longest ago, file by file.  Each begin and each
outcome is a line of ``.tools/nightly.jsonl``, so a slice that is killed loses one test at most:
one that began and has no outcome.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
LOG = ROOT / ".tools" / "nightly.jsonl"
#: Tells the plugin in pytest's process of the log and of the end of the slice.
_LOG, _UNTIL = "NIGHTLY_LOG", "NIGHTLY_UNTIL"
#: The last test of a slice may last so much longer, then it is killed.
GRACE_SECONDS = 1_800.0


class Last(NamedTuple):
    """The last run of a test: when it began, how it ended and after how many seconds."""

    began: float
    outcome: str = "killed"
    seconds: float = 0.0


#: Of a test that never ran.
NEVER = Last(0.0, "never run")


def last_runs(log: Path) -> dict[str, Last]:
    """Return the last run of each test of a log."""
    lines = log.read_text().splitlines() if log.exists() else []
    return {entry.pop("test"): Last(**entry) for entry in map(json.loads, lines)}


def in_turn(tests: Iterable[str], last: dict[str, Last]) -> list[str]:
    """Return tests in their order: files by their longest-ago test, and so the tests of a file."""
    began = {test: last.get(test, NEVER).began for test in tests}
    file_began = dict[str, float]()
    for test, when in began.items():
        file = test.partition("::")[0]
        file_began[file] = min(when, file_began.get(file, when))

    def turn(test: str) -> tuple[float, str, float]:
        file = test.partition("::")[0]
        return file_began[file], file, began[test]

    return sorted(began, key=turn)


def note(test: str, last: Last) -> None:
    """Append a run to the log."""
    with open(os.environ[_LOG], "a") as log:
        log.write(json.dumps({"test": test, **last._asdict()}) + "\n")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of a file in their order."""
    tests = {item.nodeid: item for item in items}
    items[:] = [tests[name] for name in in_turn(tests, last_runs(Path(os.environ[_LOG])))]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Note when a test begins and how it ends; the slice ends behind it if its time is over."""
    began, reports = time.time(), list[Any]()
    note(item.nodeid, Last(began))
    item.stash[_REPORTS] = reports
    result = yield
    outcomes = {report.outcome for report in reports}
    outcome = next(each for each in ("failed", "skipped", "passed") if each in outcomes)
    note(item.nodeid, Last(began, outcome, round(time.time() - began, 1)))
    if time.time() >= float(os.environ[_UNTIL]):
        item.session.shouldstop = "the slice is over"
    return result


_REPORTS = pytest.StashKey[list[Any]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[Any]:
    """Keep the reports of a test's set-up, call and end."""
    report = yield
    item.stash[_REPORTS].append(report)
    return report


def collected(paths: list[str]) -> list[str]:
    """Return all slow tests."""
    # Without the project's options, which print another list.
    options = ["-o", "addopts=", "-q", "--collect-only", "-m", "slow"]
    command = [sys.executable, "-m", "pytest", *options, *paths]
    listed = subprocess.run(command, capture_output=True, text=True, check=True)
    return [line for line in listed.stdout.splitlines() if "::" in line]


def run_slice(tests: list[str], log: Path, seconds: float) -> None:
    """Run tests in their order for so many seconds, one process for each file."""
    until = time.time() + seconds
    log.parent.mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), _LOG: str(log), _UNTIL: str(until)}
    for file in dict.fromkeys(test.partition("::")[0] for test in in_turn(tests, last_runs(log))):
        time_to_run = until - time.time()
        if time_to_run <= 0:
            return
        print(f"{time.strftime('%H:%M:%S')} {file}", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", "-m", "slow", "-p", "tests.nightly", file]
        try:
            subprocess.run(
                command, env=environment, check=False, timeout=time_to_run + GRACE_SECONDS
            )
        except subprocess.TimeoutExpired:
            return


def summary(tests: list[str], last: dict[str, Last]) -> str:
    """Return what has failed, what never ran, and how long ago the others ran."""
    runs = {test: last.get(test, NEVER) for test in tests}
    wrong = [
        f"{run.outcome} {time.strftime('%Y-%m-%d %H:%M', time.localtime(run.began))}: {test}"
        for test, run in runs.items()
        if run.outcome in ("failed", "killed")
    ]
    began = [run.began for run in runs.values() if run != NEVER]
    never = [test for test, run in runs.items() if run == NEVER]
    days = (time.time() - min(began, default=time.time())) / 86_400
    head = (
        f"{len(runs)} slow tests, {len(wrong)} failed, {len(never)} never run; "
        f"the oldest run began {days:.1f} days ago."
    )
    files = Counter(test.partition("::")[0] for test in never)
    return "\n".join([head, *wrong, *(f"never run: {n} of {file}" for file, n in files.items())])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", default=["tests"])
    parser.add_argument("--hours", type=float, default=0.0)
    parser.add_argument("--minutes", type=float, default=0.0, help="0: only the summary")
    parser.add_argument("--log", type=Path, default=LOG)
    options = parser.parse_args()
    tests = collected(options.paths)
    if not tests:
        parser.error("there is no slow test")
    run_slice(tests, options.log, 3_600 * options.hours + 60 * options.minutes)
    last = last_runs(options.log)
    print(summary(tests, last))
    sys.exit(any(last.get(test, NEVER).outcome in ("failed", "killed") for test in tests))


if __name__ == "__main__":
    main()
