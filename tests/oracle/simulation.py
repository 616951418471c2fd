"""Direct numpy simulation of the mechanism on the synthetic data of the seed's Table 1.

Independent of the product's flow: own data generator, own admission, own Honaker estimator
(inverse-variance weights, floats), numpy's normal noise.  Only sigma and tau come from
``accounting``.  Run ``python -m tests.oracle.simulation --help`` for the figures.

Data (mechanism.md section 1): p(x) proportional to (x - 1 + q)^-s; records per user q = 26,
s = 6.738, x <= 1e5; keys q = 1000, s = 1.4.  A user's records are uniform over one day.
"""

import argparse
import dataclasses
import json
import time
from typing import Literal

import numpy as np
import numpy.typing as npt

from accounting.budget import Budget, allocate
from accounting.limits import DECODE_BITS
from accounting.plan import Aggregate, Field, Plan, Privacy
from accounting.timeline import Timeline

Float64 = npt.NDArray[np.float64]
Ints = npt.NDArray[np.signedinteger]
Mode = Literal["paper", "rounds", "sticky"]


@dataclasses.dataclass(frozen=True)
class Records:
    """Parallel arrays; ``instant`` is the time of day in units of 2^-32 days."""

    user: Ints
    key: Ints
    instant: npt.NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.user)

    def leaf(self, triggers: int) -> Ints:
        """(n,) leaf 1..T of each record."""
        cell = (self.instant.astype(np.uint64) * np.uint64(triggers)) >> np.uint64(32)
        return (cell + 1).astype(np.int16 if triggers < 32000 else np.int32)

    def take(self, mask: npt.NDArray[np.bool_]) -> "Records":
        """The records selected by a mask."""
        return Records(self.user[mask], self.key[mask], self.instant[mask])


def zipf_mandelbrot(rng: np.random.Generator, size: int, q: float, s: float, top: int) -> Ints:
    """(size,) zero-based draws x - 1 with p(x) proportional to (x - 1 + q)^-s, x = 1..top."""
    weights = (np.arange(top) + q) ** -s
    cdf = np.cumsum(weights) / weights.sum()
    out = np.empty(size, np.int32)
    for start in range(0, size, 1 << 22):
        piece = out[start : start + (1 << 22)]
        piece[:] = np.searchsorted(cdf, rng.random(len(piece)), side="right").clip(max=top - 1)
    return out


def table1_records(users: int, keys: int, seed: int) -> Records:
    """Raw records, sorted by user."""
    rng = np.random.default_rng(seed)
    per_user = zipf_mandelbrot(rng, users, 26, 6.738, 100_000) + 1
    user = np.repeat(np.arange(users, dtype=np.int32), per_user)
    key = zipf_mandelbrot(rng, len(user), 1000, 1.4, keys)
    return Records(user, key, rng.integers(0, 1 << 32, len(user), np.uint32))


def admit(raw: Records, contributions: int) -> Records:
    """The first C records of each user in time order; ``raw`` is sorted by user."""
    count = np.bincount(raw.user)
    heavy = np.flatnonzero(count[raw.user] > contributions)
    order = np.lexsort((raw.instant[heavy], raw.user[heavy]))
    user = raw.user[heavy][order]
    first = np.r_[True, user[1:] != user[:-1]] if len(user) else np.zeros(0, bool)
    index = np.arange(len(user))
    rank = index - np.maximum.accumulate(np.where(first, index, 0))
    keep = np.ones(len(raw), bool)
    keep[heavy[order[rank >= contributions]]] = False
    return raw.take(keep)


