"""Direct numpy simulation of the mechanism on the synthetic data of the paper's Table 1.

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

from dpstream.accounting.arrays import Float64
from dpstream.accounting.budget.allocation import Budget, allocate
from dpstream.accounting.fields import Aggregate, Field, KindName
from dpstream.accounting.limits import DECODE_BITS
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.plan.privacy import Privacy
from dpstream.accounting.plan.timeline import Timeline
from dpstream.accounting.strategies import Strategy
from dpstream.accounting.weights import MILD, STEEP, SelectionWeights
from tests.bench.paper.paper import published_budget

Ints = npt.NDArray[np.signedinteger]
Mode = Literal["rounds", "sticky"]


@dataclasses.dataclass(frozen=True)
class Records:
    """Parallel arrays; ``instant`` is the time of day in units of 2^-32 days."""

    user: Ints
    key: Ints
    instant: npt.NDArray[np.uint32]
    rank: Ints | None = None  # index among the user's records, see ``ranked``

    def __len__(self) -> int:
        return len(self.user)

    def step_index(self, triggers: int) -> Ints:
        """(n,) step 1..T of each record."""
        cell = (self.instant.astype(np.uint64) * np.uint64(triggers)) >> np.uint64(32)
        return (cell + 1).astype(np.int16 if triggers < 32000 else np.int32)

    def take(self, mask: npt.NDArray[np.bool_]) -> "Records":
        """The records selected by a mask."""
        rank = None if self.rank is None else self.rank[mask]
        return Records(self.user[mask], self.key[mask], self.instant[mask], rank)


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


def ranked(raw: Records) -> Records:
    """The records with their index among their user's, in time order."""
    order = np.lexsort((raw.instant, raw.user))
    user = raw.user[order]
    index = np.arange(len(user))
    first = np.r_[True, user[1:] != user[:-1]]
    rank = np.empty(len(user), np.int32)
    rank[order] = index - np.maximum.accumulate(np.where(first, index, 0))
    return dataclasses.replace(raw, rank=rank)


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
    """One noisy binary tree per key, each with its own number of steps so far."""

    def __init__(self, rng: np.random.Generator, keys: int, triggers: int, sigma: float) -> None:
        self.rng, self.sigma = rng, sigma
        self.step_index = np.zeros(keys, np.int64)
        levels = triggers.bit_length()
        self.block = np.zeros((levels, keys))
        # Inverse-variance weighting: a node (variance 1) against the sum of its two children.
        self.variance = np.ones(levels)
        for level in range(1, levels):
            children = 2 * self.variance[level - 1]
            self.variance[level] = children / (children + 1)

    def advance(self) -> Float64:
        """One more step for every key; returns the noise of each prefix."""
        self.step_index += 1
        rows = np.arange(len(self.step_index))
        value = self.rng.normal(0, self.sigma, len(rows))
        for level in range(len(self.block)):
            done = (self.step_index[rows] >> level) & 1 == 1
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

    def restart(self, rows: Ints, step_index: int) -> None:
        """New trees that have seen ``step_index`` steps of zeros."""
        self.step_index[rows] = step_index
        for level in range(len(self.block)):
            sd = self.sigma * np.sqrt(self.variance[level]) * ((step_index >> level) & 1)
            self.block[level, rows] = self.rng.normal(0, 1, len(rows)) * sd


class Convolved:
    """The same interface for ``blt``: all prefixes by one matrix product."""

    def __init__(self, rng: np.random.Generator, keys: int, strategy: Strategy, sigma: float):
        self.rng, self.sigma = rng, sigma
        self.step_index = np.zeros(keys, np.int64)
        size = strategy.triggers
        encoder = strategy.matrix().astype(np.float64)
        self._decoder = np.tril(np.ones((size, size))) @ np.linalg.inv(encoder)
        self._noise = np.empty((keys, size), np.float32)
        for start in range(0, keys, 10_000):
            self._draw(np.arange(start, min(start + 10_000, keys)))

    def _draw(self, rows: Ints) -> None:
        nodes = self.rng.normal(0, self.sigma, (len(rows), len(self._decoder)))
        self._noise[rows] = nodes @ self._decoder.T

    def advance(self) -> Float64:
        """One more step for every key; returns the noise of each prefix."""
        self.step_index += 1
        return self._noise[np.arange(len(self.step_index)), self.step_index - 1].astype(np.float64)

    def restart(self, rows: Ints, step_index: int) -> None:
        """New noise from ``step_index`` on; as many steps of zeros came before."""
        self.step_index[rows] = step_index
        self._draw(rows)


