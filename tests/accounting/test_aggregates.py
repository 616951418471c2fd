"""What kinds share: bounds on the grid, the sensitivity of a clamp, refusals by field."""

from typing import Any

import msgspec
import numpy as np
import pytest

from dpstream.accounting.aggregates import (
    AGGREGATE_KINDS,
    COUNT,
    Count,
    Exact,
    Mean,
    Prefix,
    Prefixes,
    Sum,
    Units,
    bounded_stream,
    check,
    derived_sums,
    needs_bounds,
    own_prefix,
    quotient,
    streams_of,
    with_derived,
)
from dpstream.accounting.fields import Aggregate
from dpstream.accounting.limits import MAX_GRID_VALUE
from tests.accounting.plans import Make
from tests.golden.refusals import Refused


@pytest.mark.parametrize("kind", ["sum", "mean"])
def test_the_larger_end_of_a_clamp_is_its_sensitivity(make_plan: Make, kind: str) -> None:
    """Also where it is the lower one: a sum clamped to [-9, 3] moves by 9."""
    for bounds in ((-9.0, 3.0), (-9.0, -1.0), (-3.0, 9.0), (1.0, 9.0), (-5.0, 0.0), (-8.0, 3.0)):
        aggregate = Aggregate("v", kind, "x", bounds)  # type: ignore[arg-type]
        stream = make_plan(aggregates=(aggregate,)).design.streams[-1]
        values = range(int(bounds[0]), int(bounds[1]) + 1)
        assert stream.sensitivity == max(abs(value - stream.mid) for value in values)
        if kind == "sum":
            assert stream.mid == 0 and stream.sensitivity == max(map(abs, bounds))


@pytest.mark.parametrize(
    ("field", "column"),
    [
        ("here", {"column": None}),
        ("here", {"bounds": None}),
        ("here", {"bounds": (0.0, float("nan"))}),
        ("here", {"bounds": (float("-inf"), 1.0)}),
        ("here", {"grid": -1.0}),
        ("here", {"grid": float("inf")}),
        ("here.bounds", {"bounds": (3.0, 2.0)}),
        ("here.bounds", {"bounds": (0.0, 0.0)}),
        ("here.bounds", {"bounds": (1.2, 1.8)}),
        ("here.grid", {"bounds": (0.0, MAX_GRID_VALUE + 1.0)}),
        ("here.grid", {"bounds": (-MAX_GRID_VALUE - 1.0, 0.0)}),
    ],
)
def test_a_sum_without_public_bounds_has_no_sensitivity(
    field: str, column: dict[str, Any], refused: Refused
) -> None:
    settings = {"column": "x", "bounds": (-3.0, 9.0), "grid": 1.0, **column}
    caught = refused(lambda: needs_bounds(Aggregate("v", "sum", **settings), "here"))
    assert caught.field == field
    needs_bounds(Aggregate("v", "sum", "x", (-float(MAX_GRID_VALUE), 0.0)), "here")


@pytest.mark.parametrize("kind", AGGREGATE_KINDS)
def test_each_kind_takes_a_column_and_bounds_or_neither(kind: str, refused: Refused) -> None:
    neither: dict[str, Any] = {"name": "v", "kind": kind}
    both = {**neither, "column": "x", "bounds": (-3.0, 9.0)}
    fits, wrong = (both, neither) if AGGREGATE_KINDS[kind].bounded else (neither, both)
    check(Aggregate(**fits), 1)
    halves = [{**neither, name: both[name]} for name in ("column", "bounds")]
    for settings in (wrong, *halves):
        assert refused(lambda s=settings: check(Aggregate(**s), 1)).field == "aggregate[1]"  # type: ignore[misc]


def test_a_running_sum_moves_by_the_farther_bound_of_what_is_left() -> None:
    column = Aggregate("v", "mean", "x", (-1.0, 4.5), 0.5, share=2.0)
    stream = bounded_stream(column, 3)
    assert (stream.name, stream.column, stream.lo, stream.hi, stream.mid) == ("v", "x", -2, 9, 3)
    assert (stream.sensitivity, stream.grid, stream.share) == (6, 0.5, 2.0)
    constant = bounded_stream(Aggregate("v", "mean", "x", (4.0, 4.0)), 4)
    assert constant.sensitivity == 1 and constant.share == 1.0  # noise of sd 0 is none


def test_a_column_finds_its_own_sum() -> None:
    column = Aggregate("v", "sum", "x", (0.0, 2.0))
    stream, one = bounded_stream(column, 0), np.ones(1)
    prefix = Prefix(stream, one, one)
    assert own_prefix(column, Prefixes({"v": prefix, "w": prefix._replace(sd=2 * one)}, None)) == (
        stream,
        prefix,
    )


COLUMN = Aggregate("n", "count")
VALUES, OTHER = np.array([3.0, -1.5]), np.array([70.0, 80.0])


def test_it_is_the_shared_count() -> None:
    prefixes = Prefixes(
        {"n": Prefix(None, OTHER, OTHER), COUNT: Prefix(None, VALUES, np.array(2.0))},
        Prefix(None, OTHER, OTHER),
    )
    values, sd = Count().release(COLUMN, prefixes)
    assert values.tolist() == [3.0, -1.5] and sd.tolist() == [2.0, 2.0]
    by_trigger = Prefixes({COUNT: Prefix(None, VALUES, np.array([1.0, 4.0]))}, None)
    sds, words = Count().expected_sd(COLUMN, by_trigger)
    assert sds.tolist() == [1.0, 4.0] and words == ""


