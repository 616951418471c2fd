"""Allocation of one Gaussian-DP budget of a plan to streams, their noise, and the thresholds.

``allocate`` turns (epsilon, delta) into mu, divides mu^2 between key selection, a published
count of units and the value streams so that the joint condition holds for EVERY way a unit
can spread its C pairs (mechanism.md section 4), and returns node sigmas rounded up and
thresholds rounded up.  Shares are fractions of mu^2.  With a strategy of squared column norm
``col2`` a stream of share s and L2 sensitivity Delta gets sigma = Delta / (sqrt(s) mu):

    selection, units: Delta = sqrt(C col2)         value column: Delta = C L sqrt(col2)
    weighted selection: sqrt(sum w^2 col2)         at most k of a key: Delta = sqrt(Q) L sqrt(col2)
    weighted by size: sqrt(col2)
    mixed cells: Delta = C L sqrt(col2 inverse_norm2), L^-1's longest column

Strategy ``geometric`` divides epsilon itself: a stream of share s and L1 sensitivity Delta = C L a,
a the largest L1 norm of a column of its encoder, has noise of scale Delta / (s epsilon), and the
shares add up to 1.  Losses of all streams add up on every path (``strategies.geometric``), so that
all is plain epsilon, whatever a unit does with its C pairs.

``shares`` divides mu^2 so that no unit can exceed it, however it spreads its C pairs.  Q is the
largest sum of squares of C pairs of which at most k are of one key, q k^2 + r^2 for C = q k + r:
C where k = 1, and C^2 where k >= C.

**Ranges.**  Budgets outside of those of samplers and 64-bit integers are refused (`check_ranges`).
"""

import functools
import math
from fractions import Fraction

import msgspec
import numpy as np

from dpstream.accounting import limits
from dpstream.accounting.aggregates import COUNT
from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.budget.key_tests import (
    delta_split,
    last_test,
    tau_of,
    testing_strategy,
    thresholds_of_tests,
)
from dpstream.accounting.budget.shares import divide, per_key_squares, strategy_of
from dpstream.accounting.budget.thresholds import lone_tail
from dpstream.accounting.errors import InvariantError, PolicyError, UsageError
from dpstream.accounting.fields import ValueStream
from dpstream.accounting.gaussian import epsilon_of
from dpstream.accounting.geometric import geometric_sd_above, scale_for
from dpstream.accounting.plan.design import Design
from dpstream.accounting.plan.plan import Mechanism, Plan, Resolved, mechanism_of, with_privacy
from dpstream.accounting.plan.privacy import StrategyName
from dpstream.accounting.plan.unit import several_mu
from dpstream.accounting.strategies import Strategy
from dpstream.accounting.strategies.geometric import geometric_encoders
from dpstream.accounting.weights import Statistic, precision_weighted

#: Periods that are looked at of a stream without end.
OPEN_PERIODS = 1024
#: Sigmas are raised by this much, far above the float error of a division.
_SLACK = 1e-12


class Encoder(msgspec.Struct, frozen=True, eq=False):
    """The encoder by which prefixes of one or more streams are noised; shared, read-only.

    Attributes:
        strategy: the strategy, with the run's coefficients.
        sd_factors: (T,) sd of a released prefix for node noise of sd 1, rounded up.
    """

    strategy: Strategy
    sd_factors: Float64


def encoder_of(name: str, triggers: int) -> Encoder:
    """Return the encoder of a run that begins now."""
    return _encoder(strategy_of(name, triggers))


