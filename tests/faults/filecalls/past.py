"""``make faults REF=fec02190``: faults that the harness shows in commands of an earlier commit.

The commit is checked out into a worktree with an environment of its own (packages come from the
registry, by the commit's lock), and its commands run below the preloaded library with their options
of then.  By hand only: it looks for what was wrong then.

* B1: a command is killed in the commit of its charge; other commands are then refused.
* A1: a question is answered, the power is lost, records are added, and it is asked again.
* B4: the power is lost after an answer, or a bit of it is flipped; it is asked for again.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.faults.damage import flip
from tests.faults.filecalls.commands import KEY, WORKLOAD
from tests.faults.filecalls.disk import NAMES, UNLINK, WRITE, Call, Disk, calls
from tests.faults.filecalls.server import ACTIONS, Ended, library

ROOT = Path(__file__).parents[3]
_CHILD = """
import ctypes, os, sys
from dpstream.pipelines.cli.main import main
folder, at, action, journal = sys.argv[1:5]
ctypes.CDLL(os.environ["LD_PRELOAD"]).filecalls_arm(
    folder.encode(), ctypes.c_long(int(at)), int(action), 0, 0, 0, journal.encode())
sys.argv = ["dpstream", *sys.argv[5:]]
main()
"""
_LEDGER = "account/ledger.db"
RUN = ("run", "job.toml", "--quiet")
ANSWER = ("answer", "asked.json", "job.toml", "--cache", "cache", "--quiet", "--out")
ASK = ("session", "ask", "small.toml", "count", "--where", "epsilon >= 1.5", "--epsilon", "0.25")
#: A job and a session's table had files of their own then.
JOB_FILE = f"""
[source]
kind = "csv"
path = "in.csv"
[schema]
unit = {{ column = "user", type = "int" }}
key = [{{ column = "page" }}]
event_time = {{ column = "time" }}
[[aggregate]]
name = "n"
kind = "count"
[time]
start = "2024-01-01T00:00:00Z"
end = "2024-01-03T00:00:00Z"
window = "1d"
trigger_every = "12h"
[privacy]
epsilon = 15.0
delta = 1e-3
contributions = 6
insecure_test_key = "{KEY}"
[state]
store = "sqlite:state/s.db"
shards = 1
[sink]
kind = "csv"
path = "out"
[ledger]
path = "account/ledger.db"
data_set = "d"
limit = {{ epsilon = 90.0, delta = 0.02, allow_large_delta = true }}
"""
SESSION = f"""
[ledger]
path = "account/ledger.db"
data_set = "d"
[privacy]
insecure_test_key = "{KEY}"
[table]
name = "small"
folder = "small.table"
records = "small.csv"
id = "name"
[[dimension]]
name = "a"
type = "integer"
low = 0
high = 4
[[dimension]]
name = "epsilon"
type = "budget"
most = 2.0
step = 0.25
"""
#: How many records are added between two askings of one question.
ADDED = 37


@dataclass
class Past:
    """Commands of a commit.

    Attributes:
        python: of its environment; tree: its checkout; scratch: where worlds are made.
    """

    python: Path
    tree: Path
    scratch: Path

    def run(self, folder: Path, *words: str, at: int = 0) -> tuple[Ended, list[Call]]:
        """A command, killed at a call if ``at`` is not 0; and the calls that it made."""
        journal = folder.with_suffix(".journal")
        journal.unlink(missing_ok=True)
        action = ACTIONS["kill" if at else "count"]
        env = os.environ | {"LD_PRELOAD": str(library()), "PYTHONPATH": str(self.tree)}
        command = [str(self.python), "-c", _CHILD, str(folder), str(at), str(action), str(journal)]
        ran = subprocess.run([*command, *words], cwd=folder, env=env, check=False,
                             capture_output=True, text=True)  # fmt: skip
        return Ended(ran.returncode, ran.stdout, ran.stderr), list(calls(journal))

    def done(self, folder: Path, *words: str) -> tuple[Ended, list[Call]]:
        """A command that must end well."""
        ended, made = self.run(folder, *words)
        assert ended.code == 0, f"dpstream {' '.join(words)}: {ended.stderr}"
        return ended, made

    def again(self, world: Callable[[Path], None], *before: str) -> Path:
        """A world at the place of the case, anew."""
        folder = self.scratch / "case"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        world(folder)
        if before:
            self.done(folder, *before)
        return folder


def prepared(ref: str, place: Path) -> tuple[Path, Path]:
    """A commit's environment and checkout, made if they are not there."""
    tree, python = place / "tree", place / "venv" / "bin" / "python"
    if not tree.exists():
        subprocess.run(["git", "worktree", "prune"], cwd=ROOT, check=True)
        subprocess.run(["git", "worktree", "add", "--detach", str(tree), ref], cwd=ROOT, check=True)
    if not (place / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", str(place / "venv")], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "--require-hashes",
                        "-r", str(tree / "deploy" / "runtime.lock")], check=True)  # fmt: skip
        (place / "ready").touch()
    return python, tree


def stream(folder: Path) -> None:
    """A job of then, whose file has the limit."""
    rows = ["user,page,time", *(f"{n % 60},p{n % 4},2024-01-01T07:00:00Z" for n in range(240))]
    (folder / "in.csv").write_text("\n".join(rows) + "\n")
    limit = "limit = { epsilon = 90.0, delta = 0.009 }"
    (folder / "job.toml").write_text(re.sub(r"(?m)^limit = .*$", limit, JOB_FILE))
    (folder / "asked.json").write_text(json.dumps(WORKLOAD))
    (folder / "state").mkdir()
    (folder / "account").mkdir()


