"""PERTURB: released values of selected keys (Algorithm 3).

Each value stream of a key is a prefix q_t = exact prefix + n_t, n_t the decoded noise of the
stream's strategy at window trigger t: the same integers as decoding the noisy nodes, because
the decoder commutes with integer shifts (``accounting.strategies.tree``).  The leaf at which
buffered data entered does not change q_t, so releasing a buffer needs no per-leaf state.

Sensitivity: C L sqrt(col2) of each stream for a unit with all pairs in one key and leaf; the
budget divides mu^2 so that every other split costs no more.  Means, sds and ratios are
post-processing of noisy sums; no float is added to an exact value.
"""

import msgspec
import numpy as np
import numpy.typing as npt

from dpstream.accounting.budget import Budget, StreamNoise
from dpstream.accounting.limits import DECODE_BITS
from dpstream.accounting.plan.plan import Aggregate, Plan
from dpstream.dp_transforms.noise.paths import NoiseStream, Paths
from dpstream.state.store import KeyShard

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
_UNIT = 1.0 / (1 << DECODE_BITS)


class Published(msgspec.Struct, frozen=True):
    """Columns of released rows, aligned with the slots asked for.

    Attributes:
        values: name -> (n,) float64, NaN = not defined (a mean over a noisy count below 1).
        sds: name -> (n,) float64 sd of the value's noise.
    """

    values: dict[str, Float64]
    sds: dict[str, Float64]


class PublishedPaths:
    """Noise paths of the value streams of published keys of one (window, shard)."""

    def __init__(self, streams: list[NoiseStream], units: NoiseStream | None) -> None:
        self._paths = [Paths(stream) for stream in streams]
        self._units = None if units is None else Paths(units)
        self._row = np.zeros(0, np.int64)
        self._rows = 0

    def noise(
        self, states: KeyShard, slots: Int64, trigger: int, units_leaf: int
    ) -> tuple[list[Int64], Int64 | None]:
        """Decoded noise (units of 2^-DECODE_BITS) of each stream at its leaf ``trigger``, and of
        the count of units at its leaf ``units_leaf``."""
        self._enter(states, slots)
        rows = self._row[slots]
        upto = np.full(len(slots), trigger, np.int64)
        values = [paths.advance(rows, upto)[:, 0] for paths in self._paths]
        if self._units is None:
            return values, None
        return values, self._units.advance(rows, np.full(len(slots), units_leaf))[:, 0]

    def _enter(self, states: KeyShard, slots: Int64) -> None:
        """Give rows to slots published for the first time and start their paths."""
        if states.size > len(self._row):
            more = max(states.size, 2 * len(self._row)) - len(self._row)
            self._row = np.concatenate([self._row, np.full(more, -1, np.int64)])
        new = slots[self._row[slots] < 0]
        rows = np.arange(self._rows, self._rows + len(new))
        self._row[new] = rows
        self._rows += len(new)
        ids, round_zero = states.table.ids[new], np.zeros(len(new), np.int64)
        for paths in self._paths:
            paths.start(rows, ids, round_zero)
        if self._units is not None:
            self._units.start(rows, ids, round_zero)


def publish(
    plan: Plan, budget: Budget, states: KeyShard, paths: PublishedPaths, slots: Int64, trigger: int
) -> Published:
    """Released columns of the slots at a window trigger."""
    # The selection stream continued has a leaf for each test; publications fall on tests.
    units_leaf = trigger if plan.units_stream_apart else plan.selection_leaf(trigger)
    noise, unit_noise = paths.noise(states, slots, trigger, units_leaf)
    noisy = [
        ((states.values[slots, i] << DECODE_BITS) + n).astype(np.float64) * _UNIT
        for i, n in enumerate(noise)
    ]
    values: dict[str, Float64] = {}
    sds: dict[str, Float64] = {}
    index = {stream.name: i for i, stream in enumerate(plan.value_streams)}
    for aggregate in plan.aggregates:
        if aggregate.kind == "units" and unit_noise is not None and budget.units is not None:
            exact = states.units[slots] << DECODE_BITS
            values[aggregate.name] = (exact + unit_noise).astype(np.float64) * _UNIT
            sds[aggregate.name] = _sd(budget.units, units_leaf, len(slots))
        elif aggregate.kind == "count":
            values[aggregate.name] = noisy[index["count"]]
            sds[aggregate.name] = _sd(budget.values[index["count"]], trigger, len(slots))
        elif aggregate.kind == "sum":
            i = index[aggregate.name]
            values[aggregate.name] = noisy[i] * aggregate.grid
            sds[aggregate.name] = _sd(budget.values[i], trigger, len(slots)) * aggregate.grid
        else:
            i, c = index[aggregate.name], index["count"]
            sd = budget.values[i].sd[trigger - 1], budget.values[c].sd[trigger - 1]
            middle = plan.value_streams[i].mid
            mean, error = ratio(aggregate, middle, noisy[i], noisy[c], sd)
            values[aggregate.name], sds[aggregate.name] = mean, error
    return Published(values, sds)


def ratio(
    aggregate: Aggregate, middle: int, total: Float64, count: Float64, sd: tuple[float, float]
) -> tuple[Float64, Float64]:
    """Mean and its sd from a noisy centred sum and a noisy count (first-order error).

    Args:
        middle: grid value that was subtracted from each record.
        total, count: noisy prefixes; ``sd``: their sds, in grid units.

    Returns:
        Means within the clamp, NaN where the noisy count is below 1, and their sds.
    """
    lo, hi = aggregate.grid_bounds()
    defined = count >= 1
    safe = np.where(defined, count, 1.0)
    offset = total / safe
    mean = np.clip(middle + offset, lo, hi) * aggregate.grid
    # Products and roots are rounded correctly on every processor; a power of a scalar is libm's.
    spread = offset * sd[1]
    error = np.sqrt(sd[0] * sd[0] + spread * spread) / safe * aggregate.grid
    return np.where(defined, mean, np.nan), np.where(defined, error, np.nan)


def _sd(noise: StreamNoise, trigger: int, rows: int) -> Float64:
    return np.full(rows, noise.sd[trigger - 1])
