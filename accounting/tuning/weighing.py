"""Which C: noise, which grows with it, against what it cuts, which falls.

All of it is post-processing of the noisy histogram of pairs per unit, and of the plan: no further
look at data.  A bound C keeps the part k(C) of all pairs (``coverage_of``), sum over units of
min(pairs, C) over sum of pairs.  A key of n records is expected to be short by n (1 - k(C)), if the
units that are cut are in it as they are everywhere, and its noise at a window's end has an sd that
the plan gives for each C.  The root of both squares is weighed; a quantile of pairs ignores noise,
and of few units with very many pairs it makes a C that drowns everything.

Units beyond the largest candidate count as if they had just so many: what is cut of them is not
known, so that the cut is at least what is said.
"""

from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np

from dpstream.accounting.arrays import Float64
from dpstream.accounting.tuning.question import Histogram

#: sd of the first column's noise at a window's end, in records at the bound; infinite where a job
#: with that C and bound per key cannot be run.
NoiseOf = Callable[[int, int | None], float]

#: Records of a key that is weighed for, unless somebody says.
KEY_RECORDS = 1_000
#: Bounds per key that are proposed beside the job's own.
PER_KEY_BOUNDS = (1, 2, 4, 8, 16)
_GAIN = 0.95
_FLOAT_ERROR = 1e-7


class Coverage(NamedTuple):
    """Pairs that a bound keeps: (edges,) increasing bounds in pairs of the first hours, from 0,
    and the part of all pairs kept by each."""

    edges: Float64
    part: Float64

    def at(self, pairs: float) -> float:
        """Part that a bound of so many pairs in the first hours keeps."""
        return float(np.interp(pairs, self.edges, self.part))


class PerKey(msgspec.Struct, frozen=True):
    """What another bound per key would make of the same histogram.

    Attributes:
        bound: k; contributions: C that is weighed best with it.
        cut: part of all pairs that C cuts, without what is beyond k in a key.
        sd: as for ``NoiseOf``.
    """

    bound: int
    contributions: int
    cut: float
    sd: float


def coverage_of(of: Histogram, estimate: Float64) -> Coverage:
    """Pairs are summed as survivors: sum over c of #{units with >= c pairs}, linear inside a wide
    cell.  Survivors below the rank error are noise and count as none (a few units with very many
    pairs stay unseen); beyond the largest candidate a unit counts with that candidate.

    Args:
        estimate: (cells,) noisy prefixes of the histogram of pairs per unit.
    """
    edges = np.array([0, *of.candidates], np.float64)
    above = estimate[-1] - np.concatenate([[0.0], estimate[:-1]])  # units with > edges[t] pairs
    above[above < max(of.rank_error, _FLOAT_ERROR)] = 0.0
    width = np.diff(edges)
    mass = width * above[:-1] + (width - 1) / 2 * (above[1:] - above[:-1])
    sums = np.concatenate([[0.0], np.cumsum(mass)])
    return Coverage(edges, sums / sums[-1])


def errors(part: Float64, sd: Float64, records: int) -> Float64:
    """(n,) root of both squares, in records, for a key of so many."""
    return np.asarray(np.hypot((1 - part) * records, sd), np.float64)


def best(part: Float64, sd: Float64, records: int) -> int:
    """Index of the bound with the least error of a key of so many records.

    Args:
        part: (n,) of all pairs that each bound keeps; sd: (n,) of its noise in records.

    Raises:
        ValueError: none of them can be run.
    """
    error = errors(part, sd, records)
    if not np.isfinite(error).any():
        raise ValueError("no bound can be run")
    return int(np.argmin(error))


def per_key(
    bounds: Float64, part: Float64, noise: NoiseOf, records: int, own: int | None, most: float
) -> tuple[PerKey, ...]:
    """What each bound per key but the job's own would come to, where it can be run and helps.

    Args:
        bounds: (n,) C of each candidate; part: (n,) of all pairs that it keeps.
        own: the job's bound per key.
        most: error of what was chosen; bounds that gain less than ``_GAIN`` are not worth a word.
    """
    rows = []
    for bound in PER_KEY_BOUNDS:
        sd = np.array([noise(int(c), bound) for c in bounds])
        if bound != own and np.isfinite(sd).any():
            at = best(part, sd, records)
            if errors(part, sd, records)[at] > _GAIN * most:
                continue
            rows.append(PerKey(bound, int(bounds[at]), float(1 - part[at]), float(sd[at])))
    return tuple(rows)
