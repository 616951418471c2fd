"""PERTURB: released values of selected keys (Algorithm 3).

Each value stream of a key is a prefix q_t = exact prefix + n_t, n_t the decoded noise of the
stream's strategy at window trigger t (at its only step where keys are published once, at the
close): the same integers as decoding the noisy nodes, because
the decoder commutes with integer shifts (``accounting.strategies.base``).  The step at which
buffered data entered does not change q_t, so releasing a buffer needs no per-step state.

Sensitivity: C L sqrt(col2) of each stream for a unit with all pairs in one key and step, with a
bound of k per key that of as many full keys as C allows; the budget divides mu^2 so that every
other split costs no more.  Where the noise of cells is mixed
(``MixedPaths``), the same prefixes are published with n_c(t) = sum_j L[c, j] n_j(t): they are
L ((L^-1 x)(t) + n(t)), a fixed map of the decoded noisy components, and a record of cell c adds
column c of L^-1, of norm at most sqrt(inverse_norm2), to these.  Means, sds and ratios are
post-processing of noisy sums; no float is added to an exact value.
"""

import msgspec
import numpy as np

from dpstream.accounting.aggregates import Prefix, Prefixes, kind_of, with_derived
from dpstream.accounting.arrays import Bool, Float64, Int64
from dpstream.accounting.budget.allocation import Budget
from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms.noise.mixing import MixedNoise
from dpstream.dp_transforms.noise.paths import NoiseStream, Paths
from dpstream.dp_transforms.noise.sampler import TruncatedNodes
from dpstream.state.idtable import IdTable
from dpstream.state.store import KeyShard


class Published(msgspec.Struct, frozen=True):
    """Columns of released rows, aligned with the slots asked for.

    Attributes:
        values: name -> (n,) float64, NaN = not defined (a mean over a noisy count below 1).
        sds: name -> (n,) float64 sd of the value's noise.
    """

    values: dict[str, Float64]
    sds: dict[str, Float64]


class PublishedPaths:
    """Noise paths of the value streams of published keys of one (window, shard).

    Args:
        streams: of the columns; units: of the count of units.
        untested: where the noise of one of them is truncated, the same that is not, for keys that
            are published untested: of such a key truncated noise would tell too much.
    """

    def __init__(
        self,
        streams: list[NoiseStream],
        units: NoiseStream | None,
        untested: NoiseStream | None = None,
    ) -> None:
        self._paths = [Paths(stream) for stream in streams]
        self._units = None if units is None else Paths(units)
        self._untested = None if untested is None else Paths(untested)
        self._cut = [isinstance(stream.sampler, TruncatedNodes) for stream in streams]
        self._row = np.zeros(0, np.int64)
        self._rows = 0

    def noise(
        self,
        states: KeyShard,
        slots: Int64,
        step_index: int,
        units_step_index: int,
        remembered: Bool | None = None,
    ) -> tuple[list[Int64], Int64 | None]:
        """Return the decoded noise (units of 2^-DECODE_BITS) of each stream, and of the count of
        units.

        That of the count of units is at its step ``units_step_index``.

        Args:
            remembered: (n,) which keys are published untested; ``None``: none.
        """
        self._enter(states, slots)
        rows = self._row[slots]
        upto = np.full(len(slots), step_index, np.int64)
        remembered = np.zeros(len(slots), np.bool_) if remembered is None else remembered
        values = [
            self._advance(paths, rows, upto, remembered & cut)
            for paths, cut in zip(self._paths, self._cut, strict=True)
        ]
        if self._units is None:
            return values, None
        at = np.full(len(slots), units_step_index)
        return values, self._advance(self._units, rows, at, remembered & (not any(self._cut)))

    def _advance(self, paths: Paths, rows: Int64, upto: Int64, remembered: Bool) -> Int64:
        if self._untested is None or not remembered.any():
            return paths.advance(rows, upto)[:, 0]
        noise = np.empty(len(rows), np.int64)
        noise[remembered] = self._untested.advance(rows[remembered], upto[remembered])[:, 0]
        noise[~remembered] = paths.advance(rows[~remembered], upto[~remembered])[:, 0]
        return noise

    def _enter(self, states: KeyShard, slots: Int64) -> None:
        """Give rows to slots published for the first time and start their paths."""
        if states.size > len(self._row):
            more = max(states.size, 2 * len(self._row)) - len(self._row)
            self._row = np.concatenate([self._row, np.full(more, -1, np.int64)])
        new = slots[self._row[slots] < 0]
        rows = np.arange(self._rows, self._rows + len(new))
        self._row[new] = rows
        self._rows += len(new)
        ids = states.table.ids[new]
        for paths in self._paths:
            paths.start(rows, ids)
        for other in (self._units, self._untested):
            if other is not None:
                other.start(rows, ids)


