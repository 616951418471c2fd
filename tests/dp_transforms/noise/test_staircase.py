"""Staircase draws: a plain reference, exact decisions, shape, names."""

import itertools
from unittest import mock

import flint
import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.balls import precision
from dpstream.accounting.mechanisms.laws import DiscreteStaircaseLaw, settle
from dpstream.dp_transforms.noise import oneshot
from dpstream.dp_transforms.noise.oneshot import OneShot, numbered
from dpstream.dp_transforms.noise.prf import KeyRing
from tests.dp_transforms.laws import LEAST_P, shape_p
from tests.fixed import INPUTS

RUN = (b"\x22" * 16, b"question")
SETTINGS = [(2.0, 5, 2), (1.5, 7, 1), (9.0, 12, 12), (0.5, 6, 2), (30.0, 100, 31)]


def drawn(
    ring: KeyRing, scale: float, sensitivity: int, step: int, count: int, run: object = RUN
) -> Int64:
    shot = OneShot(ring, run, INPUTS)  # type: ignore[arg-type]
    return shot.staircase(numbered(count), scale, sensitivity, step)


def masses(scale: float, sensitivity: int, step: int, reach: int) -> Float64:
    size = np.abs(np.arange(-reach, reach + 1))
    level = size // sensitivity + (size % sensitivity >= step)
    mass = np.exp(-level * (sensitivity / scale))
    return np.asarray(mass / mass.sum())