class Trees:
    """One noisy binary tree per key, each with its own number of leaves so far."""

    def __init__(self, rng: np.random.Generator, keys: int, triggers: int, sigma: float) -> None:
        self.rng, self.sigma = rng, sigma
        self.leaf = np.zeros(keys, np.int64)
        levels = triggers.bit_length()
        self.block = np.zeros((levels, keys))
        # Inverse-variance weighting: a node (variance 1) against the sum of its two children.
        self.variance = np.ones(levels)
        for level in range(1, levels):
            children = 2 * self.variance[level - 1]
            self.variance[level] = children / (children + 1)

    def advance(self) -> Float64:
        """One more leaf for every key; returns the noise of each prefix."""
        self.leaf += 1
        rows = np.arange(len(self.leaf))
        value = self.rng.normal(0, self.sigma, len(rows))
        for level in range(len(self.block)):
            done = (self.leaf[rows] >> level) & 1 == 1
            self.block[level, rows[done]] = value[done]
            rows, value = rows[~done], value[~done]
            if not len(rows):
                break
            children = self.block[level, rows] + value
            self.block[level, rows] = 0
            weight = 2 * self.variance[level] / (2 * self.variance[level] + 1)
            fresh = self.rng.normal(0, self.sigma, len(rows))
            value = weight * fresh + (1 - weight) * children
        return np.asarray(self.block.sum(axis=0))

    def restart(self, rows: Ints, leaf: int) -> None:
        """New trees that have seen ``leaf`` leaves of zeros."""
        self.leaf[rows] = leaf
        for level in range(len(self.block)):
            sd = self.sigma * np.sqrt(self.variance[level]) * ((leaf >> level) & 1)
            self.block[level, rows] = self.rng.normal(0, 1, len(rows)) * sd


@dataclasses.dataclass
class Feed:
    """Admitted records of the keys that can be selected at all, by leaf."""

    keys: Ints  # (k,) ids of the candidate keys
    key: Ints  # (n,) index into ``keys``
    previous: Ints  # (n,) leaf of the same user's previous record of that key, 0 if none
    start: Ints  # (T + 2,) records of leaf t are start[t] .. start[t + 1]


def make_feed(bounded: Records, keys: int, triggers: int, least: float) -> Feed:
    """Sort the bounded records; keys with at most ``least`` records are left out."""
    total = np.bincount(bounded.key, minlength=keys)
    candidates = np.flatnonzero(total > least)
    index = np.full(keys, -1, np.int32)
    index[candidates] = np.arange(len(candidates))
    keep = index[bounded.key] >= 0
    code = bounded.user[keep].astype(np.int64) * keys + bounded.key[keep]
    code *= triggers + 1
    code += bounded.leaf(triggers)[keep]
    code.sort()
    leaf = (code % (triggers + 1)).astype(np.int16 if triggers < 32000 else np.int32)
    code //= triggers + 1
    previous = np.zeros_like(leaf)
    previous[1:] = np.where(code[1:] == code[:-1], leaf[:-1], 0)
    key = index[code % keys]
    order = np.argsort(leaf, kind="stable")
    start = np.searchsorted(leaf[order], np.arange(triggers + 2))
    return Feed(candidates, key[order], previous[order], start)


@dataclasses.dataclass(frozen=True)
class Result:
    """Error of the published histogram at the last trigger, against the raw histogram."""

    keys: int
    l1: float
    l2: float
    linf: float
    mean_l1: float
    updates: int


@dataclasses.dataclass(frozen=True)
class Design:
    """What is simulated: noise, thresholds (in counts) and the way of publishing."""

    triggers: int
    selection_sigma: float
    value_sigma: float
    tau: Float64
    selection_sd: Float64
    mode: Mode = "sticky"
    mu_count: int = 0
    refresh_every: int = 1
    final_flush: bool = False
    window_indexed: bool = False  # a restarted tree continues at the window's trigger index

    @classmethod
    def of(cls, plan: Plan, budget: Budget) -> "Design":
        """The design of a plan with one COUNT column."""
        if budget.selection is None or budget.tau is None or len(budget.values) != 1:
            raise ValueError("simulates selected keys with one count")
        return cls(
            plan.timeline.triggers,
            budget.selection.sigma,
            budget.values[0].sigma,
            budget.tau / 2.0**DECODE_BITS,
            budget.selection.sd,
            plan.privacy.mode,
            plan.privacy.pre_threshold,
            plan.refresh_every,
            plan.privacy.final_flush,
        )


