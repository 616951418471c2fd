"""The decoder of a buffered linear Toeplitz strategy, by the buffers themselves.

It is plain Python so that a plan of few triggers needs no compiler; ``kernels`` compiles the same
source for many.
"""

import numpy as np

from dpstream.accounting.arrays import Float64


def impulse(theta: Float64, omega: Float64, out: Float64) -> None:
    """Fill ``out`` with b_k, the prefix of w after k + 1 steps for z = (1, 0, 0, ...).

    Direct-form filters lose digits where poles lie near 1.

    Args:
        theta, omega: (d,) of the exponentials; out: (T,).
    """
    buffers = np.zeros(theta.size)
    total = 0.0
    for t in range(out.size):
        step = 1.0 if t == 0 else 0.0
        for k in range(theta.size):
            step -= omega[k] * buffers[k]
        for k in range(theta.size):
            buffers[k] = theta[k] * buffers[k] + step
        total += step
        out[t] = total
