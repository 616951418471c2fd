"""Example 4, Table 2 and Figures 3 to 5 of the eigen-design paper, with the optimum beside them.

Errors are exact: they depend on queries and strategy alone.  Only relative errors need a table,
and there the mean size of a Gaussian error, sd (2 / pi)^1/2, takes the place of repeated trials.
Noise is calibrated by the analytic Gaussian, for every strategy alike.

Workloads and generated data of the eigen-design experiments (Li and Miklau, 2012), at any size.

Cells are a power of 2 that attributes share as evenly as can be, the first ones smaller: 2,048 are
8 x 16 x 16.  The real data cannot be shipped: tables of its two shapes are generated instead, a
mixture of products of falling frequencies, with as many records as the paper says.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from dpstream.accounting.arrays import Float64, kron
from dpstream.accounting.errors import UsageError
from dpstream.accounting.gaussian import mu_of
from dpstream.accounting.libraries import one_thread
from dpstream.accounting.limits import MAX_SOLVED_CELLS
from dpstream.accounting.strategies.cells.auto import auto
from dpstream.accounting.strategies.cells.eigen import (
    Vectors,
    Weights,
    completed,
    eigen,
    spectrum,
    weigh,
)
from dpstream.accounting.strategies.cells.strategy import CellStrategy, Kron, dense_gram, wavelet
from dpstream.accounting.workloads.attributes import of_size
from dpstream.accounting.workloads.workload import Workload, marginals, of_matrix, over
from dpstream.pipelines.workload.picture import strategy_matrices
from tests.accounting.strategies.cells.shapes import EXAMPLE4
from tests.bench.paper.cell_baselines import BY_NAME, gaussian_error
from tests.bench.paper.fewer_weights import Columns, Sines, principal, separation

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


Row = dict[str, Any]
Say = Callable[[str], None]
#: Budgets of the relative errors, at the study's delta.
EPSILONS = (0.1, 0.5, 1.0, 2.5)
#: Answers below this part of all records count as that large (Xiao et al.).
SANITY = 1e-3
#: What the paper prints: best and worst rival over the eigen-design, and bound over eigen-design.
PRINTED_TABLE2 = {
    "1D ranges, permuted": (9.62, 13.16, 0.99),
    "1-way range tables": (1.30, 7.69, 0.98),
    "2-way range tables": (1.63, 3.23, 0.95),
    "prefixes": (1.01, 1.01, 0.80),
    "predicates": (1.39, 1.94, 1.00),
}


class Study(NamedTuple):
    """Parameters; all public.

    Attributes:
        cells: of Table 2 and Figures 3 and 5; large: of Figure 4.
        epsilon, delta: the guarantee; seed: of random queries and generated tables.
    """

    cells: int = 2048
    large: int = 8192
    epsilon: float = 0.5
    delta: float = 1e-4
    seed: int = 0

    def check(self) -> "Study":
        """Itself.

        Raises:
            UsageError: sizes that are no power of 2, or beyond what one matrix is solved for.
        """
        for name, cells in (("--cells", self.cells), ("--large", self.large)):
            if cells & (cells - 1) or not 32 <= cells <= MAX_SOLVED_CELLS:
                raise UsageError(
                    name, f"is a power of 2 from 32 to {MAX_SOLVED_CELLS}", "write e.g. 2048"
                )
        return self

    @property
    def scale(self) -> float:
        """Standard errors at the guarantee for one of 1 at mu = 1."""
        return 1 / mu_of(self.epsilon, self.delta)


def rated(problem: Problem, scale: float) -> Row:
    """RMSE of a workload by strategy, over the bound; absolute ones at the guarantee."""
    eigensystem = spectrum(problem.workload)
    errors = {name: problem.rival(name).error(problem.workload) for name in problem.rivals}
    errors["eigen"] = eigen(eigensystem).error(problem.workload)
    best = auto(problem.workload)
    errors["optimum"] = best.error
    return {
        "workload": problem.name,
        "queries": round(problem.weight),
        "bound": math.sqrt(eigensystem.bound / problem.weight) * scale,
        "floor": math.sqrt(best.floor / eigensystem.bound),
        "errors": {
            n: math.sqrt(e / eigensystem.bound) for n, e in errors.items() if math.isfinite(e)
        },
    }


def example4(study: Study, say: Say) -> list[Row]:
    """Example 4: noise on each query (``gaussian``), the same with least squares (``workload``),
    cells, wavelets, the eigen-design, the optimum."""
    rivals = ("workload", "identity", "haar")
    problem = Problem("Example 4", of_matrix(EXAMPLE4), rivals)
    row = rated(problem, study.scale)
    plain = gaussian_error(problem.workload) / spectrum(problem.workload).bound
    row["errors"] = {"gaussian": math.sqrt(plain), **row["errors"]}
    best = auto(problem.workload)
    made = {name: problem.rival(name) for name in ("workload", "haar")}
    made |= {"eigen": problem.eigen(), "optimum": best.strategy}
    matrices = {
        name: strategy_matrices(strategy, problem.workload.sizes)[0].tolist()
        for name, strategy in made.items()
    }
    return [row | {"squared": best.error, "matrices": matrices}]


def table2(study: Study, say: Say) -> list[Row]:
    """Table 2: alternative workloads, best and worst rival, and the bound."""
    sizes = split(study.cells, 3)
    problems: dict[str, Callable[[], Problem]] = {
        "1D ranges, permuted": lambda: permuted(ranges((study.cells,)), study.seed),
        "1-way range tables": lambda: range_tables(sizes, 1),
        "2-way range tables": lambda: range_tables(sizes, 2),
        "prefixes": lambda: prefixes(study.cells),
        "predicates": lambda: predicates(study.cells, study.seed),
    }
    rows = []
    for name, make in problems.items():
        say(f"Table 2: {name}")
        row = rated(make(), study.scale)
        errors = row["errors"]
        rivals = {n: e for n, e in errors.items() if n not in ("eigen", "optimum")}
        best, worst = min(rivals, key=rivals.__getitem__), max(rivals, key=rivals.__getitem__)
        rows.append(row | {
            "name": name, "best": best, "worst": worst,
            "best_factor": rivals[best] / errors["eigen"],
            "worst_factor": rivals[worst] / errors["eigen"],
            "bound_ratio": 1 / errors["eigen"], "printed": PRINTED_TABLE2[name],
        })  # fmt: skip
    return rows


def figure3(study: Study, say: Say) -> list[Row]:
    """Figure 3: errors of ranges and tables, absolute by shape, relative by table and epsilon."""
    cells, seed, rows = study.cells, study.seed, []
    for kind, counts in (("ranges", (1, 2, 3, 4)), ("tables", (3, 4, 5))):
        for count in counts:
            sizes = split(cells, count)
            for problem in _both(kind, sizes, seed):
                say(f"Figure 3: {problem.name}")
                rows.append({"figure": "absolute", "kind": kind, **rated(problem, study.scale)})
    for table in histograms(cells, seed):
        for kind in ("ranges", "tables"):
            for problem in _both(kind, table.sizes, seed):
                say(f"Figure 3: {problem.name} of the {table.name} table")
                errors = relative_errors(problem, table)
                for epsilon in EPSILONS:
                    scale = 1 / mu_of(epsilon, study.delta)
                    each = {name: error * scale for name, error in errors.items()}
                    rows.append({
                        "figure": "relative", "kind": kind, "workload": problem.name,
                        "table": table.name, "epsilon": epsilon, "errors": each,
                    })  # fmt: skip
    return rows


def _both(kind: str, sizes: tuple[int, ...], seed: int) -> list[Problem]:
    if kind == "ranges":
        return [ranges(sizes), random_ranges(sizes, seed)]
    return [tables(sizes), random_tables(sizes, seed)]


def relative_errors(problem: Problem, table: Table) -> dict[str, float]:
    """Mean over the queries of E|error| / max(answer, .001 of the records), at mu = 1."""
    workload, scaled = problem.workload, problem.relative()
    shaped = table.counts.reshape(workload.sizes)
    answers = np.concatenate([table_answers.ravel() for table_answers in workload.apply(shaped)])
    size = np.maximum(np.abs(answers), SANITY * table.records)
    made = {name: problem.rival(name) for name in problem.rivals}
    made |= {"eigen": scaled.eigen(), "optimum": auto(workload, "relative").strategy}
    errors = {}
    for name, strategy in made.items():
        sds = np.sqrt(np.concatenate(strategy.variances(workload)))
        errors[name] = float(np.mean(sds / size)) * math.sqrt(2 / math.pi)
    return errors


def figure4(study: Study, say: Say) -> list[Row]:
    """Figure 4: separation by size of groups, principal vectors by their number: error, CPU
    seconds beyond the eigenbasis."""
    cells = study.large
    sines = Sines(cells)
    eigensystem = spectrum(tables(split(cells, 3)).workload)
    cases: list[tuple[str, Vectors, Float64]] = [
        ("1D ranges", sines, sines.eigenvalues()),
        ("2-way tables", Vectors(eigensystem.folding, eigensystem.vectors), eigensystem.values),
    ]
    rows = []
    for name, basis, c in cases:
        bound = float(np.sqrt(c).sum()) ** 2 / cells
        say(f"Figure 4: {name}")
        for method, size, make in _methods(basis, c, cells):
            weights, seconds = _timed(make)
            ratio = math.sqrt(weights.error / bound)
            rows.append({"workload": name, "method": method, "size": size,
                         "error": ratio, "seconds": seconds})  # fmt: skip
    return rows


def _methods(
    basis: Vectors, c: Float64, cells: int
) -> Iterator[tuple[str, int, Callable[[], Weights]]]:
    yield "full", len(c), lambda: weigh(basis, c)
    for size in (4, 16, 64, 256, 1024):
        if 8 * size <= len(c):
            yield "separation", size, lambda size=size: separation(basis, c, size)  # type: ignore[misc]
    for part in (0.015, 0.03, 0.06, 0.12, 0.25):
        count = max(1, round(part * cells))
        if count < len(c):
            yield "principal", count, lambda count=count: principal(basis, c, count)  # type: ignore[misc]


def _timed(make: Callable[[], Weights]) -> tuple[Weights, float]:
    start = time.process_time()
    with one_thread():
        output = make()
    return output, time.process_time() - start


def figure5(study: Study, say: Say) -> list[Row]:
    """Figure 5: other design queries than eigenvectors, cells in their order and permuted."""
    rows = []
    for problem in (ranges((study.cells,)), tables(split(study.cells, 3))):
        for variant in (problem, permuted(problem, study.seed)):
            say(f"Figure 5: {variant.name}")
            sizes = problem.workload.sizes
            eigensystem = spectrum(variant.workload)
            gram = variant.workload.gram()
            errors = {"eigen": eigen(eigensystem).error(variant.workload)}
            for name, make in (("wavelet", haar_basis), ("Fourier", fourier_basis)):
                basis = kron([make(size) for size in sizes])
                errors[name] = design_error(basis, gram, variant.workload)
            row = {name: math.sqrt(error / eigensystem.bound) for name, error in errors.items()}
            rows.append({"workload": variant.name, "errors": row})
    return rows


def design_error(basis: Float64, gram: Float64, workload: Workload) -> float:
    """Total error of Program 1 with these orthonormal design queries as rows, completed."""
    c = np.einsum("ij,ij->i", basis @ gram, basis)
    c = np.where(c > 1e-10 * c.max(), c, 0.0)
    weights = weigh(Columns((basis**2).T), c)
    made = completed(dense_gram((basis.T * weights.u) @ basis, workload.sizes))
    return CellStrategy("designed", made).error(workload)


def haar_basis(size: int) -> Float64:
    """(n, n) orthonormal rows of Haar's wavelet."""
    rows = wavelet(size)
    return np.asarray(rows / np.linalg.norm(rows, axis=1)[:, None])


