"""A workload's file, its strategy, and the errors, floors and gaps of its answers, before data.

**Files.**  Queries are in JSON or in the arrays of NPZ.  A strategy is stored once it is solved,
and named by the structure of its workload.  It is public: it depends on the queries and on no
record.  A file is checked against its digest when it is read, and solved again if it is damaged.
A forged file could make answers less exact, but not less private: the sensitivity is computed for
the mix that is used.

**Plans.**  Answers are from noisy cells or from residual tables (`way_of`).  The decision reads no
record: `dpstream workload plan` prints it, and `dpstream workload answer` follows it.
"""

import contextlib
import io
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from dpstream.accounting.errors import DpstreamError, UsageError, closest, refuse_first, required
from dpstream.accounting.gaussian import mu_of
from dpstream.accounting.libraries import one_thread
from dpstream.accounting.limits import (
    MAX_EXPLICIT_NUMBERS,
    MAX_FACTOR,
    MAX_MIXED_CELLS,
    MAX_SOLVED_CELLS,
    MAX_WORKLOAD_BYTES,
    MAX_WORKLOAD_TEXT_BYTES,
    MIN_DELTA,
)
from dpstream.accounting.places import check_path
from dpstream.accounting.strategies.cells.auto import (
    OBJECTIVES,
    STRATEGIES,
    Plan,
    auto,
    largest,
    strategy_named,
)
from dpstream.accounting.strategies.cells.fitted import fit
from dpstream.accounting.strategies.cells.products import MANY_CELLS, LatticeStrategy, pure
from dpstream.accounting.strategies.cells.residual import Tables, residual
from dpstream.accounting.strategies.cells.stored import (
    from_arrays,
    lattice_arrays,
    lattice_of_arrays,
    to_arrays,
)
from dpstream.accounting.strategies.cells.strategy import CellStrategy, Kron, Spread
from dpstream.accounting.strength import weaknesses, weaknesses_of_mu
from dpstream.accounting.workloads.workload import Workload, from_dict
from dpstream.accounting.workloads.workload import from_arrays as workload_of_arrays
from dpstream.state.disk_errors import unreadable
from dpstream.state.durable import PRIVATE, make_folder, replacing
from dpstream.state.npz import DAMAGED, TooLargeError, arrays_of

_FIELD = "workload file"
Solution = TypeVar("Solution")


def read_workload(path: Path) -> Workload:
    """Return the workload of a file: NPZ by its ending, else JSON.

    Raises:
        UsageError: the file cannot be read, is neither, or holds no valid workload.
    """
    check_path(str(path), _FIELD)
    try:
        if path.suffix == ".npz":
            with open(path, "rb") as file:
                arrays = arrays_of(file, MAX_WORKLOAD_BYTES, MAX_EXPLICIT_NUMBERS)
        elif path.stat().st_size > MAX_WORKLOAD_TEXT_BYTES:
            raise TooLargeError
        else:
            text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise unreadable(f"{_FIELD} {path.name}", error) from None
    except TooLargeError:
        raise UsageError(
            _FIELD,
            f"is too large: a matrix has at most {MAX_EXPLICIT_NUMBERS:,} numbers, all arrays "
            f"{MAX_WORKLOAD_BYTES:,} bytes, and JSON {MAX_WORKLOAD_TEXT_BYTES:,} bytes",
            "write factors in place of matrices, NPZ in place of JSON, or split the workload",
        ) from None
    except DAMAGED:
        raise UsageError(_FIELD, "is no UTF-8 text or no NPZ file", "write it anew") from None
    return workload_of_arrays(arrays) if path.suffix == ".npz" else from_dict(_parsed(text))


def domain_text(workload: Workload) -> list[dict[str, Any]]:
    """Return the domain as workload files write it."""
    return [
        {"name": a.name, **({"edges": list(a.edges)} if a.edges else {"values": list(a.values)})}
        for a in workload.attributes
    ]


