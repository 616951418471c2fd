"""One-shot draws: plain references, exact decisions, shapes at all sds, names, and sabotage."""

import functools
import itertools
import struct
import tracemalloc
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
    DiscreteGaussianLaw,
    DiscreteLaplaceLaw,
    DiscreteStaircaseLaw,
    Law,
    RoundedGaussianLaw,
    TruncatedGeometricLaw,
    settle,
)
from dpstream.accounting.mechanisms.optimum import SelectionOptimum
from dpstream.dp_transforms.noise import oneshot
from dpstream.dp_transforms.noise.oneshot import OneShot, numbered
from dpstream.dp_transforms.noise.prf import KeyRing
from tests.dp_transforms.reference import LEAST_P, masses, shape_p
from tests.fixed import INPUTS

RUN = (b"\x22" * 16, b"question")
LAWS: dict[str, type[Law]] = {
    "rounded_gaussian": RoundedGaussianLaw,
    "discrete_laplace": DiscreteLaplaceLaw,
}
NAMES = list(LAWS)
SCALES = (0.3, 1.0, 3.7, 60.0)


def drawn(
    ring: KeyRing, law: str, scale: Float64 | float, count: int, first: int = 0, run: object = RUN,
    inputs: bytes = INPUTS,
) -> Int64:  # fmt: skip
    shot = OneShot(ring, run, inputs)  # type: ignore[arg-type]
    noise: Int64 = getattr(shot, law)(numbered(count, first), scale)
    return noise


# --- exactness ---------------------------------------------------------------------------------


def uniform_of(
    ring: KeyRing, law: str, item: tuple[int, int], scale: float
) -> Callable[[int], tuple[int, int]]:
    """A draw's uniform from the definition: a CBC-MAC as name, its word, and further blocks."""
    prefix = ring.name((b"one-shot noise", LAWS[law].label, *RUN, INPUTS))
    bits = int(np.float64(scale).view(np.uint64))
    message = np.array([(3, 0), prefix, item, (bits, 1)], np.uint64)
    low, high = ring.tweak.mac(message, np.array([4]))[0].tolist()

    def words(block: int) -> tuple[int, int]:
        first, second = ring.node.blocks(np.array([(low, high ^ block)], np.uint64))[0].tolist()
        return first, second

    def uniform(blocks: int) -> tuple[int, int]:
        value, _ = words(0)
        for block in range(1, blocks + 1):
            first, second = words(block)
            value = value << 128 | second << 64 | first
        return value, 64 + 128 * blocks

    return uniform


@pytest.mark.parametrize("law", NAMES)
def test_draws_equal_a_plain_reference(ring: KeyRing, law: str) -> None:
    rng = np.random.default_rng(1)
    items = rng.integers(0, 2**64, (60, 2), np.uint64)
    scales = np.exp(rng.uniform(np.log(1e-3), np.log(1e9), 60))
    scales[:4] = (2.0**-10, 1.0, 7.0, 2.0**40)
    draws = getattr(OneShot(ring, RUN, INPUTS), law)(items, scales)
    for item, scale, value in zip(items.tolist(), scales.tolist(), draws.tolist(), strict=True):
        uniform = uniform_of(ring, law, tuple(item), scale)
        assert value == settle(LAWS[law](scale), uniform)  # type: ignore[call-arg]


def test_further_bits_are_the_draws_own_blocks(ring: KeyRing) -> None:
    """With errors so large that every draw is left open; the noise stays the same."""
    uniforms = list[tuple[int, int]]()

    def listening(law: Law, uniform: Callable[[int], tuple[int, int]]) -> int:
        uniforms.append(uniform(2))
        return settle(law, uniform)

    plain = drawn(ring, "discrete_laplace", 25.0, 3)
    with mock.patch.multiple(oneshot, LOG_ERROR=1e9, settle=listening):
        assert (drawn(ring, "discrete_laplace", 25.0, 3) == plain).all()
    own = [uniform_of(ring, "discrete_laplace", (item, 0), 25.0)(2) for item in range(3)]
    assert uniforms == own


def float_error(law: str, word: int, scale: float) -> float:
    """|float inverse - exact inverse| in scales, at the middle of a word's uniforms."""
    inverse = oneshot.inverse_laplace if "laplace" in law else oneshot.inverse_gaussian
    with mock.patch.object(oneshot, "_floor") as floor:
        inverse(np.array([word], np.uint64), np.array([scale]))
    estimate = floor.call_args.args[0]
    low = min(word, 2**64 - 1 - word)
    with precision(300):
        tail, wide = (flint.arb(low) + flint.arb("0.5")) / flint.arb(2) ** 64, flint.arb(scale)
        if law == "rounded_gaussian":
            exact = wide * flint.arb(2).sqrt() * (1 - 2 * tail).erfinv() + flint.arb("0.5")
        else:
            exact = wide * (-tail.log() - (1 + (-1 / wide).exp()).log())
        return float(abs(exact - flint.arb(float(estimate[0]))) / wide)