def simulate(design: Design, bounded: Records, raw: Records, keys: int, seed: int) -> Result:
    """Run one window.

    Keys so small that each test succeeds with chance below 1e-9 are never selected here.

    Args:
        bounded: admitted records; raw: all records, the ground truth; keys: size of the key
            space; seed: of the noise.
    """
    triggers = design.triggers
    rng = np.random.default_rng(seed)
    feed = make_feed(bounded, keys, triggers, float(np.min(design.tau - 6 * design.selection_sd)))
    size = len(feed.keys)
    selection = Trees(rng, size, triggers, design.selection_sigma)
    values = Trees(rng, size, triggers, design.value_sigma)
    units, total, released = (np.zeros(size, np.int64) for _ in range(3))
    published, truth = np.zeros(size), np.zeros(size)
    selected = np.zeros(size, bool)
    order, cells = _by_leaf(raw, triggers)
    back = np.full(keys, -1, np.int32)
    back[feed.keys] = np.arange(size)
    missed, errors, updates = 0, [], 0
    for t in range(1, triggers + 1):
        part = slice(feed.start[t], feed.start[t + 1])
        key, previous = feed.key[part], feed.previous[part]
        counted = key[previous <= released[key]]
        units += np.bincount(counted, minlength=size)
        total += np.bincount(key, minlength=size)
        noise = selection.advance()
        wins = (units > design.mu_count) & (units + noise > design.tau[selection.leaf - 1])
        due = _publish(design, t, wins, selected)
        if design.mode != "sticky":
            rows = np.flatnonzero(wins)
            selection.restart(rows, t if design.window_indexed else 0)
            units[rows], released[rows] = 0, t
        fresh = values.advance()
        published[due] = (total + fresh)[due]
        updates += int(due.sum())
        now = back[raw.key[order[cells[t] : cells[t + 1]]]]
        missed += int((now < 0).sum())
        truth += np.bincount(now[now >= 0], minlength=size)
        errors.append(missed + float(np.abs(published - truth).sum()))
    histogram = np.bincount(raw.key, minlength=keys).astype(np.float64)
    histogram[feed.keys] -= published
    error = np.abs(histogram)
    return Result(
        int(selected.sum()),
        float(error.sum()),
        float(np.sqrt((error**2).sum())),
        float(error.max()),
        float(np.mean(errors)),
        updates,
    )


def _publish(
    design: Design, t: int, wins: npt.NDArray[np.bool_], selected: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """Keys published at trigger t; marks the selected ones."""
    if design.mode == "sticky":
        refresh = t % design.refresh_every == 0 or t == design.triggers
        due = (wins & ~selected) | (selected & refresh)
        selected |= wins
        return due
    selected |= wins
    return selected.copy() if design.final_flush and t == design.triggers else wins


def _by_leaf(raw: Records, triggers: int) -> tuple[Ints, Ints]:
    leaf = raw.leaf(triggers)
    order = np.argsort(leaf, kind="stable").astype(np.int32)
    counts = np.bincount(leaf, minlength=triggers + 2)
    return order, np.concatenate([[0], np.cumsum(counts)])


def table1_plan(triggers: int, contributions: int = 32, **privacy: object) -> Plan:
    """The plan of Table 1: COUNT per key over one day, (epsilon, delta) = (6, 1e-9)."""
    day = 86_400_000_000
    day -= day % triggers
    settings = {"epsilon": 6.0, "delta": 1e-9, "contributions": contributions, **privacy}
    return Plan(
        source="synthetic",
        unit=Field("user", "int"),
        key=(Field("key", "int"),),
        event_time="time",
        aggregates=(Aggregate("count", "count"),),
        timeline=Timeline(0, day, day, day, day // triggers),
        privacy=Privacy(**settings),  # type: ignore[arg-type]
    )


def main() -> None:
    """Print one JSON line per design."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--users", type=int, default=1_000_000)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--triggers", type=int, nargs="+", default=[100])
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    raw = table1_records(args.users, args.keys, args.seed)
    bounded = admit(raw, 32)
    print(json.dumps({"raw": len(raw), "bounded": len(bounded)}), flush=True)
    for triggers in args.triggers:
        for privacy in (
            {"mode": "paper", "allow_unsound": True},
            {"mode": "rounds"},
            {"mode": "rounds", "final_flush": True},
            {"mode": "sticky"},
        ):
            plan = table1_plan(triggers, **privacy)
            begin = time.monotonic()
            design = Design.of(plan, allocate(plan))
            result = simulate(design, bounded, raw, args.keys, args.seed + 1)
            figures = dataclasses.asdict(result) | {"seconds": time.monotonic() - begin}
            print(json.dumps({"T": triggers, **privacy, **figures}), flush=True)


if __name__ == "__main__":
    main()
