"""The paper's two baselines (section 5), run as code on the records: one-shot DP, again and again.

Both bound every user to its first C records of the day, count records per key with key
selection, and draw exact, keyed noise.  What is published at a trigger:

* **Baseline 1, repeated query**: the one-shot answer on ALL data so far.  It replaces the answer
  of the trigger before; T queries share the budget.
* **Baseline 2, incremental**: the one-shot answer on the NEW data of the trigger alone; the
  answers of a key are added up.  A user's C records are divided over the micro-batches.

One-shot query of squared budget mu^2 (module `accounting.budget.allocation`, one trigger): test
units + N(0, C/(S mu^2)) > tau for every key that a unit touched, publish count + N(0,
C^2/(V mu^2)) of those that pass, S = V = C/(C+1).

Privacy of Baseline 1, composed fairly.  Everything drawn is Gaussian, so T queries of mu/sqrt(T)
compose to exactly mu-GDP.  No bound is lost, so neither zCDP (an upper bound of the same
mechanism) nor the composition of black boxes can do better.  Keys: a cell is a (key, query); at
each query a unit has at most C pairs, and j_t of them on keys it touches alone leave the
Gaussians at most (C - j_t)/(C T) of mu^2 (budget.thresholds.one_trigger_tail: n selections
and the values on them cost at most their pairs' part).  With m = sum of j_t lonely cells of C T
that is delta_G(epsilon; mu sqrt((C T - m)/(C T))) + m b <= delta for all m: the one-trigger rule
with C T in place of C gives b.

Privacy of Baseline 2, composed fairly.  The batches divide the unit's C pairs, so they are ONE
one-shot query grouped by (key, batch): selections n_t and pairs c_t of batch t satisfy
sum n_t <= C and sum of squares <= C^2.  The whole (epsilon, delta) is spent in every batch.

Both arguments are for streams that do not react to what is published (the paper's and ours are
fixed before); the product's own modes promise more.

``+published`` is our reading of what the paper ran (Plume, Gaussian noise, each query a black box
of (epsilon_0, delta_0), "optimal composition" [Kairouz, Oh, Viswanath 2017]): the noisy count
itself is tested, its noise has L2 sensitivity C at (epsilon_0, delta_0/2), and
tau = C + sd isf(delta_0/(2C)).  Baseline 1: the largest epsilon_0 whose T-fold optimal composition
with delta_0 = delta/(2T) is within (epsilon, delta).  Baseline 2: epsilon_0 = epsilon,
delta_0 = delta, which holds by the argument above (a key a unit touches alone counts at most C).
Black boxes cost: at T = 100 the noise of a query is 5.8 times that of the fair composition, at
T = 1000 6.2 times.  With this file's code on Poisson counts of the paper's size (10M users,
T = 100) the reading gives 496 keys and L1 50.6M, and 339 and 58.0M, where the paper prints 435
and 50.8M, 191 and 58.6M; the fair composition gives 17,444 and 20.5M, and 4,812 and 34.0M.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.stats import binom

from dpstream.accounting.arrays import Int64
from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.budget.thresholds import isf, one_trigger_tail, thresholds
from dpstream.accounting.errors import InvariantError, UsageError
from dpstream.accounting.fields import Aggregate, Field
from dpstream.accounting.gaussian import mu_of
from dpstream.accounting.limits import DECODE_BITS, MAX_SIGMA
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.plan.privacy import Privacy
from dpstream.accounting.plan.timeline import Timeline
from dpstream.dp_transforms.noise.ids import typed_ids
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.noise.sampler import RoundedGaussian
from dpstream.pipelines.demo import first_of_each
from tests.bench.paper.synth import DAY_MICROS
from tests.bench.paper.truth import (
    ByTrigger,
    Columns,
    Scoreboard,
    Truth,
    first_of_pair,
)

NAMES = ("baseline1", "baseline2", "baseline1+published", "baseline2+published")
#: C T of Baseline 1: its accounting goes through all numbers of lonely cells.
MAX_CELLS = 1_000_000
_SLACK = 1e-9


@dataclass(frozen=True)
class Guarantee:
    """(epsilon, delta) of everything a user's records of the day can change, and C."""

    epsilon: float
    delta: float
    contributions: int