def noise_of(
    rng: np.random.Generator, keys: int, strategy: Strategy, sigma: float
) -> "Trees | Convolved":
    """Noise of one stream for all keys."""
    if strategy.name == "tree":
        return Trees(rng, keys, strategy.triggers, sigma)
    return Convolved(rng, keys, strategy, sigma)


@dataclasses.dataclass
class Feed:
    """Admitted records of the keys that can be selected at all, by step."""

    keys: Ints  # (k,) ids of the candidate keys
    key: Ints  # (n,) index into ``keys``
    previous: Ints  # (n,) step of the same user's previous record of that key, 0 if none
    rank: Ints  # (n,) index of the record among its user's
    user: Ints  # (n,) its user
    again: npt.NDArray[np.bool_]  # (n,) whether the user has an earlier record of that key
    start: Ints  # (T + 2,) records of step t are start[t] .. start[t + 1]


def make_feed(bounded: Records, keys: int, triggers: int, least: float) -> Feed:
    """Sort the bounded records; keys with at most ``least`` records are left out."""
    total = np.bincount(bounded.key, minlength=keys)
    candidates = np.flatnonzero(total > least)
    index = np.full(keys, -1, np.int32)
    index[candidates] = np.arange(len(candidates))
    keep = index[bounded.key] >= 0
    code = bounded.user[keep].astype(np.int64) * keys + bounded.key[keep]
    code *= triggers + 1
    code += bounded.step_index(triggers)[keep]
    top = 1 if bounded.rank is None else int(bounded.rank.max()) + 1
    code *= top
    code += 0 if bounded.rank is None else bounded.rank[keep]
    code.sort()
    rank = (code % top).astype(np.int16)
    code //= top
    step_index = (code % (triggers + 1)).astype(np.int16 if triggers < 32000 else np.int32)
    code //= triggers + 1
    previous = np.zeros_like(step_index)
    again = np.zeros(len(step_index), np.bool_)
    again[1:] = code[1:] == code[:-1]
    previous[1:] = np.where(again[1:], step_index[:-1], 0)
    key, user = index[code % keys], (code // keys).astype(np.int32)
    order = np.argsort(step_index, kind="stable")
    start = np.searchsorted(step_index[order], np.arange(triggers + 2))
    own = key[order], previous[order], rank[order], user[order], again[order]
    return Feed(candidates, *own, start)


class Indices:
    """Which selection weight each record takes where published keys are skipped (section 9)."""

    def __init__(self, bounded: Records, keys: int, triggers: int) -> None:
        assert bounded.rank is not None
        counts = np.bincount(bounded.user)
        self._base = np.cumsum(counts) - counts
        at = self._base[bounded.user] + bounded.rank  # by user, in the order of time
        self._user, self._key = np.empty_like(bounded.user), np.empty_like(bounded.key)
        self._user[at], self._key[at] = bounded.user, bounded.key
        step_index = np.empty(len(bounded), np.int16 if triggers < 32000 else np.int32)
        step_index[at] = bounded.step_index(triggers)
        self._order = np.argsort(step_index, kind="stable").astype(np.int32)
        self._start = np.searchsorted(step_index[self._order], np.arange(triggers + 2))
        self._index = np.empty(len(bounded), np.int16)
        self._taken = np.zeros(len(counts), np.int16)
        self.published = np.zeros(keys, bool)

    def decide(self, step: int) -> None:
        """The records of a step, by what is published before it."""
        rows = self._order[self._start[step] : self._start[step + 1]]
        user, takes = self._user[rows], ~self.published[self._key[rows]]
        before = np.cumsum(takes) - takes
        first = np.r_[True, user[1:] != user[:-1]][: len(user)]
        of_user = np.maximum.accumulate(np.where(first, before, 0))
        index = self._taken[user] + before - of_user
        self._index[rows] = np.where(takes, index, -1)
        np.add.at(self._taken, user[takes], 1)

    def of(self, user: Ints, rank: Ints) -> Ints:
        """Number of the weight of each record; -1: none."""
        return self._index[self._base[user] + rank]


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
    strategy: Strategy  # of the selection stream, which has a step for each test
    value_strategy: Strategy
    selection_sigma: float
    value_sigma: float | None  # None: the selection stream is what is published
    tau: Float64
    sd: Float64  # of the statistic that is tested
    weights: Ints  # what a user's i-th record adds to the selection count
    coefficients: tuple[int, int] = (1, 0)  # of the selection count and the published count
    per_key: bool = False
    mode: Mode = "sticky"
    mu_count: int = 0
    refresh_every: int = 1
    tests: frozenset[int] = frozenset()
    skip: bool = False
    window_indexed: bool = False  # a restarted tree continues at the window's trigger index

    @classmethod
    def of(cls, plan: Plan, budget: Budget, mode: Mode = "sticky") -> "Design":
        """The design of a plan with one COUNT column.

        Args:
            mode: ``sticky`` is the product's; ``rounds`` the paper's Algorithm 2: select, release,
                restart.
        """
        statistic, selection = budget.statistic, budget.selection
        if statistic is None or selection is None or budget.tau is None:
            raise ValueError("simulates selected keys")
        published = budget.values[0] if budget.values else selection
        count, weights = plan.privacy.contributions, plan.design.weights
        return cls(
            plan.timeline.triggers,
            selection.strategy_object,
            published.strategy_object,
            selection.sigma,
            budget.values[0].sigma if budget.values else None,
            budget.tau / 2.0**DECODE_BITS,
            statistic.sd,
            np.ones(count, np.int64) if weights is None else weights.integers(count),
            (statistic.weighted, statistic.counted),
            bool(plan.privacy.per_key_bound) or not budget.values,
            mode,
            plan.privacy.pre_threshold,
            plan.design.refresh_every,
            frozenset(plan.design.test_triggers.tolist()),
            plan.design.skips,
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
    a, d = design.coefficients
    most = a * int(design.weights[0]) + d
    feed = make_feed(bounded, keys, triggers, float(np.min(design.tau - 6 * design.sd)) / most)
    size = len(feed.keys)
    selection = noise_of(rng, size, design.strategy, design.selection_sigma)
    values = design.value_sigma and noise_of(rng, size, design.value_strategy, design.value_sigma)
    noise = np.zeros(size)
    units, total, weighted, released = (np.zeros(size, np.int64) for _ in range(4))
    published, truth = np.zeros(size), np.zeros(size)
    selected = np.zeros(size, bool)
    order, cells = _by_step_index(raw, triggers)
    back = np.full(keys, -1, np.int32)
    back[feed.keys] = np.arange(size)
    missed, errors, updates = 0, [], 0
    indices = Indices(bounded, keys, triggers) if design.skip else None
    for t in range(1, triggers + 1):
        part = slice(feed.start[t], feed.start[t + 1])
        key, previous = feed.key[part], feed.previous[part]
        fresh = (previous <= released[key]) & ~(feed.again[part] & (design.mode == "sticky"))
        units += np.bincount(key[fresh], minlength=size)
        number = feed.rank[part][fresh]
        if indices is not None:
            indices.decide(t)
            number = indices.of(feed.user[part][fresh], number)
        gained = np.where(number < 0, 0, design.weights[number])
        weighted += np.bincount(key[fresh], gained, minlength=size).astype(np.int64)
        total += np.bincount(key[~feed.again[part]] if design.per_key else key, minlength=size)
        testing = t in design.tests
        noise = selection.advance() if testing else noise
        published_noise = values.advance() if values else noise
        statistic = a * (weighted + noise) + d * (total + published_noise)
        tau = design.tau[np.maximum(selection.step_index, 1) - 1]
        wins = testing & (units > design.mu_count) & (statistic > tau)
        due = _publish(design, t, wins, selected)
        if design.mode != "sticky":
            rows = np.flatnonzero(wins)
            selection.restart(rows, t if design.window_indexed else 0)
            units[rows], weighted[rows], released[rows] = 0, 0, t
        if indices is not None:
            indices.published[feed.keys[selected]] = True
        published[due] = (total + published_noise)[due]
        updates += int(due.sum())
        now = back[raw.key[order[cells[t] : cells[t + 1]]]]
        missed += int((now < 0).sum())
        truth += np.bincount(now[now >= 0], minlength=size)
        errors.append(missed + float(np.abs(published - truth).sum()))
    histogram = np.bincount(raw.key, minlength=keys).astype(np.float64)
    histogram[feed.keys] -= published
    return _result(int(selected.sum()), np.abs(histogram), errors, updates)


def _result(keys: int, error: Float64, errors: list[float], updates: int) -> Result:
    """Figures of a run from the error of every key at the last trigger."""
    return Result(
        keys,
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
    return wins


def _by_step_index(raw: Records, triggers: int) -> tuple[Ints, Ints]:
    step_index = raw.step_index(triggers)
    order = np.argsort(step_index, kind="stable").astype(np.int32)
    counts = np.bincount(step_index, minlength=triggers + 2)
    return order, np.concatenate([[0], np.cumsum(counts)])


def table1_plan(triggers: int, contributions: int = 32, **privacy: object) -> Plan:
    """The plan of Table 1: COUNT per key over one day, (epsilon, delta) = (6, 1e-9)."""
    day = 86_400_000_000
    day -= day % triggers
    kind: KindName = "units" if privacy.pop("fused", False) else "count"
    given = {"epsilon": 6.0, "delta": 1e-9, "contributions": contributions,
             "allow_large_delta": True}  # fmt: skip
    settings = {"strategy": "tree", **given, **privacy}
    return Plan(
        source="synthetic",
        unit=Field("user", "int"),
        key=(Field("key", "int"),),
        event_time="time",
        aggregates=(Aggregate("count", kind),),
        timeline=Timeline(0, day, day, day, day // triggers),
        privacy=Privacy(**settings),  # type: ignore[arg-type]
    )


def algorithm2_plan(triggers: int, contributions: int, epsilon: float, delta: float) -> Plan:
    """A plan whose keys are tested at every trigger, as Algorithm 2 does."""
    return table1_plan(
        triggers, contributions, epsilon=epsilon, delta=delta, select_every=1, refresh_every=1
    )


DESIGNS: tuple[dict[str, object], ...] = (
    {"published": True},
    {"strategy": "tree"},
    {"strategy": "blt"},
    {"strategy": "blt", "per_key_bound": 1},
    {"strategy": "blt", "fused": True},
    {"strategy": "blt", "weights": SelectionWeights(3.0, 0.5), "skip": False},
    {"strategy": "blt", "weights": SelectionWeights(3.0, 1.0), "skip": False},
    {
        "strategy": "blt",
        "weights": SelectionWeights(3.0, 1.5),
        "per_key_bound": 1,
        "combine": True,
        "skip": False,
    },
    {"strategy": "blt", "weights": MILD},
    {
        "strategy": "blt",
        "weights": STEEP,
        "usual_weights": True,
        "per_key_bound": 1,
        "combine": True,
    },
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
    bounded = admit(ranked(raw), 32)
    print(json.dumps({"raw": len(raw), "bounded": len(bounded)}), flush=True)
    for triggers in args.triggers:
        for privacy in DESIGNS:
            begin = time.monotonic()
            if "published" in privacy:
                plan = algorithm2_plan(triggers, 32, 6.0, 1e-9)
                design = Design.of(plan, published_budget(plan), "rounds")
            else:
                plan = table1_plan(triggers, 32, **privacy)
                design = Design.of(plan, allocate(plan))
            result = simulate(design, bounded, raw, args.keys, args.seed + 1)
            figures = dataclasses.asdict(result) | {"seconds": time.monotonic() - begin}
            settings = {k: str(v) for k, v in privacy.items()}
            print(json.dumps({"T": triggers, **settings, **figures}), flush=True)


if __name__ == "__main__":
    main()