@functools.lru_cache(maxsize=64)
def _encoder(strategy: Strategy) -> Encoder:
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
        sensitivity: L2 sensitivity of the encoded stream for one unit, in grid units.
        share: fraction of mu^2 this stream is charged.
        sigma: sd of one node's noise in grid units, rounded up.
        scale: of two-sided geometric noise; 0: Gaussian.  Then ``sensitivity`` is in L1 and
            ``share`` one of epsilon.
        most, sooner: where the noise is truncated (`accounting.mechanisms.optimum`); 0: nowhere.
    """

    name: str
    encoder: Encoder
    sensitivity: float
    share: float
    sigma: float
    scale: float = 0.0
    most: int = 0
    sooner: int = 0

    @property
    def col2(self) -> float:
        """The largest squared column norm of the encoder, rounded up."""
        return self.encoder.strategy.col2

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

    def steps_at(self, triggers: Int64) -> Int64:
        """Return the steps of a published stream that hold the data of triggers.

        It is its only step where keys are published once, at the close.
        """
        return np.minimum(triggers, self.triggers)

    @property
    def sd(self) -> Float64:
        """(T,) sd of the released prefix at each trigger in grid units, rounded up; read-only."""
        return _sd(self.encoder, self.sigma)


class Budget(msgspec.Struct, frozen=True, eq=False):
    """The budget of a plan: its guarantee and its noise; all public.

    Attributes:
        epsilon, delta: the guarantee for one unit (of one period).
        mu: Gaussian-DP parameter of everything drawn, rounded down.
        theta: part of delta kept for thresholds (0 without selection and with one trigger).
        b: chance that a (key, round) of a single person is selected, over all its tests; with
            weights the mean of a unit's C keys, of which ``lone_chance`` is the largest.
        selection: noise of key selection (of weighted counts in 2^-WEIGHT_BITS), ``None``
            with public keys.
        units: noise of the published count of units (the selection stream itself when keys
            are selected by plain counts), ``None`` when none is published.
        values: one per ``plan.design.streams``, in that order.
        statistic: what a key is tested on, ``None`` with public keys.
        tau: int64 threshold of each test (``Design.tests``) in 2^-DECODE_BITS of the
            statistic, ``None`` with public keys.
        weights: (C,) what a unit's pairs add to the weighted count, in 2^-WEIGHT_BITS; ``None``
            without weights.
        has_guarantee: whether the guarantee holds.  ``allocate`` returns no budget without it, but
            a comparison can run with one; every release of such a run states it.
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
    weights: Int64 | None
    has_guarantee: bool = True

    @property
    def streams(self) -> tuple[StreamNoise, ...]:
        """Every stream that is noised, once."""
        counts = [self.selection] if self.selection is self.units else [self.selection, self.units]
        # What is tested may be a published count of records, at most one of a unit in a key.
        named = {noise.name for noise in self.values}
        apart = (noise for noise in counts if noise is not None and noise.name not in named)
        return (*apart, *self.values)

    @property
    def plain(self) -> bool:
        """Return whether noise is two-sided geometric, which is charged its epsilon; ``mu`` is 0
        then.
        """
        return any(noise.scale for noise in self.streams)

    @property
    def strategy(self) -> str:
        """The strategy of published prefixes, with ``auto`` resolved."""
        return self.streams[-1].strategy


def _stream(plan: Resolved, name: str, value: int | None, share: float, mu: float) -> StreamNoise:
    """Noise of one stream; ``value`` is L of a value column, ``None`` for counts of units."""
    privacy = plan.privacy
    design = plan.design
    if name == "selection" and not design.selection_published:
        encoder = _encoder(testing_strategy(privacy.strategy, design.tests, last_test(plan)))
    else:
        triggers = design.tests if name == "selection" else design.value_steps
        encoder = encoder_of(privacy.strategy, triggers)
    if encoder.strategy.law != "gaussian":
        raise InvariantError(
            "mu is proven of Gaussian noise and encoders that look at no later step"
        )
    col2 = encoder.strategy.col2
    count = privacy.contributions
    if name == "selection" and plan.design.weights:
        squared = plan.design.weights.norm2(count) * col2
    elif value is None:
        squared = count * col2
    elif privacy.per_key_bound is not None:
        squares = float(per_key_squares(privacy.per_key_bound, count).max())
        squared = squares * col2 * value**2
    else:
        # A record moves the components by a column of the mixing's inverse (1 without mixing).
        squared = count**2 * col2 * value**2 * plan.design.inverse_norm2
    sensitivity = math.sqrt(squared) * (1 + _SLACK)
    sigma = sensitivity / (math.sqrt(share) * mu) * (1 + _SLACK)
    return StreamNoise(name, encoder, sensitivity, share, sigma)