@settings(max_examples=100)
@given(
    word=st.integers(0, 2**64 - 1) | st.integers(0, 64).map(lambda k: (1 << k) - 1),
    scale=st.floats(2.0**-3, 2.0**40),
)
def test_float_errors_are_a_quarter_of_what_is_allowed(word: int, scale: float) -> None:
    # Adding a half rounds by 2^-54 of a small scale's noise; the floor of it is exact there.
    assert float_error("rounded_gaussian", word, scale) < oneshot.NORMAL_ERROR / 4
    assert float_error("discrete_laplace", word, scale) < oneshot.LOG_ERROR / 4


@pytest.mark.parametrize("law", NAMES)
def test_balls_decide_what_floats_leave_open(ring: KeyRing, law: str) -> None:
    """With errors claimed a million times larger, more is settled and nothing changes."""
    scales = np.exp(np.random.default_rng(5).uniform(np.log(0.3), np.log(1e4), 3000))
    few, many = mock.Mock(side_effect=settle), mock.Mock(side_effect=settle)
    with mock.patch.object(oneshot, "settle", few):
        plain = drawn(ring, law, scales, 3000)
    wide: dict[str, Any] = {"NORMAL_ERROR": 2.0**-20, "LOG_ERROR": 2.0**-20, "settle": many}
    with mock.patch.multiple(oneshot, **wide):
        assert (drawn(ring, law, scales, 3000) == plain).all()
    assert few.call_count <= 1 and many.call_count > 3


# --- shape --------------------------------------------------------------------------------


@functools.lru_cache(maxsize=16)
def sample(law: str, scale: float, count: int = 400_000) -> Int64:
    return drawn(KeyRing(b"\x09" * 32), law, scale, count)


@pytest.mark.parametrize("law", NAMES)
@pytest.mark.parametrize("scale", SCALES)
def test_shapes(law: str, scale: float) -> None:
    noise = sample(law, scale)
    assert shape_p(noise, masses(LAWS[law], scale)) > LEAST_P
    for other in {*LAWS.values(), DiscreteGaussianLaw} - {LAWS[law]}:
        # The two Gaussians differ by 1/12 in variance: too little to be seen at large sds.
        alike = scale > 1 and DiscreteLaplaceLaw not in (LAWS[law], other)
        assert alike or shape_p(noise, masses(other, scale)) < LEAST_P
    if scale > 0.5:
        assert shape_p(noise, masses(LAWS[law], 0.98 * scale)) < LEAST_P
        assert shape_p(noise, masses(LAWS[law], 1.02 * scale)) < LEAST_P


