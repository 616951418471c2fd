"""Noise against what a bound cuts."""

import math

import numpy as np
import pytest

from dpstream.accounting.tuning.answer import Figures, read_off
from dpstream.accounting.tuning.question import Histogram, Question, design
from dpstream.accounting.tuning.weighing import NoiseOf, best, coverage_of, per_key
from tests.accounting.tuning.questions import but, exact

#: A heavy tail: most units have a few pairs, some have thousands.
PAIRS = np.minimum((1 / np.random.default_rng(4).random(4_000)).astype(np.int64), 5_000)


def question_with(key_records: int = 1_000) -> Question:
    """C by weighing, of pairs that are all there."""
    return but(columns=(), quantile=None, scale="1", key_records=key_records)


def noise(contributions: int, per_key_bound: int | None) -> float:
    """sds as those of a plan: with C, with sqrt(C k) under a bound per key."""
    return 3.0 * math.sqrt(contributions * min(contributions, per_key_bound or contributions))


def read(noise: NoiseOf = noise, key_records: int = 1_000) -> tuple[Histogram, Figures]:
    """The histogram of ``PAIRS``, and what is read off without noise."""
    question = question_with(key_records)
    made = design(question, private=False)
    of = made.histograms[0]
    cell = np.searchsorted(of.candidates, PAIRS)
    return of, read_off(
        question, made, [exact(of, np.bincount(cell, minlength=of.cells))], lambda _: noise
    )


def cut(bound: int, most: int = 1_000) -> float:
    """Part of all pairs beyond a bound, units with more than ``most`` counting as that."""
    return 1 - np.minimum(PAIRS, bound).sum() / np.minimum(PAIRS, most).sum()


def test_the_least_error_of_both_together() -> None:
    """Not the quantile, which is blind to noise, and far below what the tail would ask for."""
    of, figures = read()
    errors = [math.hypot(1_000 * cut(c), noise(c, None)) for c in of.candidates]
    least = of.candidates[int(np.argmin(errors))]
    assert abs(of.candidates.index(figures.contributions) - of.candidates.index(least)) <= 1
    assert 20 < figures.contributions < 200
    assert figures.cut == pytest.approx(cut(figures.contributions), abs=0.05)
    assert figures.sd == noise(figures.contributions, None)


def test_small_keys_want_a_small_bound_and_large_ones_a_large_one() -> None:
    bounds = [read(key_records=n)[1].contributions for n in (10, 1_000, 100_000)]
    assert bounds == sorted(bounds) and bounds[0] < bounds[1] / 5 < bounds[2] / 20


def test_what_cannot_be_run_is_not_taken() -> None:
    """Where the noise of a bound cannot be drawn a smaller one is weighed best."""
    _, free = read()
    _, figures = read(noise=lambda c, k: noise(c, k) if c <= free.contributions // 3 else math.inf)
    assert figures.contributions <= free.contributions // 3
    with pytest.raises(ValueError, match="no bound"):
        best(np.array([0.5, 1.0]), np.array([math.inf, math.inf]), 1_000)
    _, none = read(noise=lambda c, k: math.inf)
    assert none.sd is None and none.per_key == ()


def test_a_bound_per_key_lets_more_of_a_unit_count() -> None:
    of, figures = read()
    assert figures.cut is not None and figures.sd is not None
    own = math.hypot(1_000 * figures.cut, figures.sd)
    assert [other.bound for other in figures.per_key] == [1, 2, 4, 8, 16]
    assert all(math.hypot(1_000 * other.cut, other.sd) <= 0.95 * own for other in figures.per_key)
    for other in figures.per_key:
        assert other.contributions > figures.contributions and other.cut < figures.cut
        assert other.sd == noise(other.contributions, other.bound)
    few = [other.contributions for other in figures.per_key]
    assert few == sorted(few, reverse=True)
    bounds, part = np.array(of.candidates, np.float64), np.linspace(0.5, 1, len(of.candidates))
    assert 4 not in [o.bound for o in per_key(bounds, part, noise, 1_000, own=4, most=math.inf)]
    assert per_key(bounds, part, noise, 1_000, own=4, most=1.0) == ()


def test_what_lies_beyond_is_said() -> None:
    """The largest bound that is looked at may be too small; nobody knows what it cuts."""
    _, figures = read(key_records=4_000_000)
    assert figures.contributions == 1_000 and "--max-contributions" in figures.notes[0]
    assert read()[1].notes == ()


def test_parts_between_candidates() -> None:
    of = design(question_with(), private=False).histograms[0]
    counts = np.zeros(of.cells)
    counts[of.candidates.index(4)] = 10
    part = coverage_of(of, np.cumsum(counts))
    assert [part.at(c) for c in (0, 1, 2, 4, 900)] == [0, 0.25, 0.5, 1, 1]
