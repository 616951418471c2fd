"""The grid of regimes, and what stands in a cell of it."""

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.bench.regimes import ours
from tests.bench.regimes.ours import GENERATORS, population
from tests.oracle.rivals import arrivals, keys, planner, prefixes, ranges, totals

CONTRIBUTIONS = (1, 2, 4, 8, 32)
TRIGGERS = (1, 16, 100, 1000)
EPSILONS = (0.5, 1.0, 6.0)
DELTAS = (0.0, 1e-9, 1e-6)
KINDS = (
    "public one-shot",
    "public sum",
    "public stream",
    "private one-shot",
    "private stream",
    "workload",
)
#: Ours over the best rival's, at most.
ALLOWED = 1.02
#: Noise of simulations on either side.
SEEDS = range(3)
#: L of a sum that is clamped to [0, L] for each key.
MOST = 10
#: All 2-way tables of range or prefix queries; sizes of the attributes.
DOMAINS: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("range", (10,) * 20),
    ("prefix", (10,) * 20),
    ("range", (100,) * 3),
    ("range", (100,) * 5),
    ("range", (8, 16, 16)),
    ("range", (64, 64)),
)


#: All ranges or prefixes of one attribute, at (epsilon, delta).
LINES = (("range", 256), ("prefix", 256))


class Cell(NamedTuple):
    """A regime.

    Attributes:
        kind: of question; contributions: C; triggers: T, 1 where it is asked once.
        where: population of private keys, or queries and domain of a workload.
    """

    kind: str
    contributions: int = 1
    triggers: int = 1
    epsilon: float = 1.0
    delta: float = 0.0
    where: str = ""


class Row(NamedTuple):
    """A cell with its figures; ``spread``: standard error of the ratio."""

    cell: Cell
    ours: float
    family: str
    best: float
    rival: str
    spread: float

    @property
    def ratio(self) -> float:
        """Ours over the best rival's."""
        return self.ours / self.best

    @property
    def holds(self) -> bool:
        """Whether no rival is better, beyond what is allowed and two standard errors."""
        return self.ratio <= ALLOWED + 2 * self.spread

    def as_json(self) -> dict[str, Any]:
        """Plain numbers."""
        figures = {**self._asdict(), **self.cell._asdict(), "ratio": self.ratio}
        del figures["cell"]
        return {**figures, "holds": self.holds}


def cells() -> Iterator[Cell]:
    """Every regime."""
    combinations = tuple(itertools.product(CONTRIBUTIONS, EPSILONS, DELTAS))
    for count, epsilon, delta in combinations:
        yield Cell("public one-shot", count, 1, epsilon, delta)
        yield Cell("public sum", count, 1, epsilon, delta)
    for triggers, (count, epsilon, delta) in itertools.product(TRIGGERS, combinations):
        yield Cell("public stream", count, triggers, epsilon, delta)
    private = tuple((c, e, d) for c, e, d in combinations if d)
    for name, (count, epsilon, delta) in itertools.product(GENERATORS, private):
        yield Cell("private one-shot", count, 1, epsilon, delta, name)
    for name, triggers, (count, epsilon, delta) in itertools.product(GENERATORS, TRIGGERS, private):
        yield Cell("private stream", count, triggers, epsilon, delta, name)
    for queries, sizes in DOMAINS:
        yield Cell("workload", where=f"{queries} {'x'.join(map(str, sizes))}")
    for (queries, size), (count, epsilon, delta) in itertools.product(LINES, combinations):
        yield Cell("workload", count, 1, epsilon, delta, f"{queries} {size}")


def row(cell: Cell) -> Row:
    """A cell's figures."""
    kind, *rest = cell.kind.split()
    if kind == "workload":
        return _workload(cell)
    if kind == "public":
        return _public(cell, rest[0])
    return _private_stream(cell) if rest == ["stream"] else _private(cell)


def _public(cell: Cell, figure_kind: str) -> Row:
    count, triggers, epsilon, delta = cell[1:5]
    if figure_kind == "stream":
        errors = dict(prefixes.rivals(triggers, count, epsilon, delta))
        figure = ours.public_stream(count, triggers, epsilon, delta)
        if triggers == 1:
            errors |= dict(totals.rivals(count, epsilon, delta, anywhere=True))
    else:
        most = MOST if figure_kind == "sum" else 1
        errors = dict(totals.rivals(count, epsilon, delta, anywhere=False, most=most))
        figure = ours.public_totals(count, epsilon, delta, most)
    name = min(errors, key=lambda rival: errors[rival])
    return Row(cell, figure.error, figure.family, errors[name], name, 0.0)


def _private(cell: Cell) -> Row:
    count, epsilon, delta = cell.contributions, cell.epsilon, cell.delta
    errors = dict(keys.rivals(*_cells(cell), count, epsilon, delta))
    figure = ours.private_totals(population(cell.where), count, epsilon, delta)
    name = min(errors, key=lambda rival: errors[rival])
    return Row(cell, figure.error, figure.family, errors[name], name, 0.0)


def _cells(cell: Cell) -> tuple[keys.Cells, keys.Cells]:
    """The keys of a cell's population, people by index and by size."""
    people = population(cell.where)
    return people.cells(cell.contributions), people.cells(cell.contributions, by_size=True)


def _private_stream(cell: Cell) -> Row:
    """Like with like: of what is given once, at the close, and of what is given from its first test
    on, the comparison that stands worse."""
    count, triggers, epsilon, delta = cell[1:5]
    once = keys.rivals(*_cells(cell), count, epsilon, delta)
    rows = [_against(cell, [(name, error, 0.0) for name, error in once], at_close=True)]
    if triggers > 1:
        stream = population(cell.where).arrivals(count, triggers)
        rivals = list(arrivals.rivals(stream, (count, triggers, epsilon, delta), SEEDS))
        rows.append(_against(cell, rivals, at_close=False))
    return max(rows, key=lambda row: row.ratio - 2 * row.spread)


def _against(cell: Cell, rivals: list[arrivals.Rival], at_close: bool) -> Row:
    name, best, spread = min(rivals, key=lambda rival: rival[1])
    figure = ours.private_stream(cell.where, *cell[1:5], SEEDS, at_close)
    noise = math.hypot(figure.spread / figure.error, spread / best) * figure.error / best
    return Row(cell, figure.error, figure.family, best, name, noise)


def _workload(cell: Cell) -> Row:
    queries, domain = cell.where.split()
    sizes = tuple(map(int, domain.split("x")))
    if len(sizes) == 1:
        given = queries, sizes[0], cell.contributions, cell.epsilon, cell.delta
        errors = dict(ranges.rivals(*given))
        figure = ours.attribute(*given)
        name = min(errors, key=lambda rival: errors[rival])
        return Row(cell, figure.error, figure.family, errors[name], name, 0.0)
    best = planner.rmse(queries, sizes, 2)
    figure = ours.workload(queries, sizes)
    return Row(cell, figure.error, figure.family, best, "ResidualPlanner+", 0.0)
