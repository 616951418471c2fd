"""The numbers that a run commits when it begins: its defaults and its calibration.

Sigma names the noise (``dp_transforms.noise.paths``), and thresholds, coefficients and sds show
in what is released.  Computed by every worker, they would follow its processor (numpy, BLAS and
FFT round differently on different instruction sets) and its version of this program: shards of
one window would disagree, or the same data would be drawn a second time, uncharged.  So the
text that ``calibrate`` gives is committed with the run id, and every worker reads its numbers
from there.  Reading uses correctly rounded float operations only; floats are written with all
their digits.

The text also says what a job does that its hash leaves open: ``begun`` gives the plan with it.
"""

import base64
import functools
import zlib
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.budget.allocation import (
    Budget,
    Encoder,
    StreamNoise,
    allocate,
)
from dpstream.accounting.calendars import Calendar
from dpstream.accounting.errors import PolicyError
from dpstream.accounting.plan.plan import Plan, with_privacy
from dpstream.accounting.strategies import make_strategy
from dpstream.accounting.weights import Statistic

#: Layout of the text; another one when the same settings come to mean another mechanism.
FORMAT = 1


class Calibrated(NamedTuple):
    """A plan with its defaults filled in, and its budget; the plan's hash is NOT the run's."""

    plan: Plan
    budget: Budget


class _Encoder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    strategy: str
    triggers: int
    parameters: str
    sd_factors: str


