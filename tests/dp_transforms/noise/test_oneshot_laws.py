"""One-shot draws of laws with further numbers: references, exact decisions, shape, names."""

import itertools
import struct
from collections.abc import Callable
from typing import Any
from unittest import mock

import flint
import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpstream.accounting.arrays import Float64, Ids, Int64
from dpstream.accounting.balls import precision
from dpstream.accounting.mechanisms.laws import (
    DiscreteStaircaseLaw,
    Law,
    TruncatedGeometricLaw,
    settle,
)
from dpstream.accounting.mechanisms.optimum import SelectionOptimum
from dpstream.dp_transforms.noise import oneshot
from dpstream.dp_transforms.noise.oneshot import OneShot, numbered
from dpstream.dp_transforms.noise.prf import KeyRing
from tests.dp_transforms.reference import LEAST_P, shape_p
from tests.fixed import INPUTS

RUN = (b"\x22" * 16, b"question")
#: The scale of each law, and then sensitivity and step of a staircase, the largest size of a cut.
Numbers = tuple[float, ...]
STAIRS: list[Numbers] = [(2.0, 5, 2), (1.5, 7, 1), (9.0, 12, 12), (0.5, 6, 2), (30.0, 100, 31)]
CUTS: list[Numbers] = [(0.3, 1), (1.0, 12), (3.7, 9), (60.0, 1200), (60.0, 20)]
EVERY = pytest.mark.parametrize(
    ("law", "numbers"),
    [*(("staircase", each) for each in STAIRS), *(("truncated geo", each) for each in CUTS)],
)


def drawn(
    ring: KeyRing, law: str, numbers: Numbers, count: int, run: tuple[bytes, bytes] = RUN
) -> Int64:
    shot, rest = OneShot(ring, run, INPUTS), [int(number) for number in numbers[1:]]
    if law == "staircase":
        return shot.staircase(numbered(count), numbers[0], *rest)
    noise, sooner = shot.truncated_geometric(numbered(count), numbers[0], *rest)
    assert not sooner.any()
    return noise


