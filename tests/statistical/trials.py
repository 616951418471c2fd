"""Many disjoint keys in one run of the real flow: each key is an independent trial."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
from scipy.stats import beta, norm

from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.budget.allocation import StreamNoise
from dpstream.accounting.plan.plan import Plan
from dpstream.dp_transforms import step
from dpstream.dp_transforms.flow import run_in_memory
from dpstream.dp_transforms.noise.continuous import ContinuousGaussian
from dpstream.dp_transforms.noise.paths import Sampler
from dpstream.dp_transforms.noise.sampler import GeometricNodes, RoundedGaussian
from dpstream.state import open as stores
from tests.streams import START, begin, positioned, public_table


def released(
    plan: Plan, counts: Int64, folder: Path, column: str = "n", shards: int = 2
) -> Float64:
    """(keys, triggers) released values of a column, NaN where a key is not released.

    Args:
        counts: (keys,) units that touch each key, each once, at the first trigger.
    """
    key = np.repeat(np.arange(len(counts)), counts)
    batches = []
    for offset in range(0, len(key), 50_000):
        part = key[offset : offset + 50_000]
        rows = {
            "user": [f"u{offset + n}" for n in range(len(part))],
            "page": [f"k{k:03d}" for k in part],
            "time": pa.array(np.full(len(part), START)),
            "value": pa.array(np.zeros(len(part))),
        }
        batches.append(positioned(rows, 0, offset))
    public = None if plan.design.selects else public_table(plan, range(len(counts)))
    run = begin(plan, folder / f"t{len(list(folder.iterdir()))}.db", shards, public)
    try:
        releases, _ = run_in_memory(run, batches)
    finally:
        stores.close_all()
    out = np.full((len(counts), plan.timeline.triggers), np.nan)
    for batch in releases:
        trigger = int(batch.schema.metadata[b"dpstream.trigger"])
        keys = [int(page[1:]) for page in batch.column("page").to_pylist()]
        out[keys, trigger - 1] = batch.column(column).to_numpy(zero_copy_only=False)
    return out


@contextlib.contextmanager
def smaller_noise(factor: float) -> Iterator[None]:
    """Sabotage: every node's noise has sd sigma / factor."""

    def smaller(noise: StreamNoise, tested: bool = False) -> Sampler:
        if noise.scale:
            return GeometricNodes(noise.scale / factor)
        rounded = noise.strategy_object.rounds_nodes
        return (RoundedGaussian if rounded else ContinuousGaussian)(noise.sigma / factor)

    with mock.patch.object(step, "sampler_of", smaller):
        yield


def upper(hits: int, trials: int, tail: float) -> float:
    """Clopper-Pearson upper bound of a chance; wrong with probability ``tail``."""
    return 1.0 if hits == trials else float(beta.isf(tail, hits + 1, trials - hits))


def lower(hits: int, trials: int, tail: float) -> float:
    """Clopper-Pearson lower bound of a chance; wrong with probability ``tail``."""
    return 1 - upper(trials - hits, trials, tail)


def least_mu(without: Float64, added: Float64, tail: float = 1e-4) -> float:
    """Lower bound of mu from the score of each trial on the two sides.

    A mu-GDP mechanism has Phi^-1(1 - false positives) - Phi^-1(false negatives) <= mu for any
    test.  The cutoff is chosen on the first half of the trials and used on the second half.
    """
    half_a, half_b = len(without) // 2, len(added) // 2
    cutoff = (without[:half_a].mean() + added[:half_b].mean()) / 2
    a, b = without[half_a:], added[half_b:]
    positive = upper(int((a > cutoff).sum()), len(a), tail)
    negative = upper(int((b <= cutoff).sum()), len(b), tail)
    return float(norm.isf(positive) - norm.ppf(negative))
