"""The figures the paper prints: Tables 1 and 2, at (epsilon, delta) = (6, 1e-9).

By T and by our name of the method: ``paper`` is the paper's DP-SQLP as published.
"""

from typing import NamedTuple


class Figures(NamedTuple):
    """Keys and errors at the last trigger."""

    keys: int
    linf: int
    l1: int
    l2: int


#: 10M users, 1M keys, C = 32; publishing nothing has L1 59,052,062.
TABLE1 = {
    100: {
        "paper": Figures(28_338, 1_391, 17_741_225, 50_039),
        "baseline1+published": Figures(435, 18_077, 50_835_203, 430_547),
        "baseline2+published": Figures(191, 21_913, 58_551_587, 576_425),
    },
    1000: {
        "paper": Figures(22_280, 1_563, 19_395_721, 58_237),
        "baseline1+published": Figures(0, 25_497, 59_052_062, 594_382),
        "baseline2+published": Figures(0, 25_497, 59_052_062, 594_382),
    },
}
TABLE1_RECORDS = 59_052_062

#: 1.4M users, 3.8M posts, C = 17.
TABLE2 = {
    100: {
        "paper": Figures(1_473, 102_250, 989_249, 127_721),
        "baseline1+published": Figures(32, 267_147, 2_721_349, 322_739),
        "baseline2+published": Figures(63, 103_546, 2_376_937, 156_472),
    },
    1000: {
        "paper": Figures(1_181, 102_218, 1_074_724, 127_830),
        "baseline1+published": Figures(9, 266_391, 3_081_542, 341_557),
        "baseline2+published": Figures(3, 108_124, 3_074_655, 242_482),
    },
}
TABLE2_RECORDS = 3_848_330

#: Section 5.4: the best C by measure.
FIGURE10_BEST = {"keys": 5, "l1": 25, "l2": 30}
