"""CPU seconds of `dpstream session plan` on a table with thousands of answers.

    python -m tests.bench.session_plan [--answers N] [--runs R] [--out FILE]

A plan without a union reads the charged regions and no answer, so that its time must not grow with
the number of answers.  The same command is measured before the first answer, and `dpstream --help`,
in turn with it; on a busy machine all three are slower alike.  Modules are compiled before, as an
installed program's are.  The exit code is 1 above `LIMIT` CPU seconds (the median of the runs).
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from dpstream.accounting.sessions.aggregates import COUNT
from dpstream.pipelines.session.config import load_config
from dpstream.pipelines.session.records.load import init
from dpstream.pipelines.session.session import Session
from dpstream.state.ledger.open import PROJECT_FILE
from tests.bench import rides
from tests.bench.common import child_seconds, emit, machine

LIMIT = 0.4
ROWS = 2_000


def answer(project: Path, answers: int) -> None:
    """Ask so many different questions, each of one square of the map."""
    with Session(project) as session:
        for number in range(answers):
            row, column = divmod(number, 64)
            where = (
                f"x >= {column * 16} AND x < {column * 16 + 16} AND y >= {row} AND y < {row + 1}"
            )
            session.where(f"initial >= 0.5 AND {where}").ask((COUNT,), 0.001)


def seconds(*words: str | Path) -> float:
    """Of one command in a process of its own."""
    compiled = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    command, before = [sys.executable, "-m", "dpstream", *words], child_seconds()
    subprocess.run(command, check=True, capture_output=True, env=compiled)
    return child_seconds() - before


def plan(project: Path) -> float:
    """Of one `dpstream session plan`."""
    question = ("count", "--where", "initial >= 0.5 AND hour < 100", "--epsilon", "0.1", "--json")
    return seconds("session", "plan", "rides", "--project", project, *question)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--answers", type=int, default=3_002)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        empty, full = Path(folder, "empty"), Path(folder, "full")
        empty.mkdir()
        rides.write(empty, ROWS, False)
        init(load_config(empty / PROJECT_FILE))
        shutil.copytree(empty, full)
        answer(full / PROJECT_FILE, arguments.answers)
        rows = [
            (plan(full / PROJECT_FILE), plan(empty / PROJECT_FILE), seconds("--help"))
            for _ in range(arguments.runs + 1)
        ][1:]
    took, before, help_ = (statistics.median(column) for column in zip(*rows, strict=True))
    result = {
        "bench": "session plan", "answers": arguments.answers, "runs": arguments.runs,
        "cpu_seconds": round(took, 3), "without_answers": round(before, 3),
        "help": round(help_, 3), "to_help": round(took / help_, 2),
    }  # fmt: skip
    emit(result | machine(), arguments.out)
    if took > LIMIT:
        print(f"{took:.3f} CPU seconds, more than {LIMIT}", file=sys.stderr)
    return int(took > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
