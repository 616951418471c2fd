"""Batches of a small table in parts, and a scan of it in plain numpy."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pytest

from dpstream.accounting.arrays import Int64
from dpstream.accounting.regions.space import Space
from dpstream.accounting.sessions.aggregates import COUNT, Axis, Cells, Needs, Question
from dpstream.accounting.sessions.table import SessionTable
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.noise.secret_source import SecretSource
from dpstream.dp_transforms.session import Totals, answered, tallied
from dpstream.pipelines.session.records import load
from dpstream.pipelines.session.records.manifest import read_manifest
from dpstream.pipelines.session.records.parts import read_part
from dpstream.pipelines.session.records.scan import Scan
from tests.pipelines.session.tables import config_at, rides, write
from tests.sessions import average, quantiles, sum_of

KEY, RUN = bytes(range(7, 39)).hex(), "5a" * 16
CELLS = Cells((Axis("vendor", (0, 1, 2, 3, 4)), Axis("hour", (0, 5, 6, 20, 23))))
AGGREGATES = COUNT, sum_of("x"), average("hour"), quantiles("x", (0.25, 0.5))


class Made(NamedTuple):
    """A table: where its parts are, its model."""

    folder: Path
    table: SessionTable

    @property
    def boxes(self) -> Int64:
        """Two boxes of it, in the cells."""
        space = self.table.space
        low, high = space.box(x=(None, 0)), space.box(x=(0.3, 1), epsilon=(0.5, None))
        return CELLS.inside(space, np.concatenate([low, high]))

    def question(self, kind: str = "epsilon", amount: int = 700_000) -> Question:
        return Question(kind=kind, amount=amount, aggregates=AGGREGATES, cells=CELLS)  # type: ignore[arg-type]

    def totals(self, boxes: Int64, cells: Cells, needs: Needs) -> Totals:
        """As a scan finds them."""
        space = self.table.space
        parts = read_manifest(self.folder, self.table).parts
        rows = [read_part(self.folder, part) for part in parts]
        at = {
            d.name: np.concatenate([r.column(f"x{k}").to_numpy().astype(np.int64) for r in rows])
            for k, d in enumerate(space.dimensions)
        }
        usable = np.concatenate([r.column("usable").to_numpy() for r in rows])
        return tallied(space, boxes, cells, needs, at, usable)


def here(
    scan: Scan | Made, space: Space, question: Question, read: Int64, ring: KeyRing, run_id: str
) -> pa.Table:
    """The answer by this process alone, as `ask` draws it without a runner."""
    drawn = question.canonical
    totals = scan.totals(read, drawn.cells, drawn.needs(space, read))
    return answered(space, drawn, read, totals, ring, run_id)


def made(
    folder: Path, monkeypatch: pytest.MonkeyPatch, count: int = 3_000, hours: int | None = None
) -> Made:
    """A table of rides in parts of 500 rows or more, at an hour perhaps that no record can have."""
    monkeypatch.setattr(load, "PART_ROWS", 500)
    config = config_at(folder)
    for number in range(5):
        first = number * count // 5
        records = rides(count // 5, number, first)
        write(folder / f"rides-{number}.parquet",
              records if hours is None else records | {"hour": [hours] * (count // 5)})  # fmt: skip
    load.init(config)
    assert len(read_manifest(config.folder, config.table).parts) > 3
    return Made(config.folder, config.table)


def secret_file(folder: Path) -> SecretSource:
    """The test key in a file."""
    path = folder / "noise.secret"
    path.write_text(KEY + "\n")
    path.chmod(0o600)
    return SecretSource(f"file:{path}")
