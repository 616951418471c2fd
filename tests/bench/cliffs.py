"""Shapes far out, doubled alone: what `tests.bench.growth` covers beside the sizes of its base.

Each begins where its cost is what dominates: hundreds of shards, thousands of triggers or windows
(a fixed cost a step), windows that overlap (a row for each pair), long keys (bytes, not rows).
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.bench.paper.jobs import Frame, Setting, parse_mode, write_job
from tests.bench.paper.one_run import in_child
from tests.bench.paper.synth import DAY_MICROS, Synth, generate

#: Sliding windows begin this often a day.
SLIDES = 192


class Shape(NamedTuple):
    """One point.

    Attributes:
        windows: tumbling windows of the day; overlaps: windows over each instant.
        key_bytes: length of every key.
    """

    users: int = 10_000
    keys: int = 2_000
    triggers: int = 24
    contributions: int = 16
    shards: int = 4
    windows: int = 1
    overlaps: int = 1
    key_bytes: int = 8


#: Name of a dimension -> what is doubled, and from where.
CLIFFS: dict[str, tuple[str, Shape]] = {
    "many shards": ("shards", Shape(shards=64)),
    "many triggers": ("triggers", Shape(triggers=1_250)),
    "many windows": ("windows", Shape(windows=625, triggers=1)),
    "overlaps": ("overlaps", Shape(users=2_000, overlaps=6, contributions=1_000)),
    "key bytes": ("key_bytes", Shape(users=40_000, key_bytes=128)),
}


def shapes(name: str, doublings: int) -> list[Shape]:
    """A dimension's first point and each of its doublings."""
    field, base = CLIFFS[name]
    return [base._replace(**{field: getattr(base, field) << n}) for n in range(doublings + 1)]


def write_data(shape: Shape, folder: Path) -> Path:
    """The paper's users and times, keys of one length drawn uniformly."""
    data = folder / f"cliff-{shape.users}-{shape.keys}-{shape.key_bytes}.parquet"
    if not data.exists():
        generate(Synth(users=shape.users), data)
        table, rng = pq.read_table(data), np.random.default_rng(0)
        names = pa.array([f"{n:0{shape.key_bytes}d}" for n in range(shape.keys)])
        keys = names.take(pa.array(rng.integers(0, shape.keys, len(table))))
        at = table.schema.get_field_index("key")
        pq.write_table(table.set_column(at, "key", keys), data, row_group_size=50_000)
    return data


def write_shape(shape: Shape, folder: Path, mode: str) -> Path:
    """The job of a point in a fresh folder."""
    data = write_data(shape, folder)
    frame = Frame(data, "int", folder / "runs", 6.0, 1e-9, shape.shards)
    job = write_job(frame, Setting(parse_mode(mode), shape.triggers, shape.contributions))
    window = slide = DAY_MICROS // shape.windows
    every = window // shape.triggers
    if shape.overlaps > 1:
        slide = every = DAY_MICROS // SLIDES
        window = slide * shape.overlaps
    text = job.read_text(encoding="utf-8")
    text = re.sub(r'window = "1d"', f'window = "{window}us"\nslide = "{slide}us"', text)
    text = re.sub(r'release_every = ".*"', f'release_every = "{every}us"', text)
    job.write_text(text, encoding="utf-8")
    return job


def run(shape: Shape, folder: Path, mode: str) -> dict[str, Any]:
    """A shape's cost."""
    return measured(write_shape(shape, folder, mode))


def measured(job: Path) -> dict[str, Any]:
    """A run of a job, and another one on its finished store, in processes of their own."""
    first, again = (in_child("tests.bench.paper.one_run", str(job)) for _ in range(2))
    return {**first, "again_cpu_seconds": again["cpu_seconds"]}
