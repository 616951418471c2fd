"""From a plan to noise: one Gaussian-DP budget, divided over streams, and the thresholds.

``allocate`` turns (epsilon, delta) into mu, divides mu^2 between key selection, a published
count of units and the value streams so that the joint condition holds for EVERY way a unit
can spread its C pairs (mechanism.md section 4), and returns node sigmas rounded up and
thresholds rounded up.  Shares are fractions of mu^2.  With a strategy of squared column norm
``col2`` a stream of share s and L2 sensitivity Delta gets sigma = Delta / (sqrt(s) mu):

    selection, units: Delta = sqrt(C col2)         value column: Delta = C L sqrt(col2)
    weighted selection: sqrt(sum w^2 col2)         at most k of a key: Delta = sqrt(Q) L sqrt(col2)
    mixed cells: Delta = C L sqrt(col2 inverse_norm2), L^-1's longest column

``shares`` divides mu^2 so that no unit can exceed it, however it spreads its C pairs.  Q is the
largest sum of squares of C pairs of which at most k are of one key, q k^2 + r^2 for C = q k + r:
C where k = 1, and C^2 where k >= C.
"""

import functools
import math

import msgspec
import numpy as np

from dpstream.accounting import limits
from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.errors import PolicyError, UsageError
from dpstream.accounting.gaussian import mu_of
from dpstream.accounting.plan.design import Design
from dpstream.accounting.plan.fields import ValueStream
from dpstream.accounting.plan.mechanism import Mechanism, Resolved, mechanism_of
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.plan.privacy import Privacy
from dpstream.accounting.shares import divide, per_key_squares, strategy_of
from dpstream.accounting.strategies import Strategy
from dpstream.accounting.thresholds import one_trigger_tail, thresholds
from dpstream.accounting.weights import Statistic, precision_weighted

#: Sigmas are raised by this much, far above the float error of a division.
_SLACK = 1e-12


class Encoder(msgspec.Struct, frozen=True, eq=False):
    """How the prefixes of one or more streams are noised; shared, read-only.

    Attributes:
        strategy: with the coefficients that are in force.
        sd_factors: (T,) sd of a released prefix for node noise of sd 1, rounded up.
    """

    strategy: Strategy
    sd_factors: Float64


@functools.lru_cache(maxsize=64)
def encoder_of(name: str, triggers: int) -> Encoder:
    """The encoder of a run that begins now."""
    strategy = strategy_of(name, triggers)
    factors = strategy.sd_factors
    factors.setflags(write=False)
    return Encoder(strategy, factors)


@functools.lru_cache(maxsize=64)
def _sd(encoder: Encoder, sigma: float) -> Float64:
    sd = sigma * encoder.sd_factors * (1 + _SLACK)
    sd.setflags(write=False)
    return sd


class StreamNoise(msgspec.Struct, frozen=True):
    """Noise of one stream (selection, units or a value column).

    Attributes:
        name: ``selection``, ``units`` or the value stream's name.
        encoder: how prefixes are noised.
        col2: largest squared column norm of the encoder, rounded up.
        sensitivity: L2 sensitivity of the encoded stream for one unit, in grid units.
        share: fraction of mu^2 this stream is charged.
        sigma: sd of one node's noise in grid units, rounded up.
    """

    name: str
    encoder: Encoder
    col2: float
    sensitivity: float
    share: float
    sigma: float

    @property
    def strategy_object(self) -> Strategy:
        """The strategy itself (shared, stateless)."""
        return self.encoder.strategy

    @property
    def strategy(self) -> str:
        """The strategy's name."""
        return self.encoder.strategy.name

    @property
    def triggers(self) -> int:
        """T of this stream."""
        return self.encoder.strategy.triggers

    @property
    def sd(self) -> Float64:
        """(T,) sd of the released prefix at each trigger in grid units, rounded up; read-only."""
        return _sd(self.encoder, self.sigma)


