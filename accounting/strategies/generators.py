"""Lower-triangular encoders with few numbers for each step, decoded with few buffers.

A has numbers theta, out and into for each step and buffer, and a gain for each step:

    A[t, t] = 1 / gain_t,    A[t, j] = sum_k out_tk theta_(t-1)k ... theta_(j+1)k into_jk  (j < t),

so that w = A^-1 z, and with it n_t = w_1 + ... + w_t, takes one pass with a buffer for each k:

    w_t = gain_t (z_t - sum_k out_tk s_k),   then   s_k <- theta_tk s_k + into_tk w_t.

A buffered linear Toeplitz encoder is the case in which nothing depends on t.  Every figure here is
that of the numbers as they are, not of what they were meant to approximate.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import flint
import numpy as np

from dpstream.accounting.arrays import Float64


class Responses(NamedTuple):
    """How far things move in a pass with node noises of at most 1, and what an error moves.

    Attributes:
        decoder: (T, T) row t has the weights of z in n_t.
        step: the most that 1 added to a w moves a prefix; buffers: (d,) the same of a buffer.
        steps: the largest |w|; filled: (d,) the largest |s_k|.
    """

    decoder: Float64
    step: float
    buffers: Float64
    steps: float
    filled: Float64


class Generators(NamedTuple):
    """The numbers of an encoder.

    Attributes:
        theta, out, into: (T, d) float64; theta and into are not negative where ``out`` is not.
        gain: (T,) float64, positive.
    """

    theta: Float64
    out: Float64
    into: Float64
    gain: Float64

    @property
    def table(self) -> Float64:
        """(T, 3 d + 1) theta, out, into and gain of each step, as compiled kernels read them."""
        return np.concatenate([self.theta, self.out, self.into, self.gain[:, None]], axis=1)

    def matrix(self) -> Float64:
        """(T, T) A."""
        size = len(self.gain)
        matrix, buffers = np.diag(1 / self.gain), np.zeros(self.theta.shape)
        for t in range(size):
            matrix[t, :t] = buffers[:t] @ self.out[t]
            buffers[:t] *= self.theta[t]
            buffers[t] = self.into[t]
        return matrix

    def responses(self) -> Responses:
        """See there; takes T^2 d operations.

        The decoder is built from the last step to the first: where one more in w_t moves prefix
        t' by ``moved``, and one more in buffer k before step t by ``pull``,

            moved = 1 + sum_k into_tk pull_k,    pull_k <- theta_tk pull_k - gain_t out_tk moved,

        and z_t's weight in it is gain_t moved.
        """
        size, width = self.theta.shape
        decoder, pull = np.zeros((size, size)), np.zeros((size, width))
        step, buffers = 1.0, np.zeros(width)
        for t in range(size - 1, -1, -1):
            later = pull[t:]
            moved = 1 + later @ self.into[t]
            decoder[t:, t] = self.gain[t] * moved
            later *= self.theta[t]
            later -= np.outer(self.gain[t] * moved, self.out[t])
            step = max(step, float(np.abs(moved).max()))
            buffers = np.maximum(buffers, np.abs(later).max(axis=0))
        steps, filled = 0.0, np.zeros(width)
        held = np.zeros((size, width))
        for t in range(size):
            before = decoder[t - 1, : t + 1] if t else 0.0
            given = decoder[t, : t + 1] - before
            steps = max(steps, float(np.abs(given).sum()))
            held[: t + 1] *= self.theta[t]
            held[: t + 1] += np.outer(given, self.into[t])
            filled = np.maximum(filled, np.abs(held[: t + 1]).sum(axis=0))
        return Responses(decoder, step, buffers, steps, filled)

    def prefix(self, noise: Sequence[Any], step_index: int) -> Any:
        """n_t before rounding, as a ball at the precision in force.

        Args:
            noise: balls of the first node noises, at least ``step_index`` of them.
        """
        total = flint.arb(0)
        buffers = [flint.arb(0)] * self.theta.shape[1]
        rows = zip(*(part.tolist() for part in self), strict=True)
        for (theta, out, into, gain), node in zip(rows, noise[:step_index], strict=False):
            rest = node
            for weight, held in zip(out, buffers, strict=True):
                rest -= weight * held
            given = gain * rest
            total += given
            buffers = [
                a * held + b * given for a, b, held in zip(theta, into, buffers, strict=True)
            ]
        return total