def _parsed(text: str) -> Any:
    """Parse strict JSON: no NaN, no Infinity, no name twice in one object."""

    def no_number(_: str) -> float:
        raise UsageError("workload", "numbers are finite", "remove NaN and Infinity")

    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(entries := dict(pairs)) < len(pairs):
            raise UsageError("workload", "an object names a key twice", "keep one of them")
        return entries

    try:
        return json.loads(text, parse_constant=no_number, object_pairs_hook=distinct)
    except DpstreamError:
        raise
    except (ValueError, RecursionError):
        raise UsageError(_FIELD, "is not JSON", "correct its syntax") from None


#: Bytes of a stored strategy once unpacked: more than any that is solved.
MAX_PLAN_BYTES = 1 << 34
#: Cells of one matrix that is solved within seconds.
_QUICK = 2048
#: Bits of a lattice over all its axes.
_BITS = 24


def folder_of(given: Path | None) -> Path:
    """Return the folder of strategies: ``given``, else ``dpstream/strategies`` in the user's
    caches.
    """
    if given is not None:
        return given
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "dpstream" / "strategies"


class Planned(NamedTuple):
    """A workload with its strategy.

    Attributes:
        workload: with aligned attributes, as the strategy has them.
        plan: the strategy and its proof.
        place: the file in which the strategy is stored.
        cached: whether the file existed before.
    """

    workload: Workload
    plan: Plan
    place: Path
    cached: bool

    def per_query(self, variance: float) -> float:
        """Return the standard error of a query, from a total or the largest variance, at mu = 1."""
        share = 1.0 if self.plan.objective == "worst" else self.workload.weight
        return math.sqrt(variance / share)


def planned(
    workload: Workload, folder: Path, objective: str = "total", strategy: str = "auto"
) -> Planned:
    """Solve a workload, or read an earlier solution.

    A search that takes minutes is announced on stderr.

    Raises:
        UsageError: there is no such strategy or objective, or the workload is too large to be
            solved.
    """
    options = (
        ("strategy", strategy, STRATEGIES),
        ("objective", objective, OBJECTIVES),
    )
    for option, name, names in options:
        if name not in names:
            raise UsageError(f"--{option}", f"no {option} {name!r}", closest(name, names))
    canonical = workload.canonical
    path = folder / f"{canonical.structure}-{objective}-{strategy}.npz"

    def solve() -> Plan:
        several = len(canonical.products) > 1
        rows = canonical.cells if several else max(canonical.sizes)
        if _QUICK < rows <= MAX_SOLVED_CELLS:
            text = (
                f"Searching a strategy over {rows:,} cells: minutes of a core; the cache keeps it."
            )
            print(text, file=sys.stderr, flush=True)
        return _solve(canonical, objective, strategy)

    plan, cached = _stored(
        path,
        lambda arrays: from_arrays(arrays, canonical.structure),
        solve,
        lambda plan: to_arrays(plan, canonical.structure),
    )
    return Planned(workload.aligned, plan, path, cached)