@pytest.mark.parametrize(("scale", "sensitivity", "step"), SETTINGS)
def test_draws_are_the_inverse_of_the_law(
    ring: KeyRing, scale: float, sensitivity: int, step: int
) -> None:
    """The name is a CBC-MAC, and Z the place of its uniform in the law's sums."""
    numbers = sensitivity.to_bytes(8, "little") + step.to_bytes(8, "little")
    prefix = ring.name((b"one-shot noise", b"staircase", numbers, *RUN, INPUTS))
    bits = int(np.float64(scale).view(np.uint64))
    noise = drawn(ring, scale, sensitivity, step, 60)
    reach = 2 * sensitivity + int(50 * scale)
    with mpmath.workdps(60):
        q = mpmath.exp(-mpmath.mpf(sensitivity) / mpmath.mpf(scale))
        weight = [q ** (z // sensitivity + (z % sensitivity >= step)) for z in range(reach + 1)]
        tails = list(itertools.accumulate(weight[:0:-1]))[::-1]  # P[Z <= -1] first
        sums = [tail / (2 * mpmath.fsum(weight) - 1) for tail in tails]
    for item, value in enumerate(noise.tolist()):
        message = np.array([(3, 0), prefix, (item, 0), (bits, 1)], np.uint64)
        name = ring.tweak.mac(message, np.array([4]))
        word = int(ring.node.blocks(name)[0, 0])
        uniform = (mpmath.mpf(min(word, 2**64 - 1 - word)) + mpmath.mpf("0.5")) / 2**64
        size = sum(bool(uniform <= tail) for tail in sums)
        assert value == (size if word >= 2**63 else -size)


@pytest.mark.parametrize(("scale", "sensitivity", "step"), SETTINGS)
def test_shapes(scale: float, sensitivity: int, step: int) -> None:
    noise = drawn(KeyRing(b"\x09" * 32), scale, sensitivity, step, 300_000)
    reach = 6 * sensitivity + int(40 * scale)
    assert shape_p(noise, masses(scale, sensitivity, step, reach)) > LEAST_P
    if sensitivity < 6 * scale:  # a second step has mass enough to be seen
        assert shape_p(noise, masses(0.8 * scale, sensitivity, step, reach)) < LEAST_P
    other = step - 1 if step > 1 else step + 1
    assert shape_p(noise, masses(scale, sensitivity, other, reach)) < LEAST_P


@settings(max_examples=60)
@given(
    word=st.integers(0, 2**63 - 1) | st.integers(0, 63).map(lambda k: (1 << k) - 1),
    sensitivity=st.integers(1, 2**40),
    fall=st.floats(0.05, 30.0),
    part=st.floats(0.0, 1.0),
)
def test_float_errors_are_within_what_is_allowed(
    word: int, sensitivity: int, fall: float, part: float
) -> None:
    """At a uniform that ends with its word, a quarter of the errors is enough."""
    scale, step = sensitivity / fall, max(1, int(part * sensitivity))
    seen = list[tuple[Float64, Float64]]()
    with mock.patch.object(
        oneshot, "_floor", side_effect=lambda estimates, error, _: seen.append((estimates, error))
    ):
        shot, names = object.__new__(OneShot), np.zeros((1, 2), np.uint64)
        shot._node = mock.Mock(blocks=lambda _: np.array([(word, 0)], np.uint64))
        with pytest.raises(TypeError):  # nothing is floored
            shot._stairs(names, np.array([scale]), sensitivity, step)
    with precision(2000):
        tail, wide = (flint.arb(word) + flint.arb("0.5")) / flint.arb(2) ** 64, flint.arb(scale)
        q = (-flint.arb(sensitivity) / wide).exp()
        half = (step + (sensitivity - step) * q) / (1 - q)
        weight, blocks = tail * (2 * half - 1), 0
        while weight <= half * q ** (blocks + 1):
            blocks += 1
        left = half - weight / q**blocks
        within = left if left < step else step + (left - step) / q
        exact = blocks * sensitivity + within
        estimate, error = (float(x[0]) for x in seen[0])
        assert float(abs(exact - estimate)) <= error / 4 + 2.0**-52 * abs(estimate)


def test_balls_decide_what_floats_leave_open(ring: KeyRing) -> None:
    """With errors claimed far larger, more is settled and nothing changes."""
    plain = drawn(ring, 40.0, 300, 80, 20_000)
    calls = mock.Mock(side_effect=settle)
    with mock.patch.multiple(oneshot, STAIRS_ERROR=2.0**-20, settle=calls):
        assert (drawn(ring, 40.0, 300, 80, 20_000) == plain).all()
    assert calls.call_count > 0


def test_edges_are_settled_from_both_sides() -> None:
    law, bits = DiscreteStaircaseLaw(3.0, 8, 3), 64 + 2 * 128

    def of(value: int) -> int:
        return settle(law, lambda further: (value >> (256 - 128 * further), 64 + 128 * further))

    full = (1 << bits) - 1
    with precision(800):
        for k, tail in enumerate(itertools.islice(law.lower(), 30), 1):
            edge = int((tail * flint.arb(2) ** bits).floor().unique_fmpz())
            assert (of(edge - 2**70), of(edge + 2**70)) == (-k, 1 - k)
            assert (of(full - edge + 2**70), of(full - edge - 2**70)) == (k, k - 1)


def test_other_steps_or_scales_are_other_noise(ring: KeyRing) -> None:
    """One uniform under two laws would be noise that can be solved for."""
    plain = drawn(ring, 25.0, 60, 20, 20_000)
    others = [
        drawn(ring, 25.0, 61, 20, 20_000), drawn(ring, 25.0, 60, 21, 20_000),
        drawn(ring, 25.0 + 2.0**-40, 60, 20, 20_000),
        drawn(ring, 25.0, 60, 20, 20_000, (RUN[0], b"other")),
    ]  # fmt: skip
    for other in others:
        assert abs(np.corrcoef(plain, other)[0, 1]) < 0.04


@pytest.mark.parametrize(
    ("scale", "sensitivity", "step"), [(1.0, 0, 1), (1.0, 5, 0), (1.0, 5, 6), (1.0, 40, 3)]
)
def test_refused(ring: KeyRing, scale: float, sensitivity: int, step: int) -> None:
    for count in (0, 3):
        with pytest.raises(ValueError):
            drawn(ring, scale, sensitivity, step, count)
