"""Ranges of samplers and 64-bit integers; budgets outside them are refused."""

from typing import TYPE_CHECKING

from dpstream.accounting import limits
from dpstream.accounting.errors import UsageError
from dpstream.accounting.fields import ValueStream
from dpstream.accounting.plan.design import Design
from dpstream.accounting.plan.plan import Resolved

if TYPE_CHECKING:
    from dpstream.accounting.budget.allocation import Budget, StreamNoise


def check_ranges(plan: Resolved, budget: "Budget") -> None:
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


def _check_sigma(field: str, noise: "StreamNoise", fix: str) -> None:
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


def _check_wrap(stream: ValueStream, noise: "StreamNoise", design: Design) -> None:
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
