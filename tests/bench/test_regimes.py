"""A seeded sample of the regimes: no rival is better; and a worse answer is seen."""

import random
from typing import Any

import numpy as np
import pytest

from tests.bench.regimes import grid, ours
from tests.bench.regimes.grid import Cell
from tests.bench.regimes.populations import population

SEED = 5


def part(kind: str, **chosen: Any) -> list[Cell]:
    """Cells of the grid of a kind, with these values."""
    return [
        cell
        for cell in grid.cells()
        if cell.kind == kind and all(getattr(cell, name) in chosen[name] for name in chosen)
    ]


#: What is sampled, and how many of each: regimes in which the program is not beaten.
HELD = {
    "public one-shot": (8, part("public one-shot")),
    "public sum": (3, part("public sum", contributions=(2, 4, 8, 32))),
    "public stream": (8, part("public stream", triggers=(1, 16, 100))),
    "few keys of a person": (6, part("private one-shot", contributions=(1, 2))),
    "many keys of a person": (
        4, part("private one-shot", where=("singles", "unequal", "even"), contributions=(8, 32)),
    ),
    "one trigger a window": (
        2,
        part(
            "private stream",
            triggers=(1,),
            contributions=(1, 2),
            where=("singles", "unequal", "even"),
        ),
    ),
    "tables": (2, part("workload", where=("range 8x16x16", "range 64x64", "range 100x100x100"))),
}  # fmt: skip


def sample() -> list[Cell]:
    rng = random.Random(SEED)
    return [cell for count, cells in HELD.values() for cell in rng.sample(cells, count)]


@pytest.mark.parametrize("cell", sample(), ids=str)
def test_no_rival_is_better(cell: Cell) -> None:
    row = grid.row(cell)
    assert row.holds, row


def test_a_worse_answer_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell("public one-shot", 2, 1, 1.0, 0.0)
    assert grid.row(cell).holds
    figure = ours.public_totals(2, 1.0, 0.0)
    worse = figure._replace(error=1.03 * figure.error)
    monkeypatch.setattr(ours, "public_totals", lambda *_: worse)
    assert not grid.row(cell).holds


def test_the_grid_has_every_regime_once() -> None:
    cells = list(grid.cells())
    assert len(set(cells)) == len(cells) > 700
    for kind in grid.KINDS:
        there = [cell for cell in cells if cell.kind == kind]
        assert there and (kind.startswith("public") or all(cell.where for cell in there))
        if kind.startswith("private"):
            assert all(cell.delta > 0 for cell in there)


def test_populations_are_what_they_say() -> None:
    singles, paper = population("singles"), population("paper")
    records = np.bincount(singles.person)
    assert singles.keys == 91 * 36 and 21_000 < len(singles.person) < 23_000
    assert 0.87 < float((records == 1).mean()) < 0.91
    assert 5.4 < float(np.bincount(paper.person).mean()) < 5.9
    assert population("paper") is paper
    for contributions in (1, 8):
        stream = paper.arrivals(contributions, 16)
        cells = paper.cells(contributions)
        assert stream.step.min() == 1 and stream.step.max() == 16
        assert (cells.units * cells.times).sum() == len(stream.key)
        sizes = paper.cells(contributions, by_size=True)
        assert (sizes.times @ sizes.by_index).sum() == len(stream.key)
        # A person of n keys is in n of them.
        assert all(total % (n + 1) == 0 for n, total in enumerate(sizes.times @ sizes.by_index))
