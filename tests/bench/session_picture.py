"""Pictures of `tests.bench.session`: latencies, ratios, regions (the seed's Figures 6 to 8)."""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from dpstream.accounting.arrays import Float64

_NAMES = ("direct", "PINQ-like", "budgets per record")


def draw(seconds: Float64, regions: list[int], balanced: list[int], path: Path) -> None:
    """Three panels in one file.

    Args:
        seconds: (runs, queries, 3); regions, balanced: at the beginning of each query.
    """
    took = np.median(seconds, axis=0)
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4))
    order = np.argsort(took[:, 0])
    for i, name in enumerate(_NAMES):
        left.plot(took[order, i] * 1e3, ".", markersize=2, label=name)
    left.set(xlabel="queries, by latency of direct", ylabel="milliseconds", yscale="log")
    left.legend(markerscale=5)
    for base, name in ((1, "to PINQ-like"), (0, "to direct")):
        each = np.sort(took[:, 2] / took[:, base])
        middle.plot(each, (np.arange(len(each)) + 1) / len(each), label=name)
    middle.axvline(1, color="grey", linewidth=0.5)
    middle.set(xlabel="latency of budgets per record", ylabel="share of queries", xlim=(0, 3))
    middle.legend()
    right.plot(regions, label="ranges of interest")
    right.plot(balanced, label="whole ranges (re-balancing)")
    right.set(xlabel="query", ylabel="regions before it", yscale="log")
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
