"""Fast direct simulation of sticky designs: many settings on the same records.

The figures of ``tests.oracle.simulation`` for a sticky plan with one COUNT column, at its tests
and at the last trigger only, so that a setting takes seconds at full scale: records are sorted by
time once, whatever T, the tests and the weights are, and noise is drawn jointly for the triggers
that are looked at (numpy's normal noise through a Cholesky factor of the decoder's covariance).
Own order of pairs, own indices; only sigma and tau come from ``accounting``.
"""

import dataclasses

import numba
import numpy as np
import numpy.typing as npt

from dpstream.accounting.arrays import Int64
from dpstream.accounting.strategies import Strategy
from tests.oracle.simulation import Design, Records, admit, ranked

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.signedinteger]


@dataclasses.dataclass(frozen=True)
class Sorted:
    """Admitted records in the order of time, and the raw histogram they are judged by."""

    user: Ints  # (n,)
    key: Ints  # (n,)
    instant: npt.NDArray[np.uint32]  # (n,) rising
    first: Bools  # (n,) no earlier admitted record of that user has the key
    users: int
    histogram: Int64  # (keys,) raw records of each key

    @classmethod
    def of(cls, raw: Records, keys: int, contributions: int) -> "Sorted":
        """Bound and sort; ``raw`` is sorted by user."""
        bounded = admit(ranked(raw), contributions)
        order = np.argsort(bounded.instant, kind="stable")
        user, key = bounded.user[order], bounded.key[order]
        code = user.astype(np.int64) * keys + key
        first = np.zeros(len(code), bool)
        # Stable: of equal codes the earliest in time comes first.
        by_code = np.argsort(code, kind="stable")
        sorted_code = code[by_code]
        first[by_code] = np.r_[True, sorted_code[1:] != sorted_code[:-1]][: len(code)]
        users = int(raw.user[-1]) + 1
        histogram = np.bincount(raw.key, minlength=keys)
        return cls(user, key, bounded.instant[order], first, users, histogram)

    def until(self, triggers: int, at: Int64) -> Int64:
        """Number of records at or before each trigger."""
        edges = (at.astype(np.float64) * 2.0**32 / triggers).clip(max=2.0**32)
        return np.searchsorted(self.instant.astype(np.float64), np.ceil(edges), side="left")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Figures of one setting: (tests,) keys published by each test, and the error at the end."""

    tests: tuple[int, ...]
    published: tuple[int, ...]
    l1: float
    l2: float

    def by(self, trigger: float) -> int:
        """Keys published by a trigger."""
        return max(
            (n for t, n in zip(self.tests, self.published, strict=True) if t <= trigger), default=0
        )


@numba.njit(cache=True)
def _walk(  # type: ignore[no-untyped-def]
    user, key, first, start, stop, weights, skip, published, taken, weighted, units, total
) -> None:
    for i in range(start, stop):
        k, u = key[i], user[i]
        total[k] += 1
        index = taken[u]
        if not (skip and published[k]):
            taken[u] += 1
        elif skip:
            index = -1
        if first[i]:
            units[k] += 1
            if index >= 0:
                weighted[k] += weights[index]


def sweep(design: Design, records: Sorted, seed: int) -> Outcome:
    """One window of one setting."""
    assert design.mode == "sticky" and design.refresh_every == max(1, design.triggers // 100)
    rng, keys = np.random.default_rng(seed), len(records.histogram)
    a, d = design.coefficients
    tests = np.array(sorted(design.tests))
    selection = noise_of(
        rng, keys, design.strategy, np.arange(1, len(tests) + 1), design.selection_sigma
    )
    # The published count's noise: at the tests where it is part of the statistic, and at the end.
    once = design.value_strategy.triggers == 1  # published at the close, its only test
    looked = np.ones(1, np.int64) if once else tests if d else tests[-1:]
    counted = (
        noise_of(rng, keys, design.value_strategy, looked, design.value_sigma)
        if design.value_sigma
        else selection
    )
    units, weighted, total = (np.zeros(keys, np.int64) for _ in range(3))
    taken, published = np.zeros(records.users, np.int16), np.zeros(keys, bool)
    at, begin, counts = records.until(design.triggers, tests), 0, []
    for j, stop in enumerate(at):
        _walk(
            records.user,
            records.key,
            records.first,
            begin,
            int(stop),
            design.weights,
            design.skip,
            published,
            taken,
            weighted,
            units,
            total,
        )
        begin = int(stop)
        statistic = a * (weighted + selection[j])
        if d:
            statistic += d * ((units if design.per_key else total) + counted[j])
        published |= (units > design.mu_count) & (statistic > design.tau[j])
        counts.append(int(published.sum()))
    released = ((units if design.per_key else total) + counted[-1]) * published
    error = np.abs(records.histogram - released)
    return Outcome(
        tuple(tests.tolist()), tuple(counts), float(error.sum()), float(np.sqrt((error**2).sum()))
    )


def noise_of(
    rng: np.random.Generator, keys: int, strategy: Strategy, at: Int64, sigma: float
) -> npt.NDArray[np.float32]:
    """(looked, keys) noise of the prefixes at some triggers, jointly as the strategy has it."""
    size = strategy.triggers
    decoder = np.tril(np.ones((size, size))) @ np.linalg.inv(strategy.matrix().astype(np.float64))
    rows = decoder[np.asarray(at) - 1] * sigma
    factor = np.linalg.cholesky(rows @ rows.T).astype(np.float32)
    return np.asarray(factor @ rng.standard_normal((len(at), keys), np.float32))