class Budget(msgspec.Struct, frozen=True, eq=False):
    """What a plan spends and draws; all public.

    Attributes:
        epsilon, delta: the guarantee for one unit (of one period).
        mu: Gaussian-DP parameter of everything drawn, rounded down.
        theta: part of delta kept for thresholds (0 without selection and with one trigger).
        b: chance that a (key, round) of a single person is selected, over all T triggers.
        selection: noise of key selection (of weighted counts in 2^-WEIGHT_BITS), ``None``
            with public keys.
        units: noise of the published count of units (the selection stream itself when keys
            are selected by plain counts), ``None`` when none is published.
        values: one per ``plan.design.streams``, in that order.
        statistic: what a key is tested on, ``None`` with public keys.
        tau: int64 threshold of each test (``Design.tests``) in 2^-DECODE_BITS of the
            statistic, ``None`` with public keys.
        assumptions: in words, what the figures rest on.
        weights: (C,) what a unit's pairs add to the weighted count, in 2^-WEIGHT_BITS; ``None``
            without weights.
        sound: whether the guarantee holds; ``allocate`` gives no other, but a comparison can run
            with numbers that promise nothing.  Everything that it releases says so.
    """

    epsilon: float
    delta: float
    mu: float
    theta: float
    b: float
    selection: StreamNoise | None
    units: StreamNoise | None
    values: tuple[StreamNoise, ...]
    statistic: Statistic | None
    tau: Int64 | None
    assumptions: tuple[str, ...]
    weights: Int64 | None
    sound: bool = True


def _node_sigma(sensitivity: float, share: float, mu: float) -> float:
    """sensitivity / (sqrt(share) mu), rounded up."""
    return sensitivity / (math.sqrt(share) * mu) * (1 + _SLACK)


def _stream(plan: Resolved, name: str, value: int | None, share: float, mu: float) -> StreamNoise:
    """Noise of one stream; ``value`` is L of a value column, ``None`` for counts of units."""
    privacy = plan.privacy
    triggers = plan.design.tests if name == "selection" else plan.design.triggers
    encoder = encoder_of(privacy.strategy, triggers)
    col2 = encoder.strategy.col2
    count = privacy.contributions
    if name == "selection" and plan.design.weights:
        squared = float((plan.design.weights.integers(count) ** 2).sum()) * col2
    elif value is None:
        squared = count * col2
    elif privacy.per_key_bound is not None:
        squares = float(per_key_squares(privacy.per_key_bound, count).max())
        squared = squares * col2 * value**2
    else:
        # A record moves the components by a column of the mixing's inverse (1 without mixing).
        squared = count**2 * col2 * value**2 * plan.design.inverse_norm2
    sensitivity = math.sqrt(squared) * (1 + _SLACK)
    sigma = _node_sigma(sensitivity, share, mu)
    return StreamNoise(name, encoder, col2, sensitivity, share, sigma)


def _values(plan: Resolved, share: float, mu: float) -> tuple[StreamNoise, ...]:
    streams = plan.design.streams
    weight = sum(s.share for s in streams)
    return tuple(
        _stream(plan, s.name, s.sensitivity, share * (s.share / weight) * (1 - _SLACK), mu)
        for s in streams
    )


def _delta_split(plan: Mechanism) -> tuple[float, float, float]:
    """(mu, theta, b)."""
    privacy = plan.privacy
    epsilon, delta, count = privacy.epsilon, privacy.delta, privacy.contributions
    if not plan.design.selects:
        return mu_of(epsilon, delta), 0.0, 0.0
    if _one_test(plan):
        mu = mu_of(epsilon, delta)
        return mu, 0.0, one_trigger_tail(epsilon, delta, mu, count)
    theta = privacy.theta
    kept = delta * (1 - theta) * (1 - _SLACK)
    return mu_of(epsilon, kept), theta, theta * delta / count * (1 - _SLACK)


def _one_test(plan: Mechanism) -> bool:
    """Whether the sharper rule of one test holds (mechanism.md section 4).

    Its proof takes j of a unit's C pairs away from the one test of their keys, and needs that the
    others cost (C-j)/C of the whole: not with weights, which differ by pair, nor where a bound per
    key leaves fewer pairs a larger part.  It also needs that what a unit adds to a key's statistic
    depends on no other test: not where pairs on published keys take no weight (``skips``), nor
    where what another window published is not tested any more (``remembers``).
    """
    design = plan.design
    uniform = design.weights is None and _even(plan.privacy)
    return plan.once and uniform and not design.skips and not design.remembers