def _values(plan: Resolved, share: float, mu: float) -> tuple[StreamNoise, ...]:
    streams = plan.design.streams
    weight = sum(s.share for s in streams)
    return tuple(
        _stream(plan, s.name, s.sensitivity, share * (s.share / weight) * (1 - _SLACK), mu)
        for s in streams
    )


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
    names = _strategies(plan)
    if len(names) == 1:
        return _checked(with_privacy(plan, strategy=names[0]))
    budgets, refused = list[Budget](), list[UsageError]()
    for name in names:
        try:
            budgets.append(_checked(with_privacy(plan, strategy=name)))
        except UsageError as error:
            refused.append(error)
    if not budgets:
        raise refused[0]
    if plan.privacy.optimise == "period":
        return min(budgets, key=mean_log_sd)
    return min(budgets, key=lambda b: mean_log_sd(b) + math.log(lifetime_epsilon(plan, b)))


def lifetime_epsilon(plan: Mechanism, budget: Budget) -> float:
    """Return epsilon of a person over all periods, or over `OPEN_PERIODS` of a stream without end.

    It is at the delta of one period for Gaussian noise (public keys).
    """
    periods = plan.periods or OPEN_PERIODS
    if budget.plain or periods == 1:
        return periods * budget.epsilon
    return epsilon_of(several_mu(budget.mu, periods, plan.periods_met), budget.delta)


def _strategies(plan: Mechanism) -> tuple[StrategyName, ...]:
    """What a plan's strategy stands for: for ``auto`` all that are compared."""
    privacy, design = plan.privacy, plan.design
    if privacy.strategy != "auto":
        return (privacy.strategy,)
    if design.selects or design.cells is not None:
        return ("blt",)
    if not privacy.delta:
        return ("geometric",)
    if design.triggers > limits.MAX_GEOMETRIC_TRIGGERS:
        return ("blt",)
    return ("blt", "geometric")


def _checked(plan: Mechanism) -> Budget:
    budget = _plain(plan) if plan.privacy.strategy == "geometric" else _divided(plan)
    check_ranges(plan, budget)
    return budget


def mean_log_sd(budget: Budget) -> float:
    """Return the logarithm of the geometric mean over columns of their mean sd over the triggers.

    What families are compared by: public, and the same whatever units columns are in.
    """
    columns = budget.values + ((budget.units,) if budget.units is not None else ())
    return float(np.mean([math.log(float(noise.sd.mean())) for noise in columns]))


def _refuse_shared_windows(plan: Mechanism) -> None:
    """Selected keys need windows that each lie in one period, or thresholds that know better."""
    met = plan.periods_met
    if not plan.design.selects or met == 1:
        return
    if not plan.privacy.periods_share_windows:
        raise PolicyError(
            "budget.covers",
            f"one window can meet {met} periods, so that one person counts as {met} units there "
            "and would publish keys that nobody else has",
            "use windows that do not overlap and a period that is a multiple of window, or "
            "no period; or set mechanism.periods_share_windows = true for thresholds that are "
            f"at least {met - 1} units higher",
        )


def _divided(plan: Mechanism) -> Budget:
    privacy = plan.privacy
    mu, theta, tail = delta_split(plan)
    shares = divide(plan, plan.selection_share)
    selection = units = statistic = tau = None
    if plan.design.selects:
        selection = _stream(plan, "selection", None, shares.selection, mu)
    if plan.design.units_column:
        apart = plan.design.units_apart
        units = _stream(plan, "units", None, shares.units, mu) if apart else selection
    values = _values(plan, shares.values, mu) if shares.values else ()
    if selection is not None:
        statistic = _statistic(plan, selection, plain_count(plan, units, values))
        tau = thresholds_of_tests(plan, tail, statistic)
    given = privacy.epsilon, privacy.delta, mu, theta, tail
    mixed = plan.design.weights
    weights = None if mixed is None else mixed.integers(privacy.contributions)
    counts = selection, units, values
    return Budget(*given, *counts, statistic, tau, weights)


