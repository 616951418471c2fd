"""What the tests of strategies share: noise, folding, and the decoder as a dense matrix."""

import flint
import numpy as np
import numpy.typing as npt

from dpstream.accounting.limits import DECODE_BITS
from dpstream.accounting.strategies import Strategy
from dpstream.accounting.strategies.base import ExactNoise, Ranges

SCALE = 1 << DECODE_BITS
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def noise_of(strategy: Strategy, rows: int, sigma: float, seed: int = 0) -> npt.NDArray[np.generic]:
    """(rows, nodes) node noises as the strategy's sampler would give them."""
    nodes = int(strategy.nodes_through(strategy.triggers))
    drawn = np.random.default_rng(seed).normal(0, sigma, (rows, nodes))
    return np.rint(drawn).astype(np.int32) if strategy.rounds_nodes else drawn


def fold(
    strategy: Strategy, noise: npt.NDArray[np.generic], ends: tuple[int, ...] = (), width: int = 0
) -> Ints:
    """(rows, T) n_t * 2^D, folded in pieces that end at ``ends``; open roundings settled."""
    rows, size = len(noise), strategy.triggers
    stack = np.zeros((rows, strategy.state_columns), strategy.state_dtype)

    def exact(row: int, nodes: int) -> ExactNoise:
        return balls(noise[row, :nodes])

    result, begin = np.zeros((rows, size), np.int64), 0
    for end in (*ends, size):
        step_index, upto = np.full(rows, begin), np.full(rows, end)
        first = int(strategy.first_node(step_index)[0])
        last = int(strategy.last_node(step_index, upto)[0])
        part = np.ascontiguousarray(noise[:, first:last])
        starts = np.arange(rows) * part.shape[1]
        out = np.zeros((rows, width or end - begin + 1), np.int64)
        strategy.fold(Ranges(part.reshape(-1), starts, step_index, upto, stack, out, exact))
        since = end - 1 if out.shape[1] == 1 else begin
        result[:, since:end] = out[:, : end - since]
        begin = end
    return result


def balls(noise: npt.NDArray[np.generic]) -> ExactNoise:
    return lambda precision: [flint.arb(z.item()) for z in noise]


def decode_matrix(strategy: Strategy) -> Floats:
    """(T, nodes) R with n_t = R z, from the decoder's answers to large single noises."""
    nodes, large = int(strategy.nodes_through(strategy.triggers)), 1 << 27
    single = np.eye(nodes) * large
    kind = np.int32 if strategy.rounds_nodes else np.float64
    return np.asarray((fold(strategy, single.astype(kind)) / SCALE / large).T)
