"""Tallies of the first hours: neighbours, sampled values, named noise, and sabotaged variants."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
from scipy import stats

from dpstream.accounting.arrays import Int64
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.tuning.question import (
    CONTRIBUTIONS,
    Histogram,
    Question,
    TunedColumn,
    design,
    encoder_matrix,
)
from dpstream.dp_transforms.decision import open_windows
from dpstream.dp_transforms.ingest.records import Canonicaliser
from dpstream.dp_transforms.noise.oneshot import OneShot
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.tuning import Tally, noisy
from dpstream.state.idtable import IdTable
from tests.fixed import held_noise
from tests.streams import MEAN, STEP, SUM, Stream, generate, make_plan

RUN = (b"\x22" * 16, b"question")
LEAST_P = 1e-6
FIRST = 7


def question(plan: Plan, per_unit: int) -> Question:
    columns = tuple(TunedColumn(a.name, *a.grid_bounds()) for a in plan.aggregates)
    return Question(FIRST * STEP, 1.0, 1e-6, 0.9, None, 50, "3", 0.05, per_unit, columns)


def first_hours(plan: Plan) -> Plan:
    line = msgspec.structs.replace(plan.timeline, end=plan.timeline.start + FIRST * STEP)
    return msgspec.structs.replace(plan, timeline=line)


def tallied(
    plan: Plan, ring: KeyRing, stream: Stream, per_unit: int = 1, rows: int = 97, name: bytes = b""
) -> list[Int64]:
    """Exact histograms of a stream's first hours."""
    short = first_hours(plan)
    ingest = Canonicaliser(short, ring)
    tally = Tally(short, ring, (*RUN, name), design(question(plan, per_unit)).histograms, per_unit)
    for batch in stream.batches(rows):
        tally.add(ingest(batch)[0])
    return tally.counts()


PLANS = {
    "sums and means": make_plan(aggregates=(SUM, MEAN)),
    "sliding, stamps, lateness": make_plan(
        aggregates=(SUM,), slide=4, lateness=4, stamped=True, skew=STEP
    ),
    "periods": make_plan(aggregates=(MEAN,), period=3),
}


# --- neighbours ------------------------------------------------------------------------------


