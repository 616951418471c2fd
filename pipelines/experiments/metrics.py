"""The paper's measures of error (section 5): keys, L1, L2, Linf against the raw histogram.

A key that is not published counts as 0.  The measures hold at the last trigger, as in the
paper's tables; ``l1_average`` is the mean of L1 over all triggers and ``updates`` the number of
published values.
"""

from typing import Any

import numpy as np
import pyarrow as pa

from dpstream.pipelines.experiments.truth import Bool, Int64, Truth
from dpstream.pipelines.synth import Float64


class Scoreboard:
    """What the public knows after each trigger, held against the truth.

    Args:
        truth: raw counts by trigger; `publish` is called once for each trigger in order.
    """

    def __init__(self, truth: Truth) -> None:
        self._truth = truth
        self._exact = np.zeros(truth.size)
        self.shown: Float64 = np.zeros(truth.size)
        self.known: Bool = np.zeros(truth.size, np.bool_)
        self._l1 = list[float]()
        self._updates = 0

    def publish(self, codes: Int64, values: Float64, replace: bool = False) -> None:
        """One trigger: the values of ``codes`` become known.

        Args:
            codes: (m,) distinct keys; values: (m,).
            replace: forget everything published before (a new answer to the whole query).
        """
        self._exact += self._truth.added(len(self._l1) + 1)
        if replace:
            self.shown[:], self.known[:] = 0.0, False
        self.shown[codes], self.known[codes] = values, True
        self._l1.append(float(np.abs(self.shown - self._exact).sum()))
        self._updates += len(codes)

    def errors(self) -> dict[str, Any]:
        """The measures after the last trigger."""
        if len(self._l1) != self._truth.triggers:
            raise ValueError("not every trigger was published")
        distance = np.abs(self.shown - self._exact)
        return {
            "keys": int(self.known.sum()),
            "l1": float(distance.sum()),
            "l2": float(np.sqrt((distance**2).sum())),
            "linf": float(distance.max(initial=0.0)),
            "l1_average": float(np.mean(self._l1)),
            "updates": self._updates,
        }


def errors(truth: Truth, releases: pa.Table) -> dict[str, Any]:
    """The measures of a run's releases (columns key, trigger, count) of one window."""
    code = truth.codes_of(releases["key"])
    trigger = releases["trigger"].to_numpy()
    value = releases["count"].to_numpy()
    order = np.argsort(trigger, kind="stable")
    bounds = np.searchsorted(trigger[order], np.arange(1, truth.triggers + 2))
    board = Scoreboard(truth)
    for t in range(truth.triggers):
        rows = order[bounds[t] : bounds[t + 1]]
        board.publish(code[rows], value[rows])
    return board.errors()