class Query(NamedTuple):
    """One one-shot query.

    Attributes:
        selection_sigma: sd of the tested count of units; ``None``: the published count is tested.
        value_sigma: sd of the published count.
        tau: threshold in units of 2^-DECODE_BITS; a key passes strictly above it.
    """

    selection_sigma: float | None
    value_sigma: float
    tau: int


def query_of(name: str, promise: Guarantee, triggers: int) -> Query:
    """Noise and threshold of one query of a baseline of `NAMES`.

    Raises:
        UsageError: no such baseline, no guarantee, or noise beyond the sampler's range.
    """
    if name not in NAMES:
        raise UsageError("--baselines", "names no baseline", f"choose from {', '.join(NAMES)}")
    _one_shot_plan(promise).check()
    queries = triggers if name.startswith("baseline1") else 1
    if queries * promise.contributions > MAX_CELLS:
        raise UsageError(name, f"has more than {MAX_CELLS} cells C T", "use fewer triggers")
    black_box = name.endswith("+published")
    query = (_black_box if black_box else _fair)(promise, queries)
    if max(query.value_sigma, query.selection_sigma or 0.0) > MAX_SIGMA:
        raise UsageError(name, "needs more noise than the sampler has", "use fewer triggers")
    return query


def _fair(promise: Guarantee, queries: int) -> Query:
    """The package's one-trigger accounting, composed as Gaussians over ``queries``."""
    budget = allocate(_one_shot_plan(promise))
    if budget.selection is None or budget.tau is None:
        raise InvariantError("budget.selection is not None and budget.tau is not None")
    growth = queries**0.5 * (1 + _SLACK)
    sigma = budget.selection.sigma * growth
    cells = promise.contributions * queries
    tail = one_trigger_tail(promise.epsilon, promise.delta, budget.mu, cells)
    tau = thresholds(tail, 0, np.array([sigma]), np.array([0.5]))
    return Query(sigma, budget.values[0].sigma * growth, int(tau[0]))


def _black_box(promise: Guarantee, queries: int) -> Query:
    epsilon, delta = promise.epsilon, promise.delta
    if queries > 1:
        delta = delta / (2 * queries)
        epsilon = composed_epsilon(promise.epsilon, promise.delta, queries, delta)
    count = promise.contributions
    sigma = count / mu_of(epsilon, delta / 2) * (1 + _SLACK)
    tau = count + 0.5 + sigma * isf(float(np.log(delta / (2 * count))))
    return Query(None, sigma, int(np.ceil(tau * 2**DECODE_BITS)))


def composed_epsilon(epsilon: float, delta: float, queries: int, delta_each: float) -> float:
    """Largest epsilon_0 for which ``queries`` (epsilon_0, delta_each) queries are (epsilon, delta).

    Kairouz, Oh and Viswanath 2017, theorem 3.3, for equal queries: the worst query is randomised
    response, so the privacy loss is epsilon_0 (2 B - k), B binomial.  Rounded down.
    """
    successes = np.arange(queries + 1)
    low, high = 0.0, epsilon
    for _ in range(60):
        middle = (low + high) / 2
        loss = middle * (2 * successes - queries)
        chance = binom.pmf(successes, queries, 1 / (1 + np.exp(-middle)))
        above = float(np.sum(chance * -np.expm1(np.minimum(epsilon - loss, 0.0))))
        fails = 1 - (1 - above) * (1 - delta_each) ** queries
        low, high = (middle, high) if fails <= delta * (1 - _SLACK) else (low, middle)
    return low


def _one_shot_plan(promise: Guarantee) -> Plan:
    """COUNT(*) GROUP BY key, once."""
    return Plan(
        source="experiment",
        unit=Field("user"),
        key=(Field("key"),),
        event_time="time",
        aggregates=(Aggregate("count", "count"),),
        timeline=Timeline(0, DAY_MICROS, DAY_MICROS, DAY_MICROS, DAY_MICROS),
        privacy=Privacy(promise.epsilon, promise.delta, promise.contributions, strategy="tree"),
    )


