"""Exact probabilities of the laws of noise in floats, and the chi-square that compares with them.

They are written from the definitions, not with the product's code.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

from dpstream.accounting.arrays import Float64
from dpstream.accounting.mechanisms.laws import DiscreteGaussianLaw, DiscreteLaplaceLaw

#: A true sampler fails a test below this in one of a million runs; the keys are fixed anyway.
LEAST_P = 1e-6


def masses(law: Any, scale: float) -> Float64:
    """P[Z = k] for k = -K .. K of a law of that kind, K far in the tails."""
    kind = law if isinstance(law, type) else type(law)
    far = int((45 if kind is DiscreteLaplaceLaw else 12) * scale) + 12
    k = np.arange(-far, far + 1)
    if kind is DiscreteLaplaceLaw:
        mass = np.exp(-np.abs(k) / scale)
    elif kind is DiscreteGaussianLaw:
        mass = np.exp(-(k.astype(np.float64) ** 2) / (2 * scale**2))
    else:
        mass = stats.norm.cdf((k + 0.5) / scale) - stats.norm.cdf((k - 0.5) / scale)
    return np.asarray(mass / mass.sum())


def shape_p(noise: npt.NDArray[Any], mass: Float64) -> float:
    """p-value of a chi-square over bins of at least a 200th of the mass each."""
    far, flat = len(mass) // 2, noise.reshape(-1)
    bins = np.floor(np.cumsum(mass) * 200).astype(np.int64)
    bins = np.unique(bins, return_inverse=True)[1]
    chance = np.bincount(bins, mass)
    seen = np.bincount(bins[np.clip(flat, -far, far) + far], minlength=len(chance))
    few = chance * flat.size < 10
    if few.any():
        chance = np.append(chance[~few], chance[few].sum())
        seen = np.append(seen[~few], seen[few].sum())
    if chance[-1] * flat.size < 1:
        chance, seen = chance[:-1], seen[:-1]
    expected = chance / chance.sum() * seen.sum()
    return float(stats.chisquare(seen, expected).pvalue)
