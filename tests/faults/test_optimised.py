"""``python -O`` drops asserts: a run on hostile lines gives the same bytes with it and without."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq

PROJECT = """
version = 1

[data_set.shop]
unit = { name = "user" }
insecure_test_secret = "SECRET"

[table.visits]
path = "in.csv"
unit_column = "user"
time_column = "time"

[job.daily]
table = "visits"
key = ["page"]
aggregate.n = { kind = "count" }
start = "2024-01-01T00:00:00Z"
end = "2024-01-02T00:00:00Z"
window = "1d"
release_every = "12h"
budget = { epsilon = 8.0, delta = 1e-4, covers = "lifetime" }
contributions = 3
store = "run.db"
sink = { kind = "parquet", path = "out" }
"""
PROJECT = PROJECT.replace("SECRET", "11" * 32)


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
    (folder / "dpstream.toml").write_text(PROJECT)
    (folder / "in.csv").write_bytes(rows(hostile))
    command = [sys.executable, *flags, "-m", "tests.fixed_runs", "run", "--runner=DirectRunner"]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    out = {
        str(p.relative_to(folder)): p.read_bytes()
        for p in (folder / "out").rglob("window-*/*.parquet")
    }
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