def test_exactly_it_is_the_number_of_records() -> None:
    assert Count().exact(None, Exact(VALUES, OTHER, OTHER)) is VALUES


SUM_COLUMN = Aggregate("total", "sum", "x", (-3.0, 7.0), 0.5)
SUM_VALUES = np.array([10.0, -4.0])


def test_it_is_published_in_the_columns_own_units() -> None:
    stream = Sum().own_stream(SUM_COLUMN)
    assert stream is not None and (stream.sensitivity, stream.mid) == (14, 0)
    prefixes = Prefixes({"total": Prefix(stream, SUM_VALUES, np.array(6.0))}, None)
    values, sd = Sum().release(SUM_COLUMN, prefixes)
    assert values.tolist() == [5.0, -2.0] and sd.tolist() == [3.0, 3.0]
    by_trigger = Prefixes({"total": Prefix(stream, SUM_VALUES, np.array([1.0, 4.0]))}, None)
    assert Sum().expected_sd(SUM_COLUMN, by_trigger)[0].tolist() == [0.5, 2.0]
    assert Sum().exact(stream, Exact(SUM_VALUES, None, SUM_VALUES)).tolist() == [5.0, -2.0]


def test_the_lower_bound_counts_where_it_is_the_larger() -> None:
    stream = Sum().own_stream(Aggregate("low", "sum", "x", (-9.0, 3.0)))
    assert stream is not None and stream.sensitivity == 9


UNITS_COLUMN = Aggregate("people", "units")
UNITS_VALUES, RECORDS = np.array([3.0, 5.0]), np.array([70.0, 80.0])


def test_it_is_the_count_of_units() -> None:
    records = {COUNT: Prefix(None, RECORDS, RECORDS)}
    values, sd = Units().release(
        UNITS_COLUMN, Prefixes(records, Prefix(None, UNITS_VALUES, np.array(2.5)))
    )
    assert values.tolist() == [3.0, 5.0] and sd.tolist() == [2.5, 2.5]
    by_trigger = Prefixes(records, Prefix(None, UNITS_VALUES, np.array([1.0, 4.0])))
    assert Units().expected_sd(UNITS_COLUMN, by_trigger)[0].tolist() == [1.0, 4.0]
    assert Units().exact(None, Exact(RECORDS, UNITS_VALUES, None)) is UNITS_VALUES


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


MEAN_COLUMN = Aggregate("level", "mean", "x", (-2.0, 9.0), 0.5)  # -4 to 18 in grid units, middle 7


def test_the_sum_is_centred_so_that_a_record_moves_it_by_half_the_width() -> None:
    stream = Mean().own_stream(MEAN_COLUMN)
    assert stream is not None and (stream.mid, stream.sensitivity) == (7, 11)
    odd = Mean().own_stream(Aggregate("level", "mean", "x", (0.0, 5.0)))
    assert odd is not None and (odd.mid, odd.sensitivity) == (2, 3)
    assert Mean.uses_count and Mean.divides and not Mean.counts_units


def test_a_quotient_is_not_clipped_and_tame_where_the_count_is_noise() -> None:
    totals, counts = np.array([500.0, -500.0, 20.0, 50.0, 5.0]), np.array([10.0, 10.0, 1, 2, 0.99])
    values, sd = quotient(MEAN_COLUMN, 7, totals, counts, (3.0, 2.0))
    expected = [7 + t * n / (n * n + 4) for t, n in zip(totals, counts, strict=True)]
    assert values[:4] == pytest.approx([v * 0.5 for v in expected[:4]], rel=1e-14)
    assert values[0] > 9 and values[1] < -2  # outside of the clamp
    assert np.isnan(values[4]) and np.isnan(sd[4])
    # Never more than |S| / (2 c) from the middle, where S / N is -500 or 5000.
    few = np.linspace(1, 40, 500)
    most, _ = quotient(MEAN_COLUMN, 7, np.full(500, 5000.0), few, (3.0, 2.0))
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
    values, sd = quotient(MEAN_COLUMN, 7, total, noisy_n, (11 * spread, spread))
    clipped = np.where(noisy_n >= 1, np.clip(7 + total / noisy_n, -4, 18) * 0.5, np.nan)
    typical = float(np.nanmedian(sd))
    # Of the fourth order: (c/n)^4 of the distance from the middle.
    left = 6 * abs(level - 7) * 0.5 / count**4 + 6 * typical / size**0.5
    assert abs(float(np.nanmean(values)) - level * 0.5) < left
    if abs(level - 7) == 11 and count > 3:
        assert abs(float(np.nanmean(clipped)) - level * 0.5) > 0.3 * typical


def test_the_expected_error_is_that_of_values_at_the_bounds() -> None:
    stream = Mean().own_stream(MEAN_COLUMN)
    sds = {"level": np.array([3.0, 33.0]), COUNT: np.array([4 / 11, 4.0])}
    prefixes = Prefixes({n: Prefix(stream, s, s) for n, s in sds.items()}, None)
    expected, words = Mean().expected_sd(MEAN_COLUMN, prefixes)
    assert expected == pytest.approx([5 * 0.5, 55 * 0.5]) and "number of records" in words


def test_exactly_it_is_the_quotient_and_nothing_where_there_are_no_records() -> None:
    stream = Mean().own_stream(MEAN_COLUMN)
    records, totals = np.array([4.0, 0.0]), np.array([12.0, 0.0])
    means = Mean().exact(stream, Exact(records, None, totals))
    assert means[0] == 1.5 and np.isnan(means[1])