def _plain(plan: Mechanism) -> Budget:
    """Two-sided geometric noise; see the module.

    Sensitivity: a unit's C pairs move the step inputs of a column by at most C L in L1, over all
    keys, windows and steps (by C for a count of units), and what is noised by a times that.

    Selected keys (mechanism.md section 4): a count of units is tested, a published one where there
    is one, else one that pays a part of epsilon.  Its b = delta / C per (key, window) is all that
    is added to plain epsilon.
    """
    privacy, design = plan.privacy, plan.design
    shares = {stream.name: Fraction(stream.share) for stream in design.streams}
    steps = {stream.name: (stream.sensitivity, design.value_steps) for stream in design.streams}
    tested = None
    if design.units_column is not None:
        shares["units"] = Fraction(design.units_column.share or 1.0)
        steps["units"] = 1, design.tests if design.selects else design.triggers
        tested = "units"
    if design.selects and tested is None:
        tested = COUNT if design.counts_units else "selection"
        if tested == "selection":
            shares[tested] = sum(shares.values(), Fraction(0)) / len(shares)
            steps[tested] = 1, design.tests
    total, once = sum(shares.values(), Fraction(0)), design.selects and design.tests == 1
    streams = {
        name: _geometric_stream(plan, name, *steps[name], share / total, once and name == tested)
        for name, share in shares.items()
    }
    values = tuple(streams[stream.name] for stream in design.streams)
    units = streams.get("units")
    if not design.selects or tested is None:
        given = privacy.epsilon, 0.0, 0.0, 0.0, 0.0
        return Budget(*given, None, units, values, None, None, None)
    b = math.nextafter(privacy.delta / privacy.contributions, 0)
    selection = streams[tested]
    counted = tested == COUNT
    at = selection.steps_at(design.test_triggers) if counted else np.arange(1, design.tests + 1)
    rounding = selection.strategy_object.rounding[at - 1] * (1 + _SLACK)
    statistic = Statistic(1, 0, 1, selection.sd[at - 1], rounding)
    tau = tau_of(selection, b, privacy.pre_threshold, at)
    given = privacy.epsilon, privacy.delta, 0.0, 0.0, b
    return Budget(*given, selection, units, values, statistic, tau, None)


def _geometric_stream(
    plan: Resolved, name: str, value: int, steps: int, share: Fraction, once: bool
) -> StreamNoise:
    """Of the encoders at hand the one with the least mean sd over the triggers.

    Args:
        value: L; steps: of the stream; once: it is tested once, and its noise truncated.
    """
    privacy, candidates, cut = plan.privacy, list[StreamNoise](), (0, 0)
    for strategy in geometric_encoders(steps):
        sensitivity = privacy.contributions * value * strategy.column1
        scale = scale_for(sensitivity, share, privacy.epsilon)
        given = name, _encoder(strategy), float(sensitivity), float(share)
        if once:
            from dpstream.accounting.mechanisms.optimum import truncation

            cut = truncation(scale, privacy.delta, privacy.contributions)
        candidates.append(StreamNoise(*given, geometric_sd_above(scale), scale, *cut))
    return min(candidates, key=lambda noise: float(noise.sd.mean()))


def lone_chance(plan: Resolved, budget: Budget) -> float:
    """Return the chance that a key of a single person is ever selected, at most; 0 with public
    keys.

    A key of the unit's first pair, whose weight is the largest, has more of it than the others.
    """
    if budget.tau is None or budget.statistic is None:
        return 0.0
    if budget.weights is None:
        return budget.b
    statistic = budget.statistic
    least = plan.privacy.pre_threshold
    return max(
        budget.b, lone_tail(budget.tau, least, statistic.sd, statistic.rounding, statistic.alone)
    )


