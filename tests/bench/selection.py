"""Keys that selection publishes, beside the best mechanism with one test at the end.

    python -m tests.bench.selection --users 10000000 --triggers 100 1000

At (epsilon, delta) = (6, 1e-9) and C = 32, on the generated day of the paper's Table 1
(``--users``) and on the two populations of ``tests.bench.regimes`` that no setting was chosen on,
whose sizes are fixed: the default job, which counts every record, and ``combined``, one record per
user and key, simulated by ``tests.oracle.sweep``: keys, L1 at the last trigger against the raw
histogram, keys by T/10.

The mechanism with one test is written here from its mathematics, with ``tests.oracle.rivals``.
A user's i-th key adds w_i to a weighted count, and 1 to a plain count that is published.  With mu
of the exact curve at (1 - theta) delta, the parts 1 - V and V of mu^2 go to the two, so that their
sds are |w| / (sqrt(1 - V) mu) and g sqrt(C / V) / mu; what is tested is the precision-weighted sum
of both.  A user alone in C keys has another i in each, so theta delta pays for the sum over i of
Q((tau - w_i - d) / sd).  g = 1 where counts are given once, with their test; or the growth of a
stream by the square root of the prefix matrix, where values go on being published at T triggers.
Weights, V and theta are the best ones *for this population*, which no program could know: the
setting of least L1, and the one of most keys whose L1 is no larger than ``combined``'s.
"""

import argparse
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dpstream.accounting.weights import MILD, STEEP
from tests.bench.common import emit, machine
from tests.bench.front import point
from tests.bench.regimes.ours import UNSEEN, population
from tests.oracle.rivals.arrivals import square_root_decoder
from tests.oracle.rivals.keys import Ints, index_weights, lone_threshold
from tests.oracle.rivals.laws import Floats, gaussian_mu
from tests.oracle.simulation import Records, table1_records
from tests.oracle.sweep import Sorted

EPSILON, DELTA, CONTRIBUTIONS = 6.0, 1e-9, 32
#: What a job has that says nothing but its kind.
OURS: dict[str, dict[str, Any]] = {
    "default": {"weights": MILD, "usual_weights": True},
    "combined": {"weights": STEEP, "usual_weights": True, "per_key_bound": 1, "combine": True},
}
#: Tried for one test: (offset, power) of falling weights, V, theta.
WEIGHTS = ((1.0, 0.0), (3.0, 0.5), (3.0, 1.0), (2.0, 1.0), (3.0, 1.5), (2.0, 2.0), (3.0, 3.0))
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.65)
THETAS = (0.1, 0.3, 0.5)


class Totals(NamedTuple):
    """What one test at the end sees.

    Attributes:
        raw: (K,) records of each key before any bound.
        units: (K,) users of each key after the bound.
        key, nth: (n,) of the admitted (user, key) pairs; nth: the number among its user's.
    """

    raw: Ints
    units: Ints
    key: Ints
    nth: npt.NDArray[np.int8]

    @classmethod
    def of(cls, records: Sorted) -> "Totals":
        """Count pairs; repeats of one take no index."""
        user, key = records.user[records.first], records.key[records.first]
        order = np.argsort(user, kind="stable")  # the order of time within a user
        begins = np.searchsorted(user[order], np.arange(records.users))
        nth = np.empty(len(user), np.int8)
        nth[order] = np.arange(len(user)) - begins[user[order]]
        raw = records.histogram
        return cls(raw, np.bincount(key, minlength=len(raw)), key, nth)