def _even(privacy: Privacy) -> bool:
    """Whether a bound per key divides C.

    Else fewer pairs can cost more than their part: of C = 3 with at most 2 of a key, 2 pairs of one
    key have 4 of the 5 that all can have.
    """
    bound = privacy.per_key_bound
    return bound is None or privacy.contributions % min(bound, privacy.contributions) == 0


def allocate(plan: Plan) -> Budget:
    """Divide a plan's budget into noise and thresholds.

    Raises:
        UsageError, PolicyError: the plan is refused, or see ``allocate_mechanism``.
    """
    plan.check()
    return allocate_mechanism(mechanism_of(plan))


def allocate_mechanism(plan: Mechanism) -> Budget:
    """Divide the budget of a mechanism that was checked.

    Args:
        plan: promises and a resolved design, of a stream or of a job without time.

    Raises:
        UsageError: if a sigma, a threshold or a prefix would leave the integers' range.
        PolicyError: if windows share periods and the plan does not allow for it.
    """
    _refuse_shared_windows(plan)
    if plan.privacy.selection_share is not None:
        fused = not plan.design.streams and not plan.design.units_apart
        if not plan.design.selects or fused:
            raise UsageError(
                "privacy.selection_share",
                "has no effect: selection has no other stream to share with, or a share of its own",
                "omit it",
            )
    budget = _divided(plan)
    check_ranges(plan, budget)
    return budget


def _refuse_shared_windows(plan: Mechanism) -> None:
    """Selected keys need windows that each lie in one period, or thresholds that know better."""
    met = plan.periods_met
    if not plan.design.selects or met == 1:
        return
    if not plan.privacy.periods_share_windows:
        raise PolicyError(
            "privacy.period",
            f"one window can meet {met} periods, so that one person counts as {met} units there "
            "and would publish keys that nobody else has",
            "use windows that do not overlap and a period that is a multiple of time.window, or "
            "no period; or set privacy.periods_share_windows = true for thresholds that are "
            f"{met - 1} units higher",
        )


def _divided(plan: Mechanism) -> Budget:
    privacy = plan.privacy
    mu, theta, tail = _delta_split(plan)
    shares = divide(plan)
    selection = units = statistic = tau = None
    if plan.design.selects:
        selection = _stream(plan, "selection", None, shares.selection, mu)
    if plan.design.units_column:
        apart = plan.design.units_apart
        units = _stream(plan, "units", None, shares.units, mu) if apart else selection
    values = _values(plan, shares.values, mu) if shares.values else ()
    if selection is not None:
        statistic = _statistic(plan, selection, plain_count(plan, units, values))
        tau = thresholds(
            tail,
            privacy.pre_threshold,
            statistic.sd,
            statistic.rounding,
            statistic.alone,
            plan.design.units_alone,
        )
    given = privacy.epsilon, privacy.delta, mu, theta, tail
    weights = None
    if plan.design.weights is not None:
        weights = plan.design.weights.integers(privacy.contributions)
    counts = selection, units, values
    return Budget(*given, *counts, statistic, tau, ASSUMPTIONS, weights)


def plain_count(
    plan: Resolved, units: StreamNoise | None, values: tuple[StreamNoise, ...]
) -> StreamNoise | None:
    """The published plain count a combined statistic uses, ``None`` without ``combine``."""
    if not plan.privacy.combine:
        return None
    return units or next(noise for noise in values if noise.name == "count")