class Draws:
    """Exact noise of one sd, one draw per named (baseline, role, key, trigger).

    Args:
        ring: key ring of a fresh secret; label: distinct for every use of the ring.
        sigma: sd; ids: (K, 2) key ids.
    """

    def __init__(self, ring: KeyRing, label: tuple[str, ...], sigma: float, ids: Any) -> None:
        self._prf, self._sampler = ring.node, RoundedGaussian(sigma)
        parts = [b"experiment", *(part.encode() for part in label), self._sampler.digest]
        message = np.empty((len(ids), 3, 2), np.uint64)
        message[:, 0] = (2, 0)  # blocks that follow: a fixed length
        message[:, 1] = ring.name(parts)
        message[:, 2] = ids
        self._tweaks = ring.tweak.mac(message.reshape(-1, 2), np.full(len(ids), 3, np.int64))

    def at(self, rows: Int64, trigger: int) -> npt.NDArray[np.int32]:
        """(m,) noise of the keys ``rows`` at a trigger."""
        node = np.full(len(rows), trigger, np.int64)
        return self._sampler.draw(self._prf, self._tweaks[rows], node, node + 1)[0]


class Feed:
    """Admitted records by trigger: each user's first C.

    Attributes:
        records: records of each key by trigger.
        users: distinct (user, key) by first trigger (``whole``), or anew at every trigger.
    """

    def __init__(self, data: Columns, contributions: int, triggers: int, cumulative: bool) -> None:
        rows = first_of_each(data.user.astype(np.int64), contributions)
        user, key, step_index = data.user[rows], data.key[rows], data.step_index(triggers)[rows]
        size = len(data.names)
        self.records = ByTrigger(key, step_index, size, triggers)
        first = first_of_pair(user, key, None if cumulative else step_index)
        self.users = ByTrigger(key[first], step_index[first], size, triggers)


def run_baseline(
    name: str, data: Columns, truth: Truth, promise: Guarantee, ring: KeyRing
) -> dict[str, Any]:
    """Run one baseline of `NAMES` over all triggers and measure it.

    Args:
        data: raw records, with users; truth: their raw counts (gives T).
        ring: key ring of a secret used for nothing else.
    """
    query = query_of(name, promise, truth.triggers)
    cumulative = name.startswith("baseline1")
    feed = Feed(data, promise.contributions, truth.triggers, cumulative)
    ids = typed_ids(ring.key, [("string", data.names)])
    values = Draws(ring, (name, "value"), query.value_sigma, ids)
    tests = query.selection_sigma and Draws(ring, (name, "test"), query.selection_sigma, ids)
    board = Scoreboard(truth)
    units, counts = np.zeros(truth.size, np.int64), np.zeros(truth.size, np.int64)
    sums = np.zeros(truth.size)
    for trigger in range(1, truth.triggers + 1):
        # Baseline 1 asks about all data so far, Baseline 2 about the new data only.
        units = units * cumulative + feed.users.added(trigger)
        counts = counts * cumulative + feed.records.added(trigger)
        rows = np.flatnonzero(units)
        if tests:
            rows = rows[_pass(units[rows] + tests.at(rows, trigger), query)]
            noisy = counts[rows] + values.at(rows, trigger)
        else:
            noisy = counts[rows] + values.at(rows, trigger)
            rows, noisy = rows[_pass(noisy, query)], noisy[_pass(noisy, query)]
        sums[rows] = sums[rows] * (not cumulative) + noisy
        board.publish(rows, sums[rows], replace=cumulative)
    return {**board.errors(), **query._asdict(), "tau": query.tau / 2**DECODE_BITS}


def _pass(statistic: Int64, query: Query) -> npt.NDArray[np.bool_]:
    return np.asarray(statistic << DECODE_BITS > query.tau)
