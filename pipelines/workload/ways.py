"""How a workload is answered: from noisy cells or from residual tables; decided before any charge.

The decision reads no record: `dpstream workload plan` prints it, and
`dpstream workload answer` follows it.
"""

from typing import Literal

from dpstream.accounting.errors import PolicyError
from dpstream.accounting.limits import MAX_FACTOR, MAX_MIXED_CELLS, MAX_SOLVED_CELLS
from dpstream.accounting.strategies.cells.fitted import fit
from dpstream.accounting.strategies.cells.products import MANY_CELLS
from dpstream.accounting.strategies.cells.residual import Tables, residual
from dpstream.accounting.strategies.cells.strategy import CellStrategy, Kron
from dpstream.accounting.workloads.workload import Workload

#: Rows of one table of answers.
MAX_ANSWERS = 1 << 25
#: Numbers that are published of all residual tables.
MAX_PUBLISHED = 1 << 24
#: Half-width of a 95% interval of a Gaussian, in sds.
HALF_WIDTH = 1.959963984540054


def way_of(workload: Workload, strategy: CellStrategy) -> Literal["cells", "tables"]:
    """Return which noise answers a workload.

    Raises:
        PolicyError: neither is possible; the error names what is too large.
    """
    gram = strategy.gram
    if isinstance(gram, Tables) and workload.cells > MAX_SOLVED_CELLS:
        check_tables(gram)
        return "tables"
    largest = max(workload.sizes)
    if workload.cells > MAX_MIXED_CELLS or largest > MAX_FACTOR:
        raise PolicyError(
            "domain",
            f"has {workload.cells:,} cells; noise is added to at most {MAX_MIXED_CELLS:,}, and to"
            f" {MAX_FACTOR:,} of an attribute",
            "use coarser cells, or ask tables of fewer attributes each",
        )
    if (
        not isinstance(gram, Kron)
        and strategy.name != "identity"
        and (workload.cells > MAX_SOLVED_CELLS)
    ):
        raise PolicyError(
            "strategy",
            f"needs one matrix over all cells, of which it may have {MAX_SOLVED_CELLS:,}",
            "choose another --strategy",
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
        return residual(workload)[0]
    return fit(workload).strategy


def check_tables(gram: Tables) -> None:
    """Refuse residual tables that are too large to publish or mix.

    Raises:
        PolicyError: they are too large.
    """
    if sum(gram.dims.tolist()) > MAX_PUBLISHED:
        raise PolicyError(
            "queries", f"at most {MAX_PUBLISHED:,} numbers are published", "ask fewer tables"
        )
    largest = max((gram.sizes[axis] - 1 for key in gram.keys for axis in key), default=0)
    if largest > MAX_FACTOR or gram.dims.max() > MAX_MIXED_CELLS:
        raise PolicyError(
            "queries",
            f"a table has at most {MAX_MIXED_CELLS:,} cells, and {MAX_FACTOR:,} of an attribute",
            "ask smaller tables, or use coarser cells",
        )
