"""A sum beside a mean: what it is made from, its value and its sd."""

import msgspec
import numpy as np
import pytest

from dpstream.accounting.aggregates import derived_sums, streams_of
from dpstream.accounting.aggregates.base import COUNT, Prefix, Prefixes
from dpstream.accounting.aggregates.derived import with_derived
from dpstream.accounting.aggregates.sum import Sum
from dpstream.accounting.fields import Aggregate

MEAN = Aggregate("level", "mean", "x", (-2.0, 9.0), 0.5)  # -4 to 18 in grid units, middle 7
TOTAL = Aggregate("total", "sum", "x", (-2.0, 9.0), 0.5)


def test_the_sum_of_every_record_is_the_centred_sum_and_the_middle_of_each() -> None:
    """Also of clamps whose middle is no whole number of grid units."""
    rng = np.random.default_rng(4)
    for low, high in ((-2.0, 9.0), (0.0, 4.5), (-7.0, -1.5), (-3.0, 3.0)):
        mean, total = (msgspec.structs.replace(a, bounds=(low, high)) for a in (MEAN, TOTAL))
        (made,) = derived_sums((total, mean))
        values = rng.integers(round(low * 2), round(high * 2) + 1, 50)
        sums = {
            "level": np.array([float((values - made.middle).sum())]),
            COUNT: np.array([50.0]),
        }
        streams = {name: Prefix(None, value, np.array(0.0)) for name, value in sums.items()}
        prefixes = with_derived(streams, (made,))
        assert prefixes["total"].values.tolist() == [float(values.sum())]
        released, sd = Sum().release(total, Prefixes(prefixes, None))
        assert released.tolist() == [values.sum() * 0.5] and sd.tolist() == [0.0]


def test_its_sd_is_that_of_both_noises() -> None:
    """Monte Carlo, and the formula; one for all values or one for each."""
    (made,) = derived_sums((MEAN, TOTAL))
    rng, size = np.random.default_rng(1), 400_000
    own, counted = 30 * rng.standard_normal(size), 5 * rng.standard_normal(size)
    streams = {
        "level": Prefix(None, own, np.array(30.0)), COUNT: Prefix(None, counted, np.array(5.0)),
    }  # fmt: skip
    prefix = made.prefix(streams)
    assert float(prefix.sd) == pytest.approx(np.hypot(30, 7 * 5), rel=1e-12)
    assert float(prefix.sd) >= np.hypot(30, 7 * 5) * (1 - 1e-15)
    assert prefix.values.std() == pytest.approx(float(prefix.sd), rel=0.01)
    each = {n: Prefix(None, own[:2], np.array([3.0, 4.0])) for n in ("level", COUNT)}
    assert made.prefix(each).sd == pytest.approx(np.array([3.0, 4.0]) * np.sqrt(50))


@pytest.mark.parametrize(
    "change",
    [
        {"column": "y"},
        {"bounds": (-2.0, 9.5)},
        {"grid": 0.25},
        {"grid": 0.25, "bounds": (-1.0, 4.5)},
        {"share": 2.0},
    ],
)
def test_other_numbers_or_a_share_of_its_own_are_measured(change: dict[str, object]) -> None:
    other = msgspec.structs.replace(TOTAL, **change)
    assert derived_sums((MEAN, other)) == ()
    assert [s.name for s in streams_of((MEAN, other))] == [COUNT, "level", "total"]


def test_bounds_that_are_the_same_on_the_grid_are_the_same() -> None:
    near = msgspec.structs.replace(TOTAL, bounds=(-2.2, 9.4))
    (made,) = derived_sums((near, MEAN))
    assert (made.name, made.mean, made.middle) == ("total", "level", 7)
    assert made.stream.mid == 0 and made.stream.sensitivity == 18
    assert [s.name for s in streams_of((near, MEAN), {"total"})] == [COUNT, "level"]


def test_a_mean_is_needed() -> None:
    assert derived_sums((TOTAL, Aggregate("n", "count"))) == ()