class _Stream(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    encoder: int
    col2: float
    sensitivity: float
    share: float
    sigma: float
    scale: float = 0.0
    most: int = 0
    sooner: int = 0


class _Statistic(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    weighted: int
    counted: int
    alone: int
    sd: str
    rounding: str


class _Text(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The text; arrays are base64 of compressed little-endian int64 or float64.

    Attributes:
        selection, units, values: numbers of entries of ``streams``.
        weights: of a unit's pairs, in units of 2^-WEIGHT_BITS.
        statistic: what keys are tested on; ``tau``: against what.
        unsound: written only of numbers without a guarantee.
        tests: triggers of the tests, written only where they are not ``select_every`` apart.
        skips: pairs on published keys take no weight.
        calendar: the list of the plan's timeline, which later time zones do not change.
    """

    format: int
    refresh_every: int
    select_every: int
    epsilon: float
    delta: float
    mu: float
    theta: float
    b: float
    encoders: list[_Encoder]
    streams: list[_Stream]
    selection: int | None
    units: int | None
    values: list[int]
    weights: str | None
    statistic: _Statistic | None
    tau: str | None
    unsound: bool = False
    tests: tuple[int, ...] | None = None
    skips: bool | None = None
    calendar: Calendar | None = None


def calibrate(plan: Plan) -> str:
    """Return the numbers of a run that begins now as text; all public.

    Raises:
        UsageError, PolicyError: the plan cannot be run, as ``allocate`` says.
    """
    return committed_text(plan, allocate(plan))


def committed_text(plan: Plan, budget: Budget) -> str:
    """Return a budget as the text that is committed with the run id."""
    selection, units = budget.selection, budget.units
    counts = [noise for noise in (selection, units) if noise is not None]
    counts = counts[:1] if units is selection else counts
    streams, tested = [*counts, *budget.values], budget.statistic
    encoders = list({noise.encoder: None for noise in streams})
    text = _Text(
        format=FORMAT,
        refresh_every=plan.design.refresh_every,
        select_every=plan.design.select_every,
        epsilon=float(budget.epsilon),
        delta=float(budget.delta),
        mu=budget.mu,
        theta=float(budget.theta),
        b=budget.b,
        encoders=[_encoder_text(encoder) for encoder in encoders],
        streams=[_stream_text(noise, encoders) for noise in streams],
        selection=None if selection is None else 0,
        units=None if units is None else len(counts) - 1,
        values=list(range(len(counts), len(streams))),
        weights=None if budget.weights is None else _packed(budget.weights),
        statistic=None if tested is None else _text_of(tested),
        tau=None if budget.tau is None else _packed(budget.tau),
        unsound=not budget.has_guarantee,
        tests=plan.design.schedule,
        calendar=plan.timeline.calendar,
        skips=plan.design.skips,
    )
    return msgspec.json.encode(text).decode()


@functools.lru_cache(maxsize=16)
def calibrated(plan: Plan, text: str) -> Calibrated:
    """Return the plan and budget that were committed when a run began.

    Args:
        plan: the run's plan; text: what ``calibrate`` gave then.

    Raises:
        PolicyError: the text is damaged, or another program's.
    """
    plan = begun(plan, text)
    calibration = _read(text)
    try:
        budget = _budget(calibration)
    except (ValueError, IndexError, zlib.error):
        raise _unreadable() from None
    explicit = _explicit(
        plan, calibration.refresh_every, calibration.select_every, calibration.tests
    )
    if explicit.privacy.strategy == "auto":
        own = msgspec.structs.replace(explicit.privacy, strategy=budget.strategy)
        explicit = msgspec.structs.replace(explicit, privacy=own)
    return Calibrated(explicit, budget)


@functools.lru_cache(maxsize=16)
def calendar_of(text: str) -> Calendar | None:
    """Return the list that the timeline of a begun run has, ``None`` without a calendar.

    Raises:
        PolicyError: the text is damaged, or another program's.
    """
    return _read(text).calendar


def begun(plan: Plan, text: str) -> Plan:
    """Return the plan with the defaults of its run; its hash is the same.

    Args:
        text: see ``calibrated``.

    Raises:
        PolicyError: the text is damaged, or another program's.
    """
    plan = _skipping_as(plan, _read(text).skips)
    if _weighs(plan, text):
        return plan
    # Whose weights they are is no part of the hash: the run's own are those of the other case.
    other = with_privacy(plan, usual_weights=not plan.privacy.usual_weights)
    return other if _weighs(other, text) else plan


def _skipping_as(plan: Plan, skips: bool | None) -> Plan:
    """The plan, skipping what is published if the run does: that a job says no is no part of the
    hash."""
    if skips in (None, plan.design.skips):
        return plan
    other = with_privacy(plan, skip=None if plan.privacy.skip is False else False)
    if other.design.skips != skips:
        raise _unreadable()
    return other


def _weighs(plan: Plan, text: str) -> bool:
    """Whether a unit's pairs weigh in the plan what was committed."""
    weights, mine = _read(text).weights, plan.design.weights
    if weights is None or mine is None:
        return weights is None and mine is None
    return np.array_equal(_integers(weights), mine.integers(plan.privacy.contributions))


@functools.lru_cache(maxsize=16)
def _read(text: str) -> _Text:
    try:
        calibration = msgspec.json.decode(text, type=_Text)
    except (msgspec.DecodeError, ValueError):
        raise _unreadable() from None
    if calibration.format != FORMAT:
        raise _unreadable()
    return calibration


def _unreadable() -> PolicyError:
    return PolicyError(
        "store",
        "its committed numbers cannot be read: it is damaged, or another program's",
        "restore it from a backup, or use the program that wrote it",
    )


def _explicit(
    plan: Plan, refresh_every: int, select_every: int, tests: tuple[int, ...] | None = None
) -> Plan:
    """The plan with the defaults that decide when something is published or tested."""
    every = select_every if tests is None else None
    return with_privacy(plan, refresh_every=refresh_every, select_every=every, tests=tests)


def _encoder_text(encoder: Encoder) -> _Encoder:
    strategy = encoder.strategy
    parameters, factors = _packed(strategy.parameters), _packed(encoder.sd_factors)
    return _Encoder(strategy.name, strategy.triggers, parameters, factors)


def _stream_text(noise: StreamNoise, encoders: list[Encoder]) -> _Stream:
    at = encoders.index(noise.encoder)
    figures = noise.col2, noise.sensitivity, noise.share, noise.sigma, noise.scale
    return _Stream(noise.name, at, *figures, noise.most, noise.sooner)


def _budget(calibration: _Text) -> Budget:
    encoders = [
        Encoder(make_strategy(e.strategy, e.triggers, _floats(e.parameters)), _floats(e.sd_factors))
        for e in calibration.encoders
    ]
    streams = [
        StreamNoise(
            s.name,
            encoders[s.encoder],
            s.sensitivity,
            s.share,
            s.sigma,
            s.scale,
            s.most,
            s.sooner,
        )
        for s in calibration.streams
    ]
    tested, statistic = calibration.statistic, None
    if tested is not None:
        arrays = _floats(tested.sd), _floats(tested.rounding)
        statistic = Statistic(tested.weighted, tested.counted, tested.alone, *arrays)
    return Budget(
        calibration.epsilon,
        calibration.delta,
        calibration.mu,
        calibration.theta,
        calibration.b,
        None if calibration.selection is None else streams[calibration.selection],
        None if calibration.units is None else streams[calibration.units],
        tuple(streams[i] for i in calibration.values),
        statistic,
        None if calibration.tau is None else _integers(calibration.tau),
        None if calibration.weights is None else _integers(calibration.weights),
        not calibration.unsound,
    )


def _text_of(tested: Statistic) -> _Statistic:
    sd, rounding = _packed(tested.sd), _packed(tested.rounding)
    return _Statistic(tested.weighted, tested.counted, tested.alone, sd, rounding)


def _packed(numbers: npt.NDArray[Any]) -> str:
    """Compressed little-endian numbers, byte planes apart: neighbours share their high bytes."""
    words = np.ascontiguousarray(numbers, numbers.dtype.newbyteorder("<"))
    planes = words.view(np.uint8).reshape(-1, 8).T.tobytes()
    return base64.b85encode(zlib.compress(planes, 9)).decode()


def _unpacked(text: str, dtype: str) -> npt.NDArray[Any]:
    planes = np.frombuffer(zlib.decompress(base64.b85decode(text)), np.uint8)
    words = np.ascontiguousarray(planes.reshape(8, -1).T).view(dtype).reshape(-1)
    native = words.astype(words.dtype.newbyteorder("="))
    native.setflags(write=False)
    return native


def _floats(text: str) -> Float64:
    return _unpacked(text, "<f8")


def _integers(text: str) -> Int64:
    return _unpacked(text, "<i8")