class MixedPaths:
    """Noise of the value streams of mixed cells, of one (window, shard).

    Args:
        streams: one for each value stream, shared by all shards of the window.
        cells: id of a cell -> its number.
        norms: (cells,) sd of each cell in sds of a component.
    """

    def __init__(self, streams: list[MixedNoise], cells: IdTable, norms: Float64) -> None:
        self._streams, self._cells, self._norms = streams, cells, norms

    def noise(
        self,
        states: KeyShard,
        slots: Int64,
        step_index: int,
        units_step_index: int,
        remembered: Bool | None = None,
    ) -> tuple[list[Int64], Int64 | None]:
        """Return noise like ``PublishedPaths.noise``, in units of 2^-MIXED_BITS, without a count of
        units.
        """
        cells = self._cells.find(states.table.ids[slots])
        return [stream.at(step_index)[cells] for stream in self._streams], None

    def norms(self, states: KeyShard, slots: Int64) -> Float64:
        """Return (n,) sd of each cell in sds of a component."""
        return np.asarray(self._norms[self._cells.find(states.table.ids[slots])])


def publish(
    plan: Plan,
    budget: Budget,
    states: KeyShard,
    paths: PublishedPaths | MixedPaths,
    slots: Int64,
    trigger: int,
    remembered: Bool | None = None,
) -> Published:
    """Return the released columns of the slots at a window trigger.

    Args:
        remembered: (n,) which of them are published untested.
    """
    # The selection stream continued has a step for each test; publications fall on tests.
    design = plan.design
    # One step for all triggers where keys are published once: as the run's numbers have it.
    step_index, units_step_index = trigger, design.selection_step_index(trigger)
    if budget.values:
        step_index = min(trigger, budget.values[0].triggers)
    if design.units_apart and budget.units is not None:
        units_step_index = min(trigger, budget.units.triggers)
    noise, unit_noise = paths.noise(states, slots, step_index, units_step_index, remembered)
    bits = design.decode_bits
    norms = paths.norms(states, slots) if isinstance(paths, MixedPaths) else 1.0
    streams = {
        stream.name: Prefix(
            stream, _noisy(states.values[slots, i], drawn, bits), spent.sd[step_index - 1] * norms
        )
        for i, (stream, drawn, spent) in enumerate(
            zip(plan.design.streams, noise, budget.values, strict=True)
        )
    }
    units = None
    if unit_noise is not None and budget.units is not None:
        counted = _noisy(states.units[slots], unit_noise, bits)
        units = Prefix(None, counted, budget.units.sd[units_step_index - 1])
    prefixes = Prefixes(with_derived(streams, design.derived), units)
    values: dict[str, Float64] = {}
    sds: dict[str, Float64] = {}
    for aggregate in plan.aggregates:
        release = kind_of(aggregate).release(aggregate, prefixes)
        values[aggregate.name], sds[aggregate.name] = release
    return Published(values, sds)


def _noisy(exact: Int64, noise: Int64, bits: int) -> Float64:
    """Exact integers plus noise in 2^-bits, as floats: the last integer operation."""
    return np.asarray(((exact << bits) + noise).astype(np.float64) * 2.0**-bits)