def weights(law: str, numbers: Numbers, reach: int = 0) -> list[Any]:
    """Of the sizes 0, 1, ..; those of a staircase up to ``reach``."""
    scale, first, *step = numbers
    if law == "truncated geo":
        return [mpmath.exp(-z / mpmath.mpf(scale)) for z in range(int(first) + 1)]
    q = mpmath.exp(-mpmath.mpf(first) / mpmath.mpf(scale))
    return [q ** (z // int(first) + (z % int(first) >= step[0])) for z in range(reach + 1)]


def masses(law: str, numbers: Numbers) -> Float64:
    reach = 6 * int(numbers[1]) + int(40 * numbers[0])
    half = np.array(weights(law, numbers, reach), float)
    both = np.concatenate([half[:0:-1], half])
    return np.asarray(both / both.sum())


@EVERY
def test_draws_are_the_inverse_of_the_law(ring: KeyRing, law: str, numbers: Numbers) -> None:
    """The name is a CBC-MAC, and Z the place of its uniform in the law's sums."""
    own = struct.pack("<qq", *map(int, (*numbers[1:], 0)[:2]))
    prefix = ring.name((b"one-shot noise", law.encode(), own, *RUN, INPUTS))
    bits = int(np.float64(numbers[0]).view(np.uint64))
    with mpmath.workdps(60):
        weight = weights(law, numbers, 2 * int(numbers[1]) + int(50 * numbers[0]))
        tails = list(itertools.accumulate(weight[:0:-1]))[::-1]  # P[Z <= -1] first
        sums = [tail / (2 * mpmath.fsum(weight) - 1) for tail in tails]
    for item, value in enumerate(drawn(ring, law, numbers, 60).tolist()):
        message = np.array([(3, 0), prefix, (item, 0), (bits, 1)], np.uint64)
        name = ring.tweak.mac(message, np.array([4]))
        word = int(ring.node.blocks(name)[0, 0])
        uniform = (mpmath.mpf(min(word, 2**64 - 1 - word)) + mpmath.mpf("0.5")) / 2**64
        size = sum(bool(uniform <= tail) for tail in sums)
        assert value == (size if word >= 2**63 else -size)


@EVERY
def test_shapes_and_ends(law: str, numbers: Numbers) -> None:
    noise = drawn(KeyRing(b"\x09" * 32), law, numbers, 300_000)
    scale, first, *step = numbers
    if step:
        others: list[Numbers] = [(scale, first, step[0] - 1 if step[0] > 1 else step[0] + 1)]
        seen = first < 6 * scale  # a second step has mass enough
    else:
        assert np.abs(noise).max() <= first
        others = [(scale, first + 3)] if first < 4 * scale else []  # the ends have
        seen = scale > 0.5
    others += [(0.8 * scale, *numbers[1:])] if seen else []
    assert shape_p(noise, masses(law, numbers)) > LEAST_P
    assert all(shape_p(noise, masses(law, other)) < LEAST_P for other in others)


@pytest.mark.parametrize(
    ("law", "numbers"), [("staircase", (40.0, 300, 80)), ("truncated geo", (40.0, 300))]
)
def test_balls_decide_what_floats_leave_open(ring: KeyRing, law: str, numbers: Numbers) -> None:
    """With errors claimed far larger, more is settled and nothing changes."""
    plain, calls = drawn(ring, law, numbers, 20_000), mock.Mock(side_effect=settle)
    wide: dict[str, Any] = {"LOG_ERROR": 2.0**-20, "STAIRS_ERROR": 2.0**-20, "settle": calls}
    with mock.patch.multiple(oneshot, **wide):
        assert (drawn(ring, law, numbers, 20_000) == plain).all()
    assert calls.call_count > 0


@pytest.mark.parametrize(
    ("law", "numbers", "others"),
    [
        ("staircase", (25.0, 60, 20), [(25.0, 61, 20), (25.0, 60, 21), (25.0 + 2.0**-40, 60, 20)]),
        ("truncated geo", (25.0, 600), [(25.0, 601), (25.0 + 2.0**-40, 600)]),
    ],
)
def test_other_numbers_are_other_noise(
    ring: KeyRing, law: str, numbers: Numbers, others: list[Numbers]
) -> None:
    """One uniform under two laws would be noise that can be solved for."""
    plain = drawn(ring, law, numbers, 20_000)
    noises = [drawn(ring, law, other, 20_000) for other in others]
    noises.append(drawn(ring, law, numbers, 20_000, (RUN[0], b"other")))
    noises.append(OneShot(ring, RUN, INPUTS).discrete_laplace(numbered(20_000), 25.0))
    for noise in noises:
        assert abs(np.corrcoef(plain, noise)[0, 1]) < 6 / np.sqrt(plain.size)
    assert (drawn(ring, law, numbers, 20_000) == plain).all()


BEYOND: list[tuple[str, Numbers]] = [
    *(("staircase", each) for each in ((1.0, 0, 1), (1.0, 5, 0), (1.0, 5, 6), (1.0, 40, 3))),
    *(
        ("truncated geo", each)
        for each in (
            (0.0, 3), (2.0**41, 3), (float("nan"), 3), (1.0, 0), (1.0, 1 << 61),
            (1.0, 1, 1), (1.0, 2, 1 << 32), (1.0, 2, -1),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("law", "numbers"), BEYOND)
def test_numbers_outside_their_range_are_refused(ring: KeyRing, law: str, numbers: Numbers) -> None:
    for count in (0, 3):
        with pytest.raises(ValueError):
            drawn(ring, law, numbers, count)


def test_known_answers() -> None:
    """Under a fixed key: an answer that was begun before must be given again to the bit."""
    ring = KeyRing(bytes(range(32)))
    noise = [int(drawn(ring, "truncated geo", numbers, 3)[2]) for numbers in CUTS]
    assert noise == [0, 2, 1, 18, 18]


# --- exact decisions -----------------------------------------------------------------------------

BITS = 64 + 2 * 128
FULL = (1 << BITS) - 1


def place(law: Law, value: int) -> int:
    """What a uniform of 320 bits is settled as."""
    return settle(law, lambda further: (value >> (256 - 128 * further), 64 + 128 * further))


@pytest.mark.parametrize(("scale", "most"), [(0.3, 1), (1.0, 3), (3.7, 30), (1e6, 10**7)])
def test_edges_and_ends_of_a_cut_are_settled_from_both_sides(scale: float, most: int) -> None:
    law, q = TruncatedGeometricLaw(scale, most), mpmath.mpf
    ends = 1 << 100, FULL - (1 << 100), FULL >> 1
    assert [place(law, end) for end in ends] == [-most, most, 0]
    with mpmath.workdps(140):
        ratio = mpmath.exp(-1 / q(scale))
        total = 1 + ratio - 2 * ratio ** (most + 1)
        for at in {1, min(2, most), most}:
            edge = int((ratio**at - ratio ** (most + 1)) / total * q(2) ** BITS)
            settled_alike(law, at, edge)


def test_edges_of_stairs_are_settled_from_both_sides() -> None:
    law = DiscreteStaircaseLaw(3.0, 8, 3)
    with precision(800):
        for at, tail in enumerate(itertools.islice(law.lower(), 30), 1):
            settled_alike(law, at, int((tail * flint.arb(2) ** BITS).floor().unique_fmpz()))


def settled_alike(law: Law, at: int, edge: int) -> None:
    assert (place(law, edge - 2**70), place(law, edge + 2**70)) == (-at, 1 - at)
    assert (place(law, FULL - edge + 2**70), place(law, FULL - edge - 2**70)) == (at, at - 1)


WORDS = st.integers(0, 2**63 - 1) | st.integers(0, 63).map(lambda k: (1 << k) - 1)


def estimate_of(inverse: Callable[..., object], word: int, *numbers: Any) -> tuple[float, float]:
    """The float before it is floored, and its announced error, of a uniform that begins so."""
    with mock.patch.object(oneshot, "_floor") as floor:
        inverse(np.array([word], np.uint64), np.array(numbers[:1]), *numbers[1:])
    estimate, error, _ = floor.call_args.args
    return float(estimate[0]), float(error[0])


@settings(max_examples=60)
@given(word=WORDS, scale=st.floats(2.0**-3, 2.0**40), scales=st.floats(0.01, 700))
def test_float_errors_of_cuts_are_a_quarter_of_what_is_allowed(
    word: int, scale: float, scales: float
) -> None:
    most = max(1, int(scale * scales))
    estimate, _ = estimate_of(oneshot.inverse_truncated, word, scale, most)
    with precision(2000):
        tail, wide = (flint.arb(word) + flint.arb("0.5")) / flint.arb(2) ** 64, flint.arb(scale)
        ratio = (-1 / wide).exp()
        beyond = (-flint.arb(most + 1) / wide).exp()
        exact = -wide * (tail * (1 + ratio - 2 * beyond) + beyond).log()
        assert float(abs(exact - flint.arb(estimate)) / wide) < oneshot.LOG_ERROR / 4


@settings(max_examples=60)
@given(
    word=WORDS,
    sensitivity=st.integers(1, 2**40),
    fall=st.floats(0.05, 30.0),
    part=st.floats(0.0, 1.0),
)
def test_float_errors_of_stairs_are_within_what_is_allowed(
    word: int, sensitivity: int, fall: float, part: float
) -> None:
    """At a uniform that ends with its word, a quarter of the errors is enough."""
    scale, step = sensitivity / fall, max(1, int(part * sensitivity))
    estimate, error = estimate_of(oneshot.inverse_stairs, word, scale, sensitivity, step)
    with precision(2000):
        tail, wide = (flint.arb(word) + flint.arb("0.5")) / flint.arb(2) ** 64, flint.arb(scale)
        q = (-flint.arb(sensitivity) / wide).exp()
        half = (step + (sensitivity - step) * q) / (1 - q)
        weight, blocks = tail * (2 * half - 1), 0
        while weight <= half * q ** (blocks + 1):
            blocks += 1
        missing = half - weight / q**blocks
        within = missing if missing < step else step + (missing - step) / q
        exact = blocks * sensitivity + within
        assert float(abs(exact - estimate)) <= error / 4 + 2.0**-52 * abs(estimate)


# --- a coin, and the optimum of a selection ------------------------------------------------------


def test_a_coin_takes_one_less_and_is_drawn_apart() -> None:
    ring, items = KeyRing(b"\x09" * 32), numbered(300_000)
    shot = OneShot(ring, RUN, INPUTS)
    noise, sooner = shot.truncated_geometric(items, 3.0, 4, 3 << 30)
    assert abs(sooner.mean() - 0.75) < 5 * np.sqrt(0.1875 / 300_000)
    for less, most in ((1, 3), (0, 4)):
        mine = noise[sooner == less]
        assert np.abs(mine).max() == most
        assert shape_p(mine, masses("truncated geo", (3.0, most))) > LEAST_P
    with mock.patch.object(oneshot, "_AT_ONCE", 7):
        again = shot.truncated_geometric(items[:100], 3.0, 4, 3 << 30)
    assert (again[0] == noise[:100]).all() and (again[1] == sooner[:100]).all()
    other = shot.truncated_geometric(items, 3.0, 4, (3 << 30) + 1)[0]
    assert abs(np.corrcoef(noise, other)[0, 1]) < 6 / np.sqrt(noise.size)


@pytest.mark.parametrize(("epsilon", "delta"), [(1.0, 1e-3), (0.4, 1e-9), (2.0, 0.2)])
def test_least_counts_have_the_chances_of_the_optimum(epsilon: float, delta: float) -> None:
    """P[M <= n] = p_n, each within 5 sds of chance; another epsilon or delta has other uniforms."""
    items, optimum = numbered(200_000), SelectionOptimum(epsilon, delta)
    shot = OneShot(KeyRing(b"\x09" * 32), RUN, INPUTS)
    least = shot.least_counts(items, optimum)
    grown, chance = np.exp(epsilon), 0.0
    for n in range(1, len(optimum.edges) + 2):
        chance = min(grown * chance + delta, 1 - (1 - chance - delta) / grown, 1.0)
        error = np.sqrt(max(chance * (1 - chance), 1e-9) / items.shape[0])
        assert abs((least <= n).mean() - chance) <= 5 * error + 1e-12
    assert (shot.least_counts(items, optimum) == least).all()
    differs = shot.least_counts(items, SelectionOptimum(epsilon, delta * (1 + 2**-40)))
    assert abs(np.corrcoef(least, differs)[0, 1]) < 6 / np.sqrt(items.shape[0])


def test_a_word_that_is_a_chance_is_settled(ring: KeyRing) -> None:
    """The first 64 bits are those of a chance: the further ones decide, as the optimum has it."""
    optimum, shot = SelectionOptimum(1.0, 1e-9), OneShot(ring, RUN, INPUTS)
    plain = shot.least_counts(numbered(3), optimum)
    calls = mock.Mock(side_effect=[7, 8, 9])
    spoiled = mock.Mock(edges=_words(ring, optimum), settle=calls)
    spoiled.epsilon, spoiled.delta = optimum.epsilon, optimum.delta
    assert sorted(shot.least_counts(numbered(3), spoiled).tolist()) == [7, 8, 9]
    assert (shot.least_counts(numbered(3), optimum) == plain).all()


def _words(ring: KeyRing, optimum: SelectionOptimum) -> Ids:
    """First words of the uniforms of items 0 .. 2, from the name's definition."""
    numbers = struct.pack("<dd", optimum.epsilon, optimum.delta)
    prefix = ring.name((b"one-shot noise", b"key optimum", numbers, *RUN, INPUTS))
    one = int(np.float64(1.0).view(np.uint64))
    blocks = [[(3, 0), prefix, (item, 0), (one, 1)] for item in range(3)]
    names = [ring.tweak.mac(np.array(each, np.uint64), np.array([4])) for each in blocks]
    return np.sort(np.array([ring.node.blocks(name)[0, 0] for name in names], np.uint64))