def breaches(ring: KeyRing, plan: Plan, seed: int, per_unit: int) -> set[str]:
    """Rules broken on D' = D plus all records of one unit (positions kept)."""
    stream = generate(plan, seed, users=60, records=700, heavy=True)
    gone = seed % 2 * (seed % 60)  # the heavy user every other time
    without = stream.take(np.flatnonzero(stream.user != gone))
    more, fewer = tallied(plan, ring, stream, per_unit), tallied(plan, ring, without, per_unit)
    units = 1
    if plan.timeline.period is not None:  # a user is a unit for each period
        units = -(-FIRST * STEP // plan.timeline.period)
    out = set()
    for of, after, before in zip(
        design(question(plan, per_unit)).histograms, more, fewer, strict=True
    ):
        moved = after - before
        most = units * (1 if of.name == CONTRIBUTIONS else per_unit)
        if (moved < 0).any() or moved.sum() > most:
            out.add(f"cells: {of.name}")
        if np.sqrt(((encoder_matrix(of.cells) @ moved) ** 2).sum()) > units * of.sensitivity:
            out.add("sensitivity")
    return out


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("per_unit", [1, 4])
def test_neighbours_move_within_the_bound(ring: KeyRing, name: str, per_unit: int) -> None:
    for seed in range(6):
        assert breaches(ring, PLANS[name], seed, per_unit) == set()


@contextlib.contextmanager
def unit_per_batch() -> Iterator[None]:
    """A unit is forgotten from batch to batch and counted again."""
    real = IdTable.intern

    def intern(table: IdTable, queries: object) -> Int64:
        table._table[:] = -1
        return real(table, queries)  # type: ignore[arg-type]

    with mock.patch.object(IdTable, "intern", intern):
        yield


@contextlib.contextmanager
def every_value() -> Iterator[None]:
    """More values of a unit are counted than the noise is made for."""
    real = Tally.__init__

    def init(tally: Tally, *args: Any) -> None:
        real(tally, *(*args[:-1], 64))

    with mock.patch.object(Tally, "__init__", init):
        yield


@contextlib.contextmanager
def cells_by_pairs() -> Iterator[None]:
    """Pairs, not units, are counted in the histogram of pairs per unit."""
    real = Tally.counts

    def counts(tally: Tally) -> list[Int64]:
        tallies = real(tally)
        tallies[0] = tallies[0] * np.arange(1, len(tallies[0]) + 1)
        return tallies

    with mock.patch.object(Tally, "counts", counts):
        yield


@pytest.mark.parametrize("sabotage", [unit_per_batch, every_value, cells_by_pairs])
def test_sabotaged_tallies_are_caught(ring: KeyRing, sabotage: object) -> None:
    plan = PLANS["sums and means"]
    assert not any(breaches(ring, plan, seed, 1) for seed in range(4))
    with sabotage():  # type: ignore[operator]
        assert any(breaches(ring, plan, seed, 1) for seed in range(4))


# --- what is counted -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLANS)
def test_pairs_equal_a_plain_count(ring: KeyRing, name: str) -> None:
    plan = PLANS[name]
    stream, timeline = generate(plan, 9, users=80, heavy=True), plan.timeline
    inside = (stream.event >= timeline.start) & (stream.event < timeline.start + FIRST * STEP)
    inside &= (stream.stamp < timeline.start + FIRST * STEP) & timeline.on_time(
        stream.event, stream.stamp
    )
    inside &= ~timeline.period_closed(stream.event, stream.stamp)
    rows = stream.take(np.flatnonzero(inside))
    event_trigger_time = timeline.trigger_time_of(rows.event)
    _, windows = open_windows(
        timeline,
        event_trigger_time,
        np.maximum(event_trigger_time, np.maximum(1, timeline.trigger_time_of(rows.stamp))),
    )
    per_unit: dict[tuple[int, int], int] = {}
    for unit in zip(rows.user, timeline.period_of(rows.event), windows, strict=True):
        per_unit[unit[:2]] = per_unit.get(unit[:2], 0) + int(unit[2])
    counts = tallied(plan, ring, stream)[0]
    of = design(question(plan, 1)).histograms[0]
    pairs = np.array([n for n in per_unit.values() if n])
    expected = np.bincount(np.searchsorted(of.candidates, pairs), minlength=of.cells)
    assert counts.tolist() == expected.tolist() and counts.sum() > 20


def test_batches_and_order_do_not_matter(ring: KeyRing) -> None:
    plan = PLANS["sums and means"]
    stream = generate(plan, 4, users=50)
    reference = tallied(plan, ring, stream, 3, rows=10_000)
    for rows in (1, 13, 500):
        again = tallied(plan, ring, stream, 3, rows=rows)
        assert all((a == b).all() for a, b in zip(reference, again, strict=True))
    reverse = tallied(plan, ring, stream.take(np.arange(len(stream))[::-1]), 3)
    assert all((a == b).all() for a, b in zip(reference, reverse, strict=True))
    assert reference[1].sum() <= 3 * 50


def one_each(users: int, records: int, plan: Plan) -> Stream:
    """Each user sends ``records`` records with values 0 .. records - 1, in that order."""
    user = np.repeat(np.arange(users), records)
    value = np.tile(np.arange(records), users).astype(np.float64)
    time = np.full(len(user), plan.timeline.start)
    row = np.arange(len(user))
    return Stream(user, user * 0, time, time, value, row * 0, row)


def sample_p(ring: KeyRing, counts: Int64, users: int) -> float:
    return float(stats.chisquare(counts[1:6], np.full(5, users / 5)).pvalue)


def test_the_sampled_value_is_any_of_the_units_records_alike(ring: KeyRing) -> None:
    """Not the first: the first value of a unit is special (so is a first-record clamp)."""
    plan = make_plan(aggregates=(msgspec.structs.replace(SUM, bounds=(-1.0, 4.0), grid=1.0),))
    users = 3000
    stream = one_each(users, 5, plan)
    counts = tallied(plan, ring, stream, rows=4000)[1]
    assert counts.sum() == users
    assert sample_p(ring, counts, users) > LEAST_P
    first = np.bincount(np.full(users, 1), minlength=6)
    assert sample_p(ring, first, users) < LEAST_P
    # Coins belong to the run: another one picks others, the same one the same.
    other = tallied(plan, ring, stream, rows=4000, name=b"other")[1]
    assert other.tolist() != counts.tolist()
    assert tallied(plan, ring, stream, rows=4000)[1].tolist() == counts.tolist()


# --- noise ----------------------------------------------------------------------------------------


def many(ring: KeyRing, histogram: Histogram, runs: int) -> Int64:
    """(runs, nodes) noise of as many runs."""
    none = np.zeros(histogram.cells, np.int64)
    names = ((i.to_bytes(16, "little"), b"question") for i in range(runs))
    return np.array([noisy(ring, name, [histogram], [none])[0] for name in names])


def scale_p(noise: Int64, sigma: float) -> float:
    """Two-sided p-value of the variance of a rounded Gaussian of sd sigma."""
    statistic = float((noise.astype(np.float64) ** 2).sum()) / (sigma**2 + 1 / 12)
    return float(
        2 * min(stats.chi2.cdf(statistic, noise.size), stats.chi2.sf(statistic, noise.size))
    )


OF = design(
    Question(STEP, 1.0, 1e-6, 0.9, None, 50, "3", 0.05, 1, (TunedColumn("m", -20, 60),))
).histograms


@pytest.mark.parametrize("index", [0, 1])
def test_noise_has_the_stated_scale_and_sabotaged_noise_does_not(ring: KeyRing, index: int) -> None:
    of = OF[index]
    noise = many(ring, of, 150)
    assert scale_p(noise, of.sigma) > LEAST_P
    assert stats.kstest(noise.ravel() / of.sigma, "norm").pvalue > 1e-4
    corr = np.asarray(np.corrcoef(noise.T))
    assert np.abs(corr - np.eye(len(corr))).max() < 6 / np.sqrt(150)
    real = OneShot.rounded_gaussian
    half = mock.patch.object(
        OneShot, "rounded_gaussian", lambda shot, items, sigma: real(shot, items, sigma / 2)
    )
    with half:
        assert scale_p(many(ring, of, 150), of.sigma) < LEAST_P


def test_noise_is_named_by_run_question_and_histogram(ring: KeyRing) -> None:
    of = OF[1]
    counts = np.arange(of.cells)
    exact = encoder_matrix(of.cells) @ counts
    first = noisy(ring, RUN, [of], [counts])[0]
    assert (noisy(ring, RUN, [of], [counts])[0] == first).all()
    with held_noise():
        moved = noisy(ring, RUN, [of], [counts])[0] - noisy(ring, RUN, [of], [0 * counts])[0]
    assert (moved == exact).all()
    others = [
        noisy(ring, RUN, [of], [0 * counts])[0] + exact,
        noisy(ring, (b"\x23" * 16, RUN[1]), [of], [counts])[0],
        noisy(ring, (RUN[0], b"other"), [of], [counts])[0],
        noisy(ring, RUN, [msgspec.structs.replace(of, name="k")], [counts])[0],
        noisy(KeyRing(b"\x12" * 32), RUN, [of], [counts])[0],
    ]
    for other in others:
        assert (other == first).mean() < 0.2


def test_almost_no_noise_at_a_huge_epsilon(ring: KeyRing) -> None:
    made = design(Question(STEP, 1000.0, 1e-6, 0.9, None, 50, "3", 0.05, 1))
    counts = np.arange(made.histograms[0].cells)
    out = noisy(ring, RUN, [made.histograms[0]], [counts])[0]
    assert (out == encoder_matrix(len(counts)) @ counts).all()