def solved_purely(workload: Workload, folder: Path) -> tuple[str, LatticeStrategy, bool]:
    """Return name and lattice of the best strategy for pure epsilon, and whether its file existed.

    The bits of an axis are few enough that the noise of all axes stays in range.

    Raises:
        UsageError: the workload is too large to be solved.
    """
    workload, structure = workload.canonical, workload.canonical.structure
    bits = max(4, min(12, _BITS // len(workload.sizes)))

    def solve() -> tuple[str, LatticeStrategy]:
        strategy = pure(workload, bits)
        return strategy.name, strategy.lattice(bits)

    (name, lattice), cached = _stored(
        folder / f"{structure}-pure-{bits}.npz",
        lambda arrays: lattice_of_arrays(arrays, structure),
        solve,
        lambda solution: lattice_arrays(*solution, structure),
    )
    return name, lattice, cached


def _stored(
    path: Path,
    decode: Callable[[dict[str, Any]], Solution],
    solve: Callable[[], Solution],
    encode: Callable[[Solution], dict[str, Any]],
) -> tuple[Solution, bool]:
    """Return a solution, and whether its file existed; only its owner can read the file."""
    with (
        contextlib.suppress(UsageError, TooLargeError, *DAMAGED),
        open(path, "rb") as file,
    ):
        return decode(arrays_of(file, MAX_PLAN_BYTES)), True
    solution, archive = solve(), io.BytesIO()
    np.savez(archive, **encode(solution))
    with contextlib.suppress(OSError):  # without a cache it is solved again
        make_folder(path.parent, PRIVATE)
        with replacing(path, PRIVATE) as draft:
            draft.write_bytes(archive.getbuffer())
    return solution, False


def _solve(workload: Workload, objective: str, strategy: str) -> Plan:
    best = auto(workload, objective)
    if strategy == "auto":
        return best
    weighted = workload.relative() if objective == "relative" else workload
    with one_thread():
        named_strategy = strategy_named(weighted, strategy)
        worst = objective == "worst"
        error = largest(weighted, named_strategy) if worst else named_strategy.error(weighted)
    if not math.isfinite(error):
        raise UsageError("--strategy", "does not measure all that is asked", "choose another")
    return best._replace(strategy=named_strategy, error=error)


#: Rows of one table of answers.
MAX_ANSWERS = 1 << 25
#: Numbers that are published of all residual tables.
MAX_PUBLISHED = 1 << 24
#: Half-width of a 95% interval of a Gaussian, in sds.
HALF_WIDTH = 1.959963984540054


def way_of(workload: Workload, strategy: CellStrategy) -> Literal["cells", "tables"]:
    """Return which noise answers a workload.

    Raises:
        UsageError: neither is possible; the error names what is too large.
    """
    gram = strategy.gram
    if isinstance(gram, Tables) and workload.cells > MAX_SOLVED_CELLS:
        check_tables(gram)
        return "tables"
    one_matrix = not isinstance(gram, Kron) and strategy.name != "identity"
    refuse_first(
        (
            workload.cells > MAX_MIXED_CELLS or max(workload.sizes) > MAX_FACTOR,
            UsageError(
                "domain",
                f"has {workload.cells:,} cells; noise is added to at most {MAX_MIXED_CELLS:,}, "
                f"and to {MAX_FACTOR:,} of an attribute",
                "use coarser cells, or ask tables of fewer attributes each",
            ),
        ),
        (
            one_matrix and workload.cells > MAX_SOLVED_CELLS,
            UsageError(
                "strategy",
                f"needs one matrix over all cells, of which it may have {MAX_SOLVED_CELLS:,}",
                "choose another --strategy",
            ),
        ),
    )
    return "cells"


def tables_of(workload: Workload, strategy: CellStrategy) -> CellStrategy:
    """Return the strategy if it is of residual tables, else one of residual tables for the
    workload.
    """
    if isinstance(strategy.gram, Tables):
        return strategy
    # Of tables of counts: the same errors.  Bases of very many cells take minutes.
    if workload.marginal or max(workload.sizes) > MANY_CELLS:
        return residual(workload.canonical)[0]
    return fit(workload.canonical).strategy


def check_tables(gram: Tables) -> None:
    """Refuse residual tables that are too large to publish or mix.

    Raises:
        UsageError: they are too large.
    """
    largest = max((gram.sizes[axis] - 1 for key in gram.keys for axis in key), default=0)
    refuse_first(
        (
            sum(gram.dims.tolist()) > MAX_PUBLISHED,
            UsageError(
                "queries", f"at most {MAX_PUBLISHED:,} numbers are published", "ask fewer tables"
            ),
        ),
        (
            largest > MAX_FACTOR or gram.dims.max() > MAX_MIXED_CELLS,
            UsageError(
                "queries",
                f"a table has at most {MAX_MIXED_CELLS:,} cells, "
                f"and {MAX_FACTOR:,} of an attribute",
                "ask smaller tables, or use coarser cells",
            ),
        ),
    )


class Guarantee(NamedTuple):
    """The guarantee of every unit, and its contribution bound.

    Attributes:
        mu: Gaussian-DP parameter; ``None`` for pure epsilon.
        epsilon, delta: the requested guarantee; ``None`` if mu was given.
        contributions: C, the most records of a unit that count.
    """

    mu: float | None
    epsilon: float | None = None
    delta: float | None = None
    contributions: int = 1

    @property
    def warnings(self) -> list[str]:
        """Return warnings about the guarantee."""
        if self.epsilon is None or self.delta is None:
            return weaknesses_of_mu(required(self.mu, "self.mu is there"))
        return weaknesses(self.epsilon, self.delta)

    @property
    def scale(self) -> float:
        """The standard error at this guarantee of an answer that has 1 at mu = 1."""
        return self.contributions / required(self.mu, "self.mu is there")


def guarantee_of(
    epsilon: float | None, delta: float | None, mu: float | None, contributions: int
) -> Guarantee:
    """Return the guarantee of a command's options.

    Raises:
        UsageError: both forms are given, or half of one, or the budget is not positive and finite.
    """
    refuse_first(
        (
            (mu is None) == (epsilon is None and delta is None),
            UsageError("--epsilon", "with --delta, or --mu, is required", "give one of the two"),
        ),
        (contributions < 1, UsageError("--contributions", "is at least 1", "correct it")),
        (
            mu is not None and not 0 < mu < math.inf,
            UsageError("--mu", "is a positive number", "give a budget"),
        ),
    )
    if mu is not None:
        return Guarantee(mu, contributions=contributions)
    if epsilon is None or delta is None:
        raise UsageError("--epsilon", "and --delta belong together", "give both")
    refuse_first(
        (
            delta == 0,
            UsageError(
                "--delta",
                "is 0, and Gaussian noise needs a delta",
                "use --mechanism geometric, without options of strategies and pictures; or a "
                "--delta such as 1e-9",
            ),
        ),
        (
            not (0 < epsilon < math.inf and MIN_DELTA <= delta < 1),
            UsageError(
                "--epsilon",
                f"must be positive, and --delta from {MIN_DELTA:g} to 1",
                "correct them",
            ),
        ),
    )
    return Guarantee(mu_of(epsilon, delta), epsilon, delta, contributions)


def figures(planned: Planned, guarantee: Guarantee) -> dict[str, Any]:
    """Return the public figures of a plan by name."""
    workload, plan, scale = planned.workload, planned.plan, guarantee.scale
    return {
        **queries_of(workload, plan.strategy.spreads(workload), scale, HALF_WIDTH),
        "structure": workload.structure,
        "guarantee": guarantee._asdict(),
        "objective": plan.objective,
        "strategy": plan.strategy.name,
        "rmse": planned.per_query(plan.error) * scale,
        "floor": planned.per_query(plan.floor) * scale,
        "floor_of": "Gaussian mechanism on these cells",
        "gap": plan.gap,
        "note": plan.note,
        "certificate": [len(array) for array in plan.certificate],
        "stored": str(planned.place) if planned.place.exists() else None,
        "cached": planned.cached,
        **answered_by(workload, plan.strategy),
        "warnings": guarantee.warnings,
    }


def queries_of(
    workload: Workload, spreads: list[Spread], scale: float, half_width: float
) -> dict[str, Any]:
    """Return the queries, and the errors of each product's answers.

    Args:
        spreads: variances of each product's queries.
        scale: the sd of an answer that has sd 1 there.
        half_width: of a 95% interval, in sds.
    """
    return {
        "workload": workload.digest,
        "cells": workload.cells,
        "queries": workload.queries,
        "most_answers": MAX_ANSWERS,
        "half_width": half_width,
        "products": [
            {
                "product": number,
                "queries": rows,
                "weight": product.weight,
                "attributes": {
                    workload.attributes[axis].name: factor.kind
                    for axis, factor in zip(product.axes, product.factors, strict=True)
                },
                "rmse": math.sqrt(spread.mean) * scale,
                "least": None if spread.least is None else math.sqrt(spread.least) * scale,
                "most": None if spread.most is None else math.sqrt(spread.most) * scale,
            }
            for number, (product, rows, spread) in enumerate(
                zip(workload.products, workload.rows, spreads, strict=True)
            )
        ],
    }


def answered_by(workload: Workload, strategy: CellStrategy) -> dict[str, str | None]:
    """Return how `dpstream workload answer` answers the workload, or why it cannot."""
    try:
        return {"answered_by": way_of(workload, strategy), "refused": None}
    except UsageError as refused:
        return {"answered_by": None, "refused": f"{refused.rule}; {refused.fix}"}
