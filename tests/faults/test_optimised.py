"""``python -O`` drops asserts: a run on hostile lines gives the same bytes with it and without."""

import random
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq

JOB = """
[source]
kind = "csv"
path = "in.csv"
[schema]
unit = { column = "user" }
key = [{ column = "page" }]
event_time = { column = "time" }
[[aggregate]]
name = "n"
kind = "count"
[time]
start = "2024-01-01T00:00:00Z"
end = "2024-01-02T00:00:00Z"
window = "1d"
trigger_every = "12h"
[privacy]
epsilon = 8.0
delta = 1e-4
contributions = 3
insecure_test_key = "KEY"
insecure_test_run_id = "RUN"
[state]
store = "sqlite:run.db"
[sink]
kind = "parquet"
path = "out"
"""
JOB = JOB.replace("KEY", "11" * 32).replace("RUN", "22" * 16)


def rows(hostile: bool) -> bytes:
    """More lines than Arrow needs to change its way of reading, some of them with NUL bytes."""
    draw, lines = random.Random(4), [b"user,page,time"]
    for number in range(12_000):
        page = b"page %d %s" % (number % 5, b"x" * 40)
        lines.append(b"user %d %s,%s,2024-01-01T10:00:00Z" % (number, b"y" * 40, page))
        if draw.random() < 0.01:
            bad = b"z" * draw.randrange(60) + b"\0,\0,2024-01-01T10:00:00Z"
            lines += [bad] if hostile else []
    return b"\n".join(lines) + b"\n"


def released(folder: Path, hostile: bool, *flags: str) -> tuple[dict[str, bytes], int]:
    folder.mkdir()
    (folder / "job.toml").write_text(JOB)
    (folder / "in.csv").write_bytes(rows(hostile))
    command = [sys.executable, *flags, "-m", "dpstream", "run", "job.toml", "--runner=DirectRunner"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    out = {str(p.relative_to(folder)): p.read_bytes() for p in (folder / "out").rglob("*.parquet")}
    dead = [pq.read_table(p)["reason"] for p in folder.rglob("dead_letter/**/*.parquet")]
    return out, sum(reasons.to_pylist().count("malformed") for reasons in dead)


def test_a_run_on_hostile_lines_is_the_same_without_asserts(tmp_path: Path) -> None:
    plain, none = released(tmp_path / "plain", hostile=False)
    hostile, dead = released(tmp_path / "hostile", True)
    optimised, dropped = released(tmp_path / "optimised", True, "-O")
    assert len(plain) >= 2 and hostile == optimised
    assert none == 0 and dead == dropped > 50
    assert {n: d for n, d in plain.items() if "window-" in n} == {
        n: d for n, d in hostile.items() if "window-" in n
    }