def fourier_basis(size: int) -> Float64:
    """(n, n) orthonormal real rows of the discrete Fourier transform."""
    turn = 2 * np.pi * np.outer(np.arange(size), np.arange(size)) / size
    half = size // 2
    rows = np.concatenate([np.cos(turn[: half + 1]), np.sin(turn[1 : (size + 1) // 2])])
    return np.asarray(rows / np.linalg.norm(rows, axis=1)[:, None])


PARTS: dict[str, Callable[[Study, Say], list[Row]]] = {
    "example4": example4, "table2": table2, "figure3": figure3, "figure4": figure4,
    "figure5": figure5,
}  # fmt: skip


def words(rows: list[Row]) -> str:
    """A part for a person at a terminal: a line for each row, errors over the bound."""
    lines = []
    for row in rows:
        if "errors" in row:
            errors = ", ".join(f"{name} {error:.5g}" for name, error in row["errors"].items())
        else:
            errors = f"{row['method']} {row['size']:,}: {row['error']:.4f}, {row['seconds']:.2f} s"
        where = [row["workload"], row.get("table", "")]
        where += [f"epsilon {row['epsilon']:g}"] if "epsilon" in row else []
        lines.append(f"  {', '.join(filter(None, where))}: {errors}")
    return "\n".join(lines)
