"""MEAN: a centred sum over a count, within the clamp, defined where the noisy count is."""

import numpy as np
import pytest

from dpstream.accounting.aggregates.base import COUNT, Exact, Prefix, Prefixes
from dpstream.accounting.aggregates.mean import Mean, quotient, ratio
from dpstream.accounting.errors import UsageError
from dpstream.accounting.fields import Aggregate

COLUMN = Aggregate("level", "mean", "x", (-2.0, 9.0), 0.5)  # -4 to 18 in grid units, middle 7


def test_the_sum_is_centred_so_that_a_record_moves_it_by_half_the_width() -> None:
    stream = Mean().own_stream(COLUMN)
    assert stream is not None and (stream.mid, stream.sensitivity) == (7, 11)
    odd = Mean().own_stream(Aggregate("level", "mean", "x", (0.0, 5.0)))
    assert odd is not None and (odd.mid, odd.sensitivity) == (2, 3)
    assert Mean.uses_count and Mean.divides and not Mean.counts_units


def test_means_stay_within_the_clamp_and_small_counts_have_none() -> None:
    totals, counts = np.array([500.0, -500.0, 5.0, 5.0, 5.0]), np.array([10.0, 10.0, 1.0, 0.99, -3])
    values, sd = ratio(COLUMN, 7, totals, counts, (3.0, 2.0))
    assert values[:3].tolist() == [9.0, -2.0, 6.0]
    assert np.isnan(values[3:]).all() and np.isnan(sd[3:]).all() and np.isfinite(sd[:3]).all()


def test_a_quotient_is_not_clipped_and_tame_where_the_count_is_noise() -> None:
    totals, counts = np.array([500.0, -500.0, 20.0, 50.0, 5.0]), np.array([10.0, 10.0, 1, 2, 0.99])
    values, sd = quotient(COLUMN, 7, totals, counts, (3.0, 2.0))
    expected = [7 + t * n / (n * n + 4) for t, n in zip(totals, counts, strict=True)]
    assert values[:4] == pytest.approx([v * 0.5 for v in expected[:4]], rel=1e-14)
    assert values[0] > 9 and values[1] < -2  # outside of the clamp
    assert np.isnan(values[4]) and np.isnan(sd[4])
    # Never more than |S| / (2 c) from the middle, where S / N is -500 or 5000.
    few = np.linspace(1, 40, 500)
    most, _ = quotient(COLUMN, 7, np.full(500, 5000.0), few, (3.0, 2.0))
    assert np.abs(most / 0.5 - 7).max() <= 5000 / 4
    first_order = [np.hypot(3, (v - 7) * 2) / n * 0.5
                   for v, n in zip(expected[:4], counts, strict=False)]  # fmt: skip
    assert sd[:4] == pytest.approx(first_order, rel=1e-14)


@pytest.mark.parametrize("count", [3.0, 6.0, 15.0])
@pytest.mark.parametrize("level", [-4.0, 3.0, 18.0])
def test_a_mean_on_its_bound_is_not_biased(count: float, level: float) -> None:
    """Monte Carlo of the two noises, the count in sds of its noise: the mean of a million releases
    is the mean, also on a bound, and a clipped ratio is not (this test can fail)."""
    rng, size, spread = np.random.default_rng(int(count)), 1_000_000, 40.0
    n = count * spread
    noisy_n = n + spread * rng.standard_normal(size)
    total = (level - 7) * n + 11 * spread * rng.standard_normal(size)
    values, sd = quotient(COLUMN, 7, total, noisy_n, (11 * spread, spread))
    clipped, _ = ratio(COLUMN, 7, total, noisy_n, (11 * spread, spread))
    typical = float(np.nanmedian(sd))
    # Of the fourth order: (c/n)^4 of the distance from the middle.
    left = 6 * abs(level - 7) * 0.5 / count**4 + 6 * typical / size**0.5
    assert abs(float(np.nanmean(values)) - level * 0.5) < left
    if abs(level - 7) == 11 and count > 3:
        assert abs(float(np.nanmean(clipped)) - level * 0.5) > 0.3 * typical


def test_the_expected_error_is_that_of_values_at_the_bounds() -> None:
    stream = Mean().own_stream(COLUMN)
    sds = {"level": np.array([3.0, 33.0]), COUNT: np.array([4 / 11, 4.0])}
    prefixes = Prefixes({n: Prefix(stream, s, s) for n, s in sds.items()}, None)
    expected, words = Mean().expected_sd(COLUMN, prefixes)
    assert expected == pytest.approx([5 * 0.5, 55 * 0.5]) and "number of records" in words


def test_exactly_it_is_the_quotient_and_nothing_where_there_are_no_records() -> None:
    stream = Mean().own_stream(COLUMN)
    records, totals = np.array([4.0, 0.0]), np.array([12.0, 0.0])
    means = Mean().exact(stream, Exact(records, None, totals))
    assert means[0] == 1.5 and np.isnan(means[1])
    for given, total in ((None, totals), (stream, None)):
        with pytest.raises(ValueError, match="no exact sum"):
            Mean().exact(given, Exact(records, None, total))


def test_it_needs_bounds() -> None:
    with pytest.raises(UsageError) as caught:
        Mean().check(Aggregate("level", "mean", "x", (2.0, -2.0)), "aggregate[0]")
    assert caught.value.field == "aggregate[0].bounds"
