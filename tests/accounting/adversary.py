"""The exact value of the best strategy of an analyst against an account's limit.

The analyst sees the privacy loss of all answers so far and chooses the next charge by it.  The
value of the best strategy is the true delta at epsilon: the largest P(S) - e^epsilon Q(S), computed
by dynamic programming over the loss, step by step from the end.  Nothing is sampled.  The account's
rule alone decides whether a charge is accepted, for every sum of charges that a path can reach.

Charges: Gaussian answers of one size, and a last one of the largest size that is accepted;
randomised responses of one size, and a last one of the largest epsilon that is accepted (these
mechanisms have the largest loss for their mu or epsilon); and a lone key, whose loss is infinite
with the chance that thresholds allow.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Losses = npt.NDArray[np.float64]
#: Losses up to epsilon at which values are computed; epsilons are whole numbers of them, so that no
#: value is taken between two of them where the promise has a kink.
_CELLS = 256


class Charge(NamedTuple):
    """One charge, as `accounting.composition.Spend`."""

    epsilon: float = 99.0
    delta: float = 0.0
    mu: float | None = None
    rho: float | None = None
    threshold_delta: float = 0.0


def gauss(mu: float) -> Charge:
    return Charge(mu=mu)


def plain(epsilon: float) -> Charge:
    return Charge(epsilon)


def lone_key(delta: float) -> Charge:
    return Charge(0.0, delta)


#: Whether charges are accepted one after the other.
Accepts = Callable[[list[Charge]], bool]


def largest(accepts: Callable[[float], bool], high: float) -> float:
    """The largest figure up to ``high`` that is accepted, to a relative 2^-30."""
    low = 0.0
    if accepts(high):
        return high
    for _ in range(34):
        middle = (low + high) / 2
        low, high = (middle, high) if accepts(middle) else (low, middle)
    return low


class Analyst:
    """Values of strategies against one limit.

    Args:
        accepts: the account's rule.
        epsilon: of the promise.
    """

    def __init__(self, accepts: Accepts, epsilon: float) -> None:
        self.accepts, self.epsilon, self.step = accepts, epsilon, epsilon / _CELLS
        cells = 3 * _CELLS + math.ceil(24 / self.step)
        self.losses = np.arange(-cells, cells + 1) * self.step

    def on_grid(self, epsilon: float) -> float:
        """The largest epsilon of the grid that is no larger."""
        return math.floor(epsilon / self.step + 1e-9) * self.step

    def stopped(self) -> Losses:
        """Value of no more charges, at each loss."""
        return -np.expm1(np.minimum(self.epsilon - self.losses, 0.0))

    def after_gauss(self, value: Losses, mu: float) -> Losses:
        """Value of a Gaussian answer and then ``value``."""
        half = math.ceil(9 * mu / self.step + mu * mu / 2 / self.step) + 2
        moves = np.arange(-half, half + 1) * self.step
        weights = np.exp(-(((moves - mu * mu / 2) / mu) ** 2) / 2)
        weights /= weights.sum()
        padded = np.pad(value, (half, half), mode="edge")
        size = 1 << (len(padded) + len(weights)).bit_length()
        product = np.fft.rfft(padded, size) * np.fft.rfft(weights[::-1], size)
        out = np.fft.irfft(product, size)[2 * half : 2 * half + len(value)]
        return np.maximum(out, 0.0)

    def after_plain(self, value: Losses, epsilon: float) -> Losses:
        """Value of a randomised response and then ``value``."""
        chance, moved = 1 / (1 + math.exp(-epsilon)), round(epsilon / self.step)
        padded = np.pad(value, (moved, moved), mode="edge")
        return chance * padded[2 * moved :] + (1 - chance) * padded[: len(value)]

    def delta(self, mu: float, epsilon: float, gausses: int, plains: int) -> float:
        """True delta of the best strategy: up to so many answers of sizes ``mu`` and ``epsilon``,
        in any order, a last one of any size, and lone keys."""
        stop, values = self.stopped(), dict[tuple[int, int], Losses]()
        for g in range(gausses, -1, -1):
            for p in range(plains, -1, -1):
                before = [gauss(mu)] * g + [plain(epsilon)] * p
                if not self.accepts(before):
                    continue
                chance = largest(lambda d: self.accepts([*before, lone_key(d)]), 1.0)  # noqa: B023
                value = stop
                last = self.on_grid(
                    largest(lambda e: self.accepts([*before, plain(e)]), self.epsilon)  # noqa: B023
                )
                value = np.maximum(value, self.after_plain(stop, last))
                last = largest(lambda m: self.accepts([*before, gauss(m)]), 6.0)  # noqa: B023
                if last > 1e-3:
                    value = np.maximum(value, self.after_gauss(stop, last))
                value = chance + (1 - chance) * value
                if (g + 1, p) in values:
                    value = np.maximum(value, self.after_gauss(values[g + 1, p], mu))
                if (g, p + 1) in values:
                    value = np.maximum(value, self.after_plain(values[g, p + 1], epsilon))
                values[g, p] = value
        return float(np.interp(0.0, self.losses, values[0, 0]))