def plain_count(
    plan: Resolved, units: StreamNoise | None, values: tuple[StreamNoise, ...]
) -> StreamNoise | None:
    """Return the published plain count a combined statistic uses, ``None`` without ``combine``."""
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
    variances = selection.sd[-1] ** 2, plain.sd[-1] ** 2
    a, d = precision_weighted(integers, *variances, weights.by_size)
    at = plain.steps_at(plan.design.test_triggers) - 1
    sd = np.hypot(a * selection.sd, d * plain.sd[at]) * (1 + _SLACK)
    plain_rounding = plain.strategy_object.rounding[at] * (1 + _SLACK)
    return Statistic(a, d, a * largest + d, sd, a * rounding + d * plain_rounding)


#: What every guarantee rests on.
ASSUMPTIONS = (
    "stamps come from the source and no record can influence another record's stamp",
    "a unit's records carry its id; records of different units are independent of each other",
    "the secret stays secret; AES-256 and BLAKE2b behave as pseudorandom functions",
    "a record that turns up after the step of its trigger time was committed joins the next one",
)


def check_ranges(plan: Resolved, budget: Budget) -> None:
    """Refuse noise that a sampler does not cover and integers that could wrap.

    Raises:
        UsageError: a number is outside its range.
    """
    for counts in (budget.selection, budget.units):
        if counts is not None:
            _check_sigma("budget.epsilon", counts, "use a larger epsilon or fewer contributions")
    for stream, noise in zip(plan.design.streams, budget.values, strict=bool(budget.values)):
        field = "budget.epsilon" if stream.column is None else f"aggregate.{stream.name}.grid"
        fix = "use a larger epsilon or fewer contributions"
        if stream.column is not None:
            fix = "choose a coarser grid or narrower bounds, or " + fix[4:]
        _check_sigma(field, noise, fix)
        _check_wrap(stream, noise, plan.design)
    if budget.tau is not None and budget.statistic is not None:
        # Needs are tau less noise: clipping one would test exact counts (16 sds: never drawn).
        check_needs(int(budget.tau.max()), float(budget.statistic.sd.max()))


def check_needs(tau: int, sd: float) -> None:
    """Refuse thresholds that with 16 sds of noise exceed the integers of counts.

    Args:
        tau: largest threshold, in 2^-DECODE_BITS.
        sd: largest sd of the tested statistic, in counts.

    Raises:
        UsageError: they do.
    """
    if tau + int(16 * sd * (1 << limits.DECODE_BITS)) >= 1 << (31 + limits.DECODE_BITS):
        raise UsageError(
            "budget.epsilon",
            "a selection threshold and its noise would exceed the 32-bit counts of units",
            "use a larger epsilon, fewer contributions or a smaller pre_threshold",
        )


def _check_sigma(field: str, noise: StreamNoise, fix: str) -> None:
    rounded = noise.strategy_object.rounds_nodes and not noise.scale
    most = limits.MAX_SIGMA if rounded else limits.MAX_REAL_SIGMA
    if not max(noise.sigma, noise.scale) <= most:
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
    # Gaussian draws end at 27 sds.  A two-sided geometric draw beyond 64 sds has chance below
    # 2^-128; the published value would then wrap as the decoder's integers do.
    mixed = 1.0 if design.cells is None else design.cells.row_sum
    worst = (64 if noise.scale else 32) * noise.sigma * noise.strategy_object.reach * mixed + 64
    bound = limits.MAX_PAIRS * stream.sensitivity + int(worst)
    if bound << design.decode_bits >= 1 << 63:
        raise UsageError(
            f"aggregate.{stream.name}.grid",
            f"{limits.MAX_PAIRS} records at the bounds would wrap the decoder's integers",
            "choose a coarser grid or narrower bounds",
        )
