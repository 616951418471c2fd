"""Few records a person and private keys: ``python -m tests.bench.few_keys``.

On the stream of ``tests.oracle.few_keys``, expected figures of the product's mechanism from the
numbers that it commits (geometric noise: its scale, k and coin; Gaussian noise: its sd and
threshold), beside those of the textbook: at C = 1 and 2, (2, 1e-7) per person and month.
"""

import math
from typing import Any

import numpy as np
from scipy.special import ndtr

from dpstream.accounting.budget.allocation import Budget, allocate
from dpstream.accounting.limits import DECODE_BITS
from dpstream.accounting.tuning.starred import mean_loss, resolved
from tests.accounting.plans import build
from tests.oracle.few_keys import (
    DELTA,
    EPSILON,
    LARGE,
    LAWS,
    Floats,
    Ints,
    Law,
    cells,
    records,
)


def law_of(budget: Budget) -> Law:
    """What a budget's count publishes of a key of n people."""
    [count] = budget.values
    if count.most:
        value, chance, least = list[Floats](), list[Floats](), list[Floats]()
        coin = count.sooner / 2**32
        for part, k in ((coin, count.most - 1), (1 - coin, count.most)):
            steps = np.arange(-k, k + 1).astype(np.float64)
            weight = np.exp(-np.abs(steps) / count.scale)
            value.append(steps)
            chance.append(part * weight / weight.sum())
            least.append(np.full(len(steps), k + 1.0))
        return Law(np.concatenate(value), np.concatenate(chance), np.concatenate(least))
    raise ValueError("the count's noise is not truncated")


def gaussian(budget: Budget, counts: Ints, true: Ints) -> tuple[Floats, Floats]:
    """Chances of publication, and mean |published - true| where it is, of separate Gaussian noises
    of test and count."""
    assert budget.tau is not None and budget.statistic is not None
    tau = float(budget.tau[-1]) / 2**DECODE_BITS / budget.statistic.alone
    sd = float(budget.statistic.sd[-1]) / budget.statistic.alone
    chance = np.where(counts > 0, ndtr((counts - tau) / sd), 0.0)
    own, off = float(budget.values[0].sd[-1]), (counts - true).astype(np.float64)
    z = off / own
    folded = own * math.sqrt(2 / math.pi) * np.exp(-(z**2) / 2) + off * (2 * ndtr(z) - 1)
    return np.asarray(chance), np.asarray(folded)


def rows() -> list[dict[str, object]]:
    """A row for each mechanism and C."""
    true = cells(records())
    large, out = true >= LARGE, list[dict[str, object]]()
    for contributions in (1, 2):
        counts = cells(records(), contributions)
        textbook = LAWS["laplace"](EPSILON, DELTA, contributions)
        others = textbook.published(counts)
        settings: dict[str, Any] = {
            "contributions": contributions,
            "epsilon": EPSILON,
            "delta": DELTA,
        }
        plan = build(1, strategy="auto", per_key_bound=1, **settings)
        taken = resolved(plan)
        laws = {f"auto: {taken.privacy.strategy}": law_of(allocate(taken))}
        laws |= {f"textbook, {name}": LAWS[name](EPSILON, DELTA, contributions)
                 for name in ("laplace", "geometric")}  # fmt: skip
        figures = {
            name: (law.published(counts), law.error(counts, true)) for name, law in laws.items()
        }
        blt = allocate(build(1, strategy="blt", per_key_bound=1, **settings))
        chance, folded = gaussian(blt, counts, true)
        figures["gaussian (blt)"] = chance, chance * folded
        for name, (chance, error) in figures.items():
            conditional = np.divide(error, chance, out=np.zeros_like(error), where=chance > 1e-12)
            missed = error + (1 - chance) * true
            out.append({
                "C": contributions, "mechanism": name, "keys": chance.sum(),
                "error of large cells": error[large].sum() / chance[large].sum(),
                "error on the textbook's keys": (conditional * others).sum() / others.sum(),
                "mean loss of all cells": missed[true > 0].mean(),
                "mean loss on the reference": mean_loss(taken, allocate(taken))
                if name.startswith("auto") else math.nan,
            })  # fmt: skip
    return out


def main() -> None:
    """Print the table."""
    table = rows()
    print("  ".join(f"{name:<29}" for name in table[0]))
    for row in table:
        print("  ".join(f"{v:<29.4g}" if isinstance(v, float) else f"{v!s:<29}"
                        for v in row.values()))  # fmt: skip


if __name__ == "__main__":
    main()