def _statistic(plan: Resolved, selection: StreamNoise, plain: StreamNoise | None) -> Statistic:
    """What a key is tested on; see ``accounting.weights``."""
    weights = plan.design.weights
    rounding = selection.strategy_object.rounding * (1 + _SLACK)
    if weights is None:
        return Statistic(1, 0, 1, selection.sd, rounding)
    integers = weights.integers(plan.privacy.contributions)
    largest = int(integers[0])
    if plain is None:
        return Statistic(1, 0, largest, selection.sd, rounding)
    a, d = precision_weighted(integers, selection.sd[-1] ** 2, plain.sd[-1] ** 2)
    at = plan.design.test_triggers - 1
    sd = np.hypot(a * selection.sd, d * plain.sd[at]) * (1 + _SLACK)
    plain_rounding = plain.strategy_object.rounding[at] * (1 + _SLACK)
    return Statistic(a, d, a * largest + d, sd, a * rounding + d * plain_rounding)


#: What every guarantee rests on.
ASSUMPTIONS = (
    "stamps come from the source and no record can influence another record's stamp",
    "a unit's records carry its id; records of different units are independent of each other",
    "the noise key stays secret; AES-256 and BLAKE2b behave as pseudorandom functions",
    "a record that turns up after the step of its trigger time was committed joins the next one",
)


def check_ranges(plan: Resolved, budget: Budget) -> None:
    """Refuse sigmas the sampler's table does not cover and integers that could wrap."""
    for counts in (budget.selection, budget.units):
        if counts is not None:
            _check_sigma("privacy.epsilon", counts, "use a larger epsilon or fewer contributions")
    for stream, noise in zip(plan.design.streams, budget.values, strict=bool(budget.values)):
        field = "privacy.epsilon" if stream.column is None else f"aggregate.{stream.name}.grid"
        fix = "use a larger epsilon or fewer contributions"
        if stream.column is not None:
            fix = "choose a coarser grid or narrower bounds, or " + fix[4:]
        _check_sigma(field, noise, fix)
        _check_wrap(stream, noise, plan.design)
    if budget.tau is not None and budget.statistic is not None:
        # Needs are tau less noise: clipping one would test exact counts (16 sds: never drawn).
        _check_needs(int(budget.tau.max()), float(budget.statistic.sd.max()))


def _check_needs(tau: int, sd: float) -> None:
    if tau + int(16 * sd * (1 << limits.DECODE_BITS)) >= 1 << (31 + limits.DECODE_BITS):
        raise UsageError(
            "privacy.epsilon",
            "a selection threshold and its noise would exceed the 32-bit counts of units",
            "use a larger epsilon, fewer contributions or a smaller pre_threshold",
        )


def _check_sigma(field: str, noise: StreamNoise, fix: str) -> None:
    rounded = noise.strategy_object.rounds_nodes
    most = limits.MAX_SIGMA if rounded else limits.MAX_REAL_SIGMA
    if not noise.sigma <= most:
        raise UsageError(
            field,
            f"noise of '{noise.name}' needs sd {noise.sigma:.6g} a node, on the lattice of "
            f"strategy '{noise.strategy}'; its sampler ends at {most:g}",
            fix + (", or strategy 'blt'" if rounded else ""),
        )
    # Float noise is known to 2^-46 sds (``noise.continuous``): wide sums of long streams would
    # be settled one by one in ball arithmetic.
    share = noise.sigma * 2.0**-45 * noise.strategy_object.reach * (1 << limits.DECODE_BITS)
    if not rounded and share * noise.triggers > limits.MAX_OPEN_DRAWS:
        raise UsageError(
            field,
            f"noise of '{noise.name}' is {noise.sigma:.3g} grid units a node, too fine a grid "
            "for floats to settle the rounding of its prefixes",
            fix + ", or strategy 'tree'",
        )


def _check_wrap(stream: ValueStream, noise: StreamNoise, design: Design) -> None:
    """Prefix plus noise, in units of 2^-decode_bits, must stay inside int64."""
    # The samplers' draws end at 27 sds.
    mixed = 1.0 if design.cells is None else design.cells.row_sum
    worst = 32 * noise.sigma * noise.strategy_object.reach * mixed + 64
    bound = limits.MAX_PAIRS * stream.sensitivity + int(worst)
    if bound << design.decode_bits >= 1 << 63:
        raise UsageError(
            f"aggregate.{stream.name}.grid",
            f"{limits.MAX_PAIRS} records at the bounds would wrap the decoder's integers",
            "choose a coarser grid or narrower bounds",
        )