def session(folder: Path) -> None:
    """A table of 900 records, and records to add."""

    def rows(of: range) -> str:
        return "\n".join(["name,a,epsilon", *(f"r{n},{n % 4},2" for n in of)]) + "\n"

    (folder / "small.csv").write_text(rows(range(900)))
    (folder / "more.csv").write_text(rows(range(1000, 1000 + ADDED)))
    (folder / "small.toml").write_text(SESSION)
    (folder / "account").mkdir()


def after_power(before: Path, made: list[Call], model: str, folder: Path, seed: int = 0) -> None:
    """Make the folder what the disk held after a loss of power at the end of a command."""
    disk = Disk(before)
    for call in made:
        disk.replay(call)
    shutil.rmtree(folder)
    folder.mkdir()
    disk.write(folder, model, seed)


def last_line(ended: Ended) -> str:
    """How a command ended, in one line."""
    line = (ended.stderr.strip().splitlines() or ["no message"])[-1]
    return f"exit {ended.code}" + (f": {line[:160]}" if ended.code else "")


def killed_in_a_commit(past: Past) -> bool:
    """B1: whether other commands are refused after a kill in a commit of the ledger."""
    folder = past.again(stream)
    _, made = past.done(folder, *RUN)
    writes = [n for n, call in enumerate(made, 1) if call.kind == WRITE and call.path == _LEDGER]
    ends = [n for n, call in enumerate(made, 1) if call.kind == UNLINK and n > writes[-1]
            and call.path == f"{_LEDGER}-journal"]  # fmt: skip
    folder = past.again(stream)
    at = ends[0]
    past.run(folder, *RUN, at=at)
    print(f"B1: dpstream run, killed at call {at} of {len(made)} ({NAMES[made[at - 1].kind]} "
          f"{made[at - 1].path}); then")  # fmt: skip
    refused = 0
    for words in (RUN, (*ANSWER, "answers"), ("ledger", "show", "job.toml")):
        ended, _ = past.run(folder, *words)
        refused += ended.code != 0
        print(f"  dpstream {' '.join(words)}: {last_line(ended)}")
    return refused == 3


def same_noise(past: Past) -> bool:
    """A1: whether two answers of one charge differ by the records that were added."""
    words = (*ASK, "--json")
    folder, before = past.again(session, "session", "init", "small.toml"), past.scratch / "b"
    shutil.rmtree(before, ignore_errors=True)
    shutil.copytree(folder, before)
    ended, made = past.done(folder, *words)
    first = _answer(ended)
    for seed in range(50):
        after_power(before, made, "entries", folder, seed)
        past.done(folder, "session", "add", "small.toml", "more.csv")
        second = _answer(past.done(folder, *words)[0])
        if second != first:
            break
    print(f"A1: dpstream session ask: count {first[1]}; power lost (draw {seed}), {ADDED} records "
          f"added, asked again: count {second[1]}; "
          f"{'the same' if first[0] == second[0] else 'another'} run id")  # fmt: skip
    return first[0] == second[0] and second[1] - first[1] == ADDED


def _answer(ended: Ended) -> tuple[str, float]:
    report = json.loads(ended.stdout)
    return str(report["run_id"]), report["rows"][0]["count"]


def damaged_answer(past: Past) -> bool:
    """B4: whether a damaged answer is called done."""
    words = (*ANSWER, "answers")
    folder, before = past.again(stream), past.scratch / "b"
    shutil.rmtree(before, ignore_errors=True)
    shutil.copytree(folder, before)
    _, made = past.done(folder, *words)
    right = (folder / "answers" / "answers.parquet").read_bytes()
    flip(folder / "answers" / "answers.parquet", 8 * 60)
    flipped, _ = past.run(folder, *words)
    wrong = _differs(folder, right)
    print(f"B4: dpstream answer, a bit of answers.parquet flipped, the same command: "
          f"{last_line(flipped)}, the file is {'still damaged' if wrong else 'right'}")  # fmt: skip
    after_power(before, made, "data", folder)
    cut, _ = past.run(folder, *words)
    lost = _differs(folder, right)
    print(f"B4: dpstream answer, power lost at its end, the same command: {last_line(cut)}, "
          f"the file is {'damaged or gone' if lost else 'right'}")  # fmt: skip
    return flipped.code == 0 and wrong


def _differs(folder: Path, right: bytes) -> bool:
    path = folder / "answers" / "answers.parquet"
    return not path.exists() or path.read_bytes() != right


def main() -> int:
    """Show what was wrong at a commit; 0 if all of it is seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ref")
    parser.add_argument("--place", type=Path, help="for the worktree and its environment")
    options = parser.parse_args()
    place = (options.place or ROOT / ".tools" / "faults" / options.ref).absolute()
    python, tree = prepared(options.ref, place)
    with tempfile.TemporaryDirectory() as scratch:
        past = Past(python, tree, Path(scratch))
        seen = [check(past) for check in (killed_in_a_commit, same_noise, damaged_answer)]
    print(f"seen: {dict(zip(('B1', 'A1', 'B4'), seen, strict=True))}")
    return 0 if all(seen) else 1


if __name__ == "__main__":
    sys.exit(main())
