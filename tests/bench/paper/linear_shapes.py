"""Workloads and generated data of the eigen-design experiments (Li and Miklau, 2012), at any size.

Cells are a power of 2 that attributes share as evenly as can be, the first ones smaller: 2,048 are
8 x 16 x 16.  The real data cannot be shipped: tables of its two shapes are generated instead, a
mixture of products of falling frequencies, with as many records as the paper says.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dpstream.accounting.arrays import Float64, kron
from dpstream.accounting.errors import UsageError
from dpstream.accounting.strategies.cells.eigen import eigen, spectrum
from dpstream.accounting.strategies.cells.strategy import CellStrategy, Kron, dense_gram
from dpstream.accounting.workloads.attributes import of_size
from dpstream.accounting.workloads.workload import Workload, marginals, of_matrix, over
from tests.bench.paper.cell_baselines import BY_NAME

RANGE_RIVALS, TABLE_RIVALS = ("haar", "hierarchical"), ("fourier", "datacube")
#: Random queries of a workload.
QUERIES = 1000


class Problem(NamedTuple):
    """A workload of the experiments.

    Attributes:
        grid: one product over the attributes, where the workload is one matrix over all cells.
        rivals: strategies that the paper compares with.
        queries: what total errors are divided by where ``workload`` has other rows than are asked.
    """

    name: str
    workload: Workload
    rivals: tuple[str, ...]
    grid: Workload | None = None
    queries: float | None = None

    @property
    def weight(self) -> float:
        """What a total error is divided by for a mean."""
        return self.workload.weight if self.queries is None else self.queries

    def rival(self, name: str) -> CellStrategy:
        """A strategy that is known beforehand, over the attributes."""
        if self.grid is None:
            return BY_NAME[name](self.workload)
        made = BY_NAME[name](self.grid)
        if not isinstance(made.gram, Kron):
            return made
        return CellStrategy(made.name, dense_gram(kron([f.dense() for f in made.gram.factors])))

    def eigen(self) -> CellStrategy:
        """The eigen-design."""
        return eigen(spectrum(self.workload))

    def relative(self) -> "Problem":
        """Every query divided by its norm: what a strategy of small relative error is made for."""
        return self._replace(workload=self.workload.relative())


def split(cells: int, attributes: int) -> tuple[int, ...]:
    """Sizes of so many attributes whose product is ``cells``.

    Raises:
        UsageError: not a power of 2 from 2^attributes.
    """
    bits = cells.bit_length() - 1
    if cells != 1 << bits or bits < attributes:
        raise UsageError(
            "--cells", f"is a power of 2, at least {1 << attributes}", "write e.g. 2048"
        )
    low, more = divmod(bits, attributes)
    return tuple(1 << (low + (axis >= attributes - more)) for axis in range(attributes))


def ranges(sizes: Sequence[int]) -> Problem:
    """All ranges over attributes of these sizes."""
    name = "all ranges " + by(sizes)
    return Problem(name, over(sizes, ["range"] * len(sizes)), RANGE_RIVALS)


def random_ranges(sizes: Sequence[int], seed: int) -> Problem:
    """Ranges drawn in two steps (Xiao et al.): which attributes are named, then an interval of
    each."""
    rng = np.random.default_rng([seed, len(sizes), 3])
    rows = np.ones((QUERIES, 1))
    named = rng.permuted(
        np.arange(len(sizes)) < rng.integers(1, len(sizes) + 1, QUERIES)[:, None], axis=1
    )
    for axis, size in enumerate(sizes):
        lo, hi = np.sort(rng.integers(0, size, (2, QUERIES)), axis=0)
        lo, hi = np.where(named[:, axis], (lo, hi), [[0], [size - 1]])
        cells = np.arange(size)
        inside = (lo[:, None] <= cells) & (cells <= hi[:, None])
        rows = (rows[:, :, None] * inside[:, None, :]).reshape(QUERIES, -1)
    grid = over(sizes, ["range"] * len(sizes))
    return Problem("random ranges " + by(sizes), of_matrix(rows), RANGE_RIVALS, grid)


def tables(sizes: Sequence[int], ways: int = 2) -> Problem:
    """All tables of so many attributes."""
    workload = marginals(attributes(sizes), [min(ways, len(sizes))])
    return Problem(f"{ways}-way tables {by(sizes)}", workload, TABLE_RIVALS)


def random_tables(sizes: Sequence[int], seed: int) -> Problem:
    """A quarter of the sets of attributes (2 to 16 of them), each set as likely as any other."""
    rng = np.random.default_rng([seed, len(sizes), 4])
    count = min(16, max(2, (1 << len(sizes)) // 4))
    chosen = rng.choice((1 << len(sizes)) - 1, count, replace=False) + 1
    axes = {tuple(k for k in range(len(sizes)) if code >> k & 1) for code in chosen.tolist()}
    all_tables = marginals(attributes(sizes), range(1, len(sizes) + 1))
    workload = Workload(
        all_tables.attributes, tuple(p for p in all_tables.products if p.axes in axes)
    )
    return Problem("random tables " + by(sizes), workload, TABLE_RIVALS)


def permuted(problem: Problem, seed: int) -> Problem:
    """The same queries of cells in another order, as a root of their Gram matrix: total errors
    depend on nothing else."""
    gram = problem.workload.gram()
    order = np.random.default_rng([seed, 5]).permutation(len(gram))
    values, vectors = np.linalg.eigh(gram[np.ix_(order, order)])
    nonzero = values > 1e-10 * values[-1]
    root = (vectors[:, nonzero] * np.sqrt(values[nonzero])).T
    grid, rivals = problem.grid or problem.workload, problem.rivals
    return Problem(problem.name + ", permuted", of_matrix(root), rivals, grid, problem.weight)


def range_tables(sizes: Sequence[int], ways: int) -> Problem:
    """All ranges of all tables of so many attributes."""
    rivals = (*RANGE_RIVALS, *TABLE_RIVALS)
    return Problem(f"{ways}-way range tables {by(sizes)}",
                 marginals(attributes(sizes), [ways], "range"), rivals)  # fmt: skip


def prefixes(cells: int) -> Problem:
    """The cumulative curve."""
    return Problem(f"prefixes {cells}", over([cells], ["prefix"]), RANGE_RIVALS)


def predicates(cells: int, seed: int) -> Problem:
    """As many random predicates as cells."""
    rows = np.random.default_rng([seed, 6]).integers(0, 2, (cells, cells)) + 0.0
    rows[~rows.any(axis=1), 0] = 1.0
    return Problem(f"predicates {cells}", of_matrix(rows), (*RANGE_RIVALS, "fourier"))


def attributes(sizes: Sequence[int]) -> list:  # type: ignore[type-arg]
    """Attributes named by their numbers."""
    return [of_size(str(axis), size) for axis, size in enumerate(sizes)]


def by(sizes: Sequence[int]) -> str:
    """8x16x16."""
    return "x".join(map(str, sizes))


class Table(NamedTuple):
    """A generated histogram.

    Attributes:
        counts: (cells,) of the shape ``sizes``, the last axis fastest.
    """

    name: str
    sizes: tuple[int, ...]
    counts: Float64

    @property
    def records(self) -> float:
        """How many there are."""
        return float(self.counts.sum())


def histograms(cells: int, seed: int) -> list[Table]:
    """Tables of the shapes of the paper's census (15M records) and Adult data (33,000)."""
    return [
        generated("census", split(cells, 3), 15_000_000, seed),
        generated("adult", split(cells, 4), 33_000, seed + 1),
    ]


def generated(name: str, sizes: tuple[int, ...], records: int, seed: int) -> Table:
    """Records of 12 kinds, in each of which an attribute's values are as frequent as 1 / rank."""
    rng = np.random.default_rng([seed, 7])
    kinds = rng.dirichlet(np.ones(12))
    chances = np.zeros(math.prod(sizes))
    for share in kinds.tolist():
        parts = []
        for size in sizes:
            falling = 1 / np.arange(1.0, size + 1)
            # Near values are of like frequency, as ages and incomes are.
            parts.append(np.roll(falling / falling.sum(), rng.integers(size)))
        chances += share * kron(parts)
    return Table(name, sizes, rng.multinomial(records, chances / chances.sum()).astype(np.float64))
