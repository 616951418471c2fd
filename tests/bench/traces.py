"""Modules of the source that five calls pass: ``python -m tests.bench.traces``.

A module is passed when one of its functions runs in any thread of the call; what only its import
runs does not count.  The calls are those of README and of the guides, on their data.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.docs.pages import README, ROOT, blocks, lines

_POINTS = "SELECT WITH DIFFERENTIAL_PRIVACY OPTIONS(epsilon = 0.1) COUNT(*) AS n FROM flights"
_START, _SESSION = ROOT / "docs/start/first-job.md", ROOT / "docs/guides/session.md"
_STATEMENT = """SELECT WITH DIFFERENTIAL_PRIVACY
  OPTIONS(epsilon = 1, delta = 1e-9, max_groups_contributed = 4)
  page, COUNT(DISTINCT user) AS users FROM visits GROUP BY page"""
_TRACED = """
import inspect, pathlib, sys, threading
passed = set()
def note(frame, event, _):
    if event == "call" and frame.f_code.co_flags & inspect.CO_NEWLOCALS:  # no module, no class
        passed.add(frame.f_code.co_filename)
threading.setprofile(note)
sys.setprofile(note)
try:
    if sys.argv[1] == "-c":
        exec(sys.argv[2])
    else:
        from dpstream.pipelines.cli.main import cli
        cli(sys.argv[1:])
except SystemExit as end:
    assert not end.code, end.code
finally:
    sys.setprofile(None)
import dpstream
root = pathlib.Path(dpstream.__file__).resolve().parents[1]
rooms = [root / one for one in ("accounting", "state", "dp_transforms", "pipelines")]
files = {pathlib.Path(name).resolve() for name in passed}
print(sum(any(room in file.parents for room in rooms) for file in files))
"""


def _called(folder: Path, *command: str | Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (command, done.stderr)
    return done.stdout


def main() -> None:
    """Print the numbers as one line of JSON."""
    dpstream = Path(sys.executable).with_name("dpstream")
    marked = [block for block in blocks(README.read_text()) if block.mark == "run"]
    [question, typed, *_] = (block.text for block in marked)
    [init, _, run, _] = (words[1:] for words in lines(typed))
    calls = {
        "run": run,
        "SQL": ["sql", _STATEMENT],
        "histogram": ["-c", question],
        "session": ["sql", "--analyst", "alice", _POINTS],
        "census": ["census", "execute", "persons", "--out", "tables"],
    }
    passed = dict[str, int]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _called(folder, sys.executable, "-c", blocks(_START.read_text())[0].text)
        _called(folder, dpstream, *init)
        [data, project, commands, *_] = (b.text for b in blocks(_SESSION.read_text()) if b.mark)
        _called(folder, sys.executable, "-c", data)
        file = folder / "dpstream.toml"
        file.write_text(f"{file.read_text()}\n{project}")
        for words in lines(commands):
            _called(folder, dpstream, *words[1:])
        _called(folder, dpstream, "demo", "--data", "census", "--folder", "office")
        for call, words in calls.items():
            place = folder / "office" if call == "census" else folder
            passed[call] = int(_called(place, sys.executable, "-c", _TRACED, *words).split()[-1])
    print(json.dumps(passed))


if __name__ == "__main__":
    main()