def one_test(totals: Totals, growth: float, seed: int) -> Iterator[dict[str, Any]]:
    """Keys and L1 of each setting of one test at the end.

    Args:
        growth: sd of the published count over that of a count given once.
    """
    rng, size = np.random.default_rng(seed), len(totals.raw)
    # The same noise for all settings, so that they compare.
    selecting, counting = rng.standard_normal((2, size))
    for fall in WEIGHTS:
        weights = index_weights(CONTRIBUTIONS, *fall)
        weighted = np.bincount(totals.key, weights[totals.nth], size)
        for share, theta in itertools.product(SHARES, THETAS):
            sds, d, above = threshold(weights, share, theta, growth)
            published = totals.units + sds[1] * counting
            given = (weighted + sds[0] * selecting + d * published > above) & (totals.units > 0)
            error = np.where(given, np.abs(published - totals.raw), totals.raw)
            yield {
                "keys": int(given.sum()),
                "l1": round(float(error.sum())),
                "weights": fall,
                "share": share,
                "theta": theta,
            }


def threshold(
    weights: Floats, share: float, theta: float, growth: float
) -> tuple[tuple[float, float], float, float]:
    """sds of both counts, the plain one's factor d, and tau of their sum."""
    mu = gaussian_mu(EPSILON, (1 - theta) * DELTA)
    selecting = math.sqrt(float(weights @ weights) / (1 - share)) / mu
    counting = growth * math.sqrt(CONTRIBUTIONS / share) / mu
    # A typical user's weight over the variance, for each: the first quarter of the indices.
    d = selecting**2 / counting**2 / float(weights[: len(weights) // 4].mean())
    above = lone_threshold(weights + d, math.hypot(selecting, d * counting), theta * DELTA)
    return (selecting, counting), d, above


def rows_of(name: str, records: Sorted, triggers: int, seed: int) -> Iterator[dict[str, Any]]:
    """The table's rows for one population and T."""
    of = {"population": name, "triggers": triggers}
    most = math.inf
    for kind, setting in OURS.items():
        figures = point(setting, triggers, records)
        most = figures["l1"]
        picked = {column: figures[column] for column in ("keys", "l1", "by_tenth")}
        yield {**of, "mechanism": kind, **picked}
    decoder, norm = square_root_decoder(triggers)
    as_stream = float(norm * np.linalg.norm(decoder[-1]))
    growths = {"counts given once": 1.0, "counts as a stream": as_stream}
    totals = Totals.of(records)
    for words, growth in growths.items():
        tried = list(one_test(totals, growth, seed))
        cheap = [row for row in tried if row["l1"] <= most]
        best = {"least L1": min(tried, key=lambda row: row["l1"])}
        if cheap:
            best["most keys"] = max(cheap, key=lambda row: row["keys"])
        for which, row in best.items():
            yield {**of, "mechanism": f"one test, {words}, {which}", "by_tenth": 0, **row}


def in_order(name: str) -> Sorted:
    """Records of a population of the regimes."""
    of = population(name)
    person = np.unique(of.person, return_inverse=True)[1].astype(np.int32)
    records = Records(person, of.key.astype(np.int32), (of.time * 2.0**32).astype(np.uint32))
    return Sorted.of(records, of.keys, CONTRIBUTIONS)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--users", type=int, default=1_000_000)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--triggers", type=int, nargs="+", default=[100])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="append the JSON result to this file")
    args = parser.parse_args()
    sizes = {"users": args.users, "keys": args.keys, "seed": args.seed}
    rows = []
    for name in ("table 1", *UNSEEN):
        if name in UNSEEN:
            records = in_order(name)
        else:
            raw = table1_records(args.users, args.keys, args.seed)
            records = Sorted.of(raw, args.keys, CONTRIBUTIONS)
            del raw
        for triggers in args.triggers:
            for row in rows_of(name, records, triggers, args.seed):
                rows.append(row)
                print(line(row), flush=True)
    emit({"benchmark": "selection", **sizes, **machine(), "rows": rows}, args.out)


def line(row: dict[str, Any]) -> str:
    """A row in words."""
    where = f"{row['population']:<8} T={row['triggers']:<5}{row['mechanism']:<42}"
    return f"{where}{row['keys']:>9,} keys  L1 {row['l1']:>12,}  by T/10 {row['by_tenth']:>7,}"


if __name__ == "__main__":
    main()
