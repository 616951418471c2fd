"""Small spaces whose points are all looked at, and queries on them."""

import numpy as np

from dpstream.accounting.arrays import Bool, Int64
from dpstream.accounting.regions.space import Budget, Category, Dimension, Integer, Space
from dpstream.accounting.regions.spent import Decision, Spent, charge, decide


def small(grid: int = 1, step: int = 2) -> Space:
    """7 x 3 x 9 points: integers and missing ones, codes, budgets 0 .. 16 millionths."""
    return Space((
        Integer(name="age", low=10, high=16, missing="point", grid=grid),
        Category(name="city", codes=("A", "B", "C")),
        Budget(name="initial", most="0.000016", step=step),
    ))  # fmt: skip


def wide(dimensions: int, size: int = 1_000, grid: int = 1) -> Space:
    """Integers and an initial budget of up to 1,000."""
    axes: list[Dimension] = [
        Integer(name=f"x{k}", low=0, high=size, grid=grid) for k in range(dimensions - 1)
    ]
    return Space((*axes, Budget(name="initial", most=1_000.0)))


def painted(boxes: Int64, amounts: Int64, sizes: Int64) -> Int64:
    """The amount of every point, each of which must be in one box; -1 where there is none."""
    grid = np.full(tuple(sizes), -1, np.int64)
    for box, amount in zip(boxes.tolist(), amounts.tolist(), strict=True):
        part = grid[tuple(slice(low, high) for low, high in box)]
        assert part.size and (part == -1).all()
        part[...] = amount
    return grid


def amounts_of(spent: Spent) -> Int64:
    """What every point has spent; the boxes fill the space."""
    amounts = painted(spent.boxes, spent.amounts, spent.space.sizes)
    assert (amounts >= 0).all()
    return amounts


def members(boxes: Int64, sizes: Int64) -> Bool:
    """Which points are in one of the boxes, which are disjoint."""
    return painted(boxes, np.ones(len(boxes), np.int64), sizes) == 1


def some_box(rng: np.random.Generator, sizes: Int64) -> Int64:
    """(1, d, 2) any box."""
    edges = [np.sort(rng.choice(int(size) + 1, 2, replace=False)) for size in sizes]
    return np.stack(edges)[None].astype(np.int64)


def some_boxes(rng: np.random.Generator, sizes: Int64, most: int = 3) -> Int64:
    """(m, d, 2) disjoint boxes, made by leaving out those that meet an earlier one."""
    boxes = some_box(rng, sizes)
    for _ in range(int(rng.integers(0, most))):
        box = some_box(rng, sizes)
        apart = (box[:, :, 0] >= boxes[:, :, 1]) | (box[:, :, 1] <= boxes[:, :, 0])
        if apart.any(axis=1).all():
            boxes = np.concatenate([boxes, box])
    return boxes


def partition(rng: np.random.Generator, sizes: Int64, rounds: int) -> tuple[Int64, Int64]:
    """A space divided at random, with few different amounts."""
    boxes = np.stack([np.zeros_like(sizes), sizes], axis=1)[None]
    for _ in range(rounds):
        at, place = int(rng.integers(len(boxes))), int(rng.integers(len(sizes)))
        low, high = boxes[at, place]
        if high - low > 1:
            middle = int(rng.integers(low + 1, high))
            upper = boxes[at : at + 1].copy()
            upper[0, place, 0] = middle
            boxes[at, place, 1] = middle
            boxes = np.concatenate([boxes, upper])
    return boxes, rng.integers(0, 3, len(boxes))


def ask(spent: Spent, boxes: Int64, amount: int, drop: bool = False) -> tuple[Decision, Spent]:
    """Decide a query, and charge it where it is accepted."""
    decision = decide(spent, boxes, amount, drop)
    if not decision.accepted:
        return decision, spent
    return decision, charge(spent, decision.charged, amount)