def moments(law: str, scale: float) -> tuple[float, float]:
    """Variance and fourth moment of a law."""
    if scale > 1000:
        if law == "discrete_laplace":
            return 2 * scale**2, 24 * scale**4
        return scale**2, 3 * scale**4
    mass = masses(LAWS[law], scale)
    k = np.arange(-(len(mass) // 2), len(mass) // 2 + 1).astype(np.float64)
    return float((mass * k**2).sum()), float((mass * k**4).sum())


def moments_fit(law: str, noise: Int64, scale: float) -> bool:
    """Mean and variance within 5 sds of chance."""
    variance, fourth = moments(law, scale)
    plain = noise.astype(np.float64)
    if abs(plain.mean()) > 5 * np.sqrt(variance / noise.size):
        return False
    return bool(
        abs((plain**2).mean() - variance) < 5 * np.sqrt((fourth - variance**2) / noise.size)
    )


@pytest.mark.parametrize("law", NAMES)
def test_moments_from_small_to_large_sds_drawn_at_once(ring: KeyRing, law: str) -> None:
    scales = np.array([0.3, 1.0, 2.9, 30.0, 900.0, 3e4, 1e6])
    count = 400_000
    noise = drawn(ring, law, np.tile(scales, count), len(scales) * count).reshape(count, -1)
    for column, scale in zip(noise.T, scales.tolist(), strict=True):
        assert moments_fit(law, column, scale)
    # 2% of the sd are seen, at every sd from 1 on.
    less = drawn(ring, law, np.tile(0.98 * scales, count), len(scales) * count).reshape(count, -1)
    for column, scale in zip(less.T[1:], scales[1:].tolist(), strict=True):
        assert not moments_fit(law, column, scale)
    corr = np.corrcoef((noise / scales).T)
    assert np.abs(corr - np.eye(len(scales))).max() < 6 / np.sqrt(count)


# --- names --------------------------------------------------------------------------------


def correlated(a: Int64, b: Int64) -> bool:
    return bool(abs(np.corrcoef(a, b)[0, 1]) > 6 / np.sqrt(a.size))


OTHERS: dict[str, Callable[[KeyRing, str], Int64]] = {
    "run": lambda ring, law: drawn(ring, law, 25.0, 20_000, run=(b"\x23" * 16, RUN[1])),
    "question": lambda ring, law: drawn(ring, law, 25.0, 20_000, run=(RUN[0], b"other")),
    "inputs": lambda ring, law: drawn(ring, law, 25.0, 20_000, inputs=bytes(16)),
    "parts joined": lambda ring, law: drawn(ring, law, 25.0, 20_000, run=(RUN[0] + RUN[1],)),
    "items": lambda ring, law: drawn(ring, law, 25.0, 20_000, first=20_000),
    "upper words": lambda ring, law: getattr(OneShot(ring, RUN, INPUTS), law)(
        numbered(20_000)[:, ::-1], 25.0
    ),
    "scale": lambda ring, law: drawn(ring, law, 25.0 + 2.0**-40, 20_000),
    "key": lambda _, law: drawn(KeyRing(b"\x12" * 32), law, 25.0, 20_000),
    "law": lambda ring, law: drawn(ring, NAMES[NAMES.index(law) - 1], 25.0, 20_000),
}


@pytest.mark.parametrize("law", NAMES)
@pytest.mark.parametrize("other", OTHERS)
def test_another_name_is_other_noise(ring: KeyRing, law: str, other: str) -> None:
    noise = drawn(ring, law, 25.0, 20_000)
    differs = OTHERS[other](ring, law)
    assert not correlated(noise[1:], differs[1:])
    assert (noise == differs)[1:].mean() < 0.05


@pytest.mark.parametrize("law", NAMES)
def test_the_same_name_is_the_same_noise_in_any_company(ring: KeyRing, law: str) -> None:
    scales = np.exp(np.random.default_rng(2).uniform(-1, 9, 1000))
    draws = drawn(ring, law, scales, 1000)
    assert (drawn(ring, law, scales, 1000) == draws).all()
    rows = np.random.default_rng(3).permutation(1000)[:300]
    shot = OneShot(ring, RUN, INPUTS)
    assert (getattr(shot, law)(numbered(1000)[rows], scales[rows]) == draws[rows]).all()
    with mock.patch.object(oneshot, "_AT_ONCE", 7):
        assert (drawn(ring, law, scales, 1000) == draws).all()
    assert not correlated(draws[1:], draws[:-1])
    assert drawn(ring, law, scales[:0], 0).size == 0


@pytest.mark.parametrize("law", NAMES)
def test_memory_does_not_grow_with_the_draws(ring: KeyRing, law: str) -> None:
    """Beyond the answer itself: a million draws take what 100,000 do."""
    shot, peaks = OneShot(ring, RUN, INPUTS), []
    for count in (100_000, 1_000_000):
        items, sds = numbered(count), np.full(count, 25.0)
        tracemalloc.start()
        noise = getattr(shot, law)(items, sds)
        peaks.append(tracemalloc.get_traced_memory()[1] - noise.nbytes)
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0] + 2_000_000  # one mask of all scales: a byte each


VECTORS = {
    "rounded_gaussian": [0, -1, 1053, 581828, -372504387264],
    "discrete_laplace": [0, 2, 1361, -2426266, 1812686368840],
}


@pytest.mark.parametrize("law", NAMES)
def test_known_answers(law: str) -> None:
    """Under a fixed key: an answer that was begun before must be given again to the bit."""
    noise = drawn(KeyRing(bytes(range(32))), law, np.array([0.3, 3.7, 1000.0, 1e6, 2.0**40]), 5)
    assert noise.tolist() == VECTORS[law]


def test_scales_outside_the_range_are_refused(ring: KeyRing) -> None:
    for law in NAMES:
        for wrong in (0.0, -1.0, float("nan"), float("inf"), 2.0**41, 2.0**-11):
            with pytest.raises(ValueError):
                drawn(ring, law, np.array([1.0, wrong]), 2)
            with pytest.raises(ValueError):  # whether there are items or not
                drawn(ring, law, wrong, 0)


# --- sabotage ------------------------------------------------------------------------------------


def sound(ring: KeyRing, law: str) -> bool:
    """The checks above in one: scale, names, independence."""
    noise, scale = drawn(ring, law, 25.0, 400_000), 25.0
    other = drawn(ring, law, 25.0, 400_000, run=(b"\x23" * 16, RUN[1]))
    return (
        moments_fit(law, noise, scale)
        and shape_p(noise, masses(LAWS[law], scale)) > LEAST_P
        and not correlated(noise, other)
        and np.unique(noise).size > 30
    )


def sabotages(law: str) -> dict[str, Any]:
    """Noise of a smaller sd; two answers with one noise; one draw for all cells."""
    honest = getattr(OneShot, law)
    return {
        "too small": mock.patch.object(OneShot, law, lambda s, i, sd: honest(s, i, 0.98 * sd)),
        "nameless": mock.patch.object(KeyRing, "name", lambda *_: np.zeros(2, np.uint64)),
        "one for all": mock.patch.object(OneShot, law, lambda s, i, sd: honest(s, 0 * i, sd)),
    }


@pytest.mark.parametrize("law", NAMES)
def test_sabotaged_draws_are_caught(ring: KeyRing, law: str) -> None:
    assert sound(ring, law)
    for sabotage in sabotages(law).values():
        with sabotage:
            assert not sound(ring, law)
    assert sound(ring, law)


# One-shot draws of laws with further numbers: references, exact decisions, shape, names.


#: The scale of each law, and then sensitivity and step of a staircase, the largest size of a cut.
Numbers = tuple[float, ...]
STAIRS: list[Numbers] = [(2.0, 5, 2), (1.5, 7, 1), (9.0, 12, 12), (0.5, 6, 2), (30.0, 100, 31)]
CUTS: list[Numbers] = [(0.3, 1), (1.0, 12), (3.7, 9), (60.0, 1200), (60.0, 20)]
EVERY = pytest.mark.parametrize(
    ("law", "numbers"),
    [*(("staircase", each) for each in STAIRS), *(("truncated geo", each) for each in CUTS)],
)


def drawn_of_law(
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


def masses_of_law(law: str, numbers: Numbers) -> Float64:
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
    for item, value in enumerate(drawn_of_law(ring, law, numbers, 60).tolist()):
        message = np.array([(3, 0), prefix, (item, 0), (bits, 1)], np.uint64)
        name = ring.tweak.mac(message, np.array([4]))
        word = int(ring.node.blocks(name)[0, 0])
        uniform = (mpmath.mpf(min(word, 2**64 - 1 - word)) + mpmath.mpf("0.5")) / 2**64
        size = sum(bool(uniform <= tail) for tail in sums)
        assert value == (size if word >= 2**63 else -size)


@EVERY
def test_shapes_and_ends(law: str, numbers: Numbers) -> None:
    noise = drawn_of_law(KeyRing(b"\x09" * 32), law, numbers, 300_000)
    scale, first, *step = numbers
    if step:
        others: list[Numbers] = [(scale, first, step[0] - 1 if step[0] > 1 else step[0] + 1)]
        seen = first < 6 * scale  # a second step has mass enough
    else:
        assert np.abs(noise).max() <= first
        others = [(scale, first + 3)] if first < 4 * scale else []  # the ends have
        seen = scale > 0.5
    others += [(0.8 * scale, *numbers[1:])] if seen else []
    assert shape_p(noise, masses_of_law(law, numbers)) > LEAST_P
    assert all(shape_p(noise, masses_of_law(law, other)) < LEAST_P for other in others)


@pytest.mark.parametrize(
    ("law", "numbers"), [("staircase", (40.0, 300, 80)), ("truncated geo", (40.0, 300))]
)
def test_balls_of_laws_decide_what_floats_leave_open(
    ring: KeyRing, law: str, numbers: Numbers
) -> None:
    """With errors claimed far larger, more is settled and nothing changes."""
    plain, calls = drawn_of_law(ring, law, numbers, 20_000), mock.Mock(side_effect=settle)
    wide: dict[str, Any] = {"LOG_ERROR": 2.0**-20, "STAIRS_ERROR": 2.0**-20, "settle": calls}
    with mock.patch.multiple(oneshot, **wide):
        assert (drawn_of_law(ring, law, numbers, 20_000) == plain).all()
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
    plain = drawn_of_law(ring, law, numbers, 20_000)
    noises = [drawn_of_law(ring, law, other, 20_000) for other in others]
    noises.append(drawn_of_law(ring, law, numbers, 20_000, (RUN[0], b"other")))
    noises.append(OneShot(ring, RUN, INPUTS).discrete_laplace(numbered(20_000), 25.0))
    for noise in noises:
        assert abs(np.corrcoef(plain, noise)[0, 1]) < 6 / np.sqrt(plain.size)
    assert (drawn_of_law(ring, law, numbers, 20_000) == plain).all()


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
            drawn_of_law(ring, law, numbers, count)


def test_known_answers_of_laws() -> None:
    """Under a fixed key: an answer that was begun before must be given again to the bit."""
    ring = KeyRing(bytes(range(32)))
    noise = [int(drawn_of_law(ring, "truncated geo", numbers, 3)[2]) for numbers in CUTS]
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
        assert shape_p(mine, masses_of_law("truncated geo", (3.0, most))) > LEAST_P
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
