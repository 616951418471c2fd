"""Sabotaged variants of weights, combined statistics, one record per key, and real noise.

Sabotaged variants of skip, found in neighbours' streams on the outputs of one of them.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import msgspec
import numpy as np

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.limits import DECODE_BITS
from dpstream.accounting.plan.design import Design
from dpstream.accounting.plan.plan import with_privacy
from dpstream.dp_transforms import aggregation, bounding, step
from dpstream.dp_transforms.batches import ids_of, numpy_view
from dpstream.dp_transforms.noise.continuous import ContinuousGaussian
from dpstream.dp_transforms.noise.sampler import RoundedGaussian
from dpstream.state.keycounts import KeyCounts
from tests.accounting.plans import allocate_sharing
from tests.audit.sabotage import Sabotage, half_scale, replaced, with_tau
from tests.budgets import budgets, redesigned
from tests.dp_transforms.test_every_path import (
    of_one_shard,
    recomputed_by_stamp,
    refund,
    reset_by_window,
)


def _rounded_up(real: Any) -> Any:
    """The states add weights that are rounded up: their squares add up to more than 1."""

    def aggregate(plan: Any, states: Any, rows: Any, weights: Any) -> Any:
        return real(plan, states, rows, weights + 1)

    return aggregate


def _first_weight_always(real: Any) -> Any:
    """The rank is not kept: every pair counts as its unit's first."""

    def admit(*args: Any) -> Any:
        taken, rank = real(*args)
        return taken, np.zeros_like(rank)

    return admit


def _ranked_by_arrival(real: Any) -> Any:
    def admit(unit: Any, *args: Any) -> Any:
        taken, rank = real(unit, *args)
        out, seen = np.zeros_like(rank), dict[int, int]()
        for row in np.flatnonzero(taken):
            out[row] = seen.get(unit[row], 0)
            seen[unit[row]] = out[row] + taken[row]
        return taken, out

    return admit


def _weight_added_again(real: Any) -> Any:
    """A unit's later pairs in one (key, round) add their weights too."""

    def aggregate(plan: Any, states: Any, rows: Any, weights: Any) -> Any:
        before = states.values[: states.size, -1].copy()
        out = real(plan, states, rows, weights)
        slots = states.table.find(ids_of(rows.column("_id")))
        states.values[: states.size, -1] = 0
        states.values[: len(before), -1] = before
        open_ = states.selected[slots] == 0
        added = weights[numpy_view(rows.column("rank"))]
        np.add.at(states.values[:, -1], slots[open_], added[open_])
        return out

    return aggregate


def _one_more(real: Any) -> Any:
    """BOUND admits one record of a (unit, window, key) more than the accounting allows for."""

    def admit(plan: Any, *rest: Any) -> Any:
        more = msgspec.structs.replace(plan.privacy, per_key_bound=plan.privacy.per_key_bound + 1)
        return real(msgspec.structs.replace(plan, privacy=more), *rest)

    return admit


def _all_first(real: Any) -> Any:
    """Each admitted record counts its unit once more in the key."""

    def admit(*args: Any) -> Any:
        pairs, rank, per_key = real(*args)
        return pairs, rank, per_key._replace(fresh=per_key.taken)

    return admit


def _first_index(real: Any) -> Any:
    def admit(*args: Any) -> Any:
        pairs, rank, per_key = real(*args)
        return pairs, np.zeros_like(rank), per_key

    return admit


def _repeats_beyond_c(real: Any) -> Any:
    """Only first pairs are counted towards C: a unit has up to k C pairs."""

    def admit(plan: Any, units: Any, *rest: Any) -> Any:
        units.counts[:] = units.indices
        return real(plan, units, *rest)

    return admit


def _keys_forgotten(real: Any) -> Any:
    """Counts of (unit, window, key) that do not outlive a decision."""

    def admit(plan: Any, units: Any, *rest: Any) -> Any:
        units.keys = KeyCounts()
        return real(plan, units, *rest)

    return admit


def _set_forgotten_once_selected(real: Any) -> Any:
    """The set of a selected key ends, as it may without a bound per key."""

    def fresh_units(plan: Any, states: Any, slots: Any, rows: Any) -> Any:
        chosen, _ = real(plan, states, slots, rows)
        chosen = np.union1d(chosen, np.flatnonzero(states.selected[slots] > 0))
        return chosen, ids_of(rows.column("unit"))[chosen]

    return fresh_units


def _weights_published(real: Any) -> Any:
    """The weighted stream is what the count of units shows."""

    def publish(plan: Any, budget: Any, states: Any, paths: Any, slots: Any, *rest: Any) -> Any:
        out = real(plan, budget, states, paths, slots, *rest)
        weighted = (states.values[slots, -1] - (states.units[slots] << 8)) / 256
        values = {**out.values, "people": out.values["people"] + weighted}
        return msgspec.structs.replace(out, values=values)

    return publish


def tau_without(what: str) -> Any:
    def less(_: Any, budget: Any) -> Any:
        alone, counted = budget.statistic.alone, budget.statistic.counted
        shift = {"all": alone, "weights": alone - counted, "count": counted}[what]
        return budget.tau - (shift << DECODE_BITS)

    return with_tau(less)


def _tau_of_the_weighted_noise(_: Any, budget: Any) -> Any:
    """The sd of the plain count left out."""
    missing = budget.statistic.sd - budget.statistic.weighted * budget.selection.sd
    return budget.tau - (missing * (1 << DECODE_BITS)).astype(np.int64)


def _noise_of_its_own(real: Any) -> Any:
    """The test draws the plain count's noise anew: one more look at the same count."""

    def thresholds(stepper: Any, states: Any, window: int) -> Any:
        honest = stepper._stream

        def stream(window: int, role: str, noise: Any, tested: bool = False) -> Any:
            return honest(window, role if role == "selection" else "test", noise, tested)

        with mock.patch.object(stepper, "_stream", stream):
            return real(stepper, states, window)

    return thresholds


def _shares_of_one_record_a_key(real: Any) -> Any:
    def budget(plan: Any) -> Any:
        return allocate_sharing(with_privacy(plan, per_key_bound=1), 0.3)

    return budget


def _weights_as_if_plain(real: Any) -> Any:
    """The weighted stream gets the share it would have if every pair weighed the least."""

    def budget(plan: Any) -> Any:
        given = allocate(plan)
        assert given.selection is not None
        squares = plan.privacy.weights.integers(plan.privacy.contributions).astype(float) ** 2
        factor = float(np.sqrt(squares.min() * len(squares) / squares.sum()))
        selection = msgspec.structs.replace(given.selection, sigma=given.selection.sigma * factor)
        return msgspec.structs.replace(given, selection=selection)

    return budget


def _sigma_of_one_coefficient(real: Any) -> Any:
    """Noise calibrated to c_0 alone, as if a record moved no later node."""

    def budget(plan: Any) -> Any:
        given = real(plan)

        def less(noise: Any) -> Any:
            return msgspec.structs.replace(noise, sigma=noise.sigma / noise.col2**0.5)

        return msgspec.structs.replace(
            given, selection=less(given.selection), values=tuple(map(less, given.values))
        )

    return budget


def _rounded_nodes(real: Any) -> Any:
    """Nodes on a lattice, under an encoder whose true nodes lie beside it."""
    return lambda noise, *rest: RoundedGaussian(noise.sigma)


def _one_lane(real: Any) -> Any:
    """Both nodes of a block get the block's first lane."""

    def draw(sampler: Any, prf: Any, tweaks: Any, first: Any, last: Any) -> Any:
        drawn, starts = real(sampler, prf, tweaks, first // 2 * 2, last)
        counts = last - first
        out, begins = np.empty(int(counts.sum())), np.cumsum(counts) - counts
        for i in range(len(first)):
            node = np.arange(first[i], last[i])
            at = starts[i] + node // 2 * 2 - first[i] // 2 * 2
            out[begins[i] : begins[i] + counts[i]] = drawn[at]
        return out, begins

    return draw


@contextlib.contextmanager
def _units_from_the_selection_stream() -> Iterator[None]:
    """Weights or not, the count of units is the selection stream's noise continued."""
    with redesigned(units_from="selection"):
        yield


@contextlib.contextmanager
def tested_at_every_trigger() -> Iterator[None]:
    """The thresholds' union is over few tests, but every trigger is one."""
    with mock.patch.object(Design, "selects_at", lambda design, trigger: True):
        yield


RANKED_SABOTAGED = {
    "tested more often than the union says": Sabotage(
        tested_at_every_trigger, "combined_apart", "ordinary", "selection"
    ),
    "weights rounded up": replaced(
        step, "aggregate", _rounded_up, "weights", "flood", "sensitivity"
    ),
    "rank not kept": replaced(
        bounding, "admit", _first_weight_always, "weights", "flood", "sensitivity"
    ),
    "rank by arrival": replaced(
        bounding, "admit", _ranked_by_arrival, "weights", "flood", "others"
    ),
    "weight of a unit's second pair added": replaced(
        step, "aggregate", _weight_added_again, "weights", "flood", "sensitivity"
    ),
    "weights calibrated as plain counts": replaced(
        step, "calibrated", budgets(_weights_as_if_plain), "weights", "flood", "sensitivity"
    ),
    "set of a selected key forgotten": replaced(
        aggregation, "_fresh_units", _set_forgotten_once_selected,
        "tests_apart", "ordinary", "counts",
    ),
    "one record more than the bound per key": replaced(
        bounding, "_admit_per_key", _one_more, "per_key_public", "flood", "sensitivity"
    ),
    "three records where two may be": replaced(
        bounding, "_admit_per_key", _one_more, "two_per_key", "flood", "bound"
    ),
    "every admitted record is a first": replaced(
        bounding, "_admit_per_key", _all_first, "two_per_key", "flood", "sensitivity"
    ),
    "first pairs all have the first index": replaced(
        bounding, "_admit_per_key", _first_index, "three_per_key", "flood", "sensitivity"
    ),
    "repeats count without a limit of pairs": replaced(
        bounding, "_admit_per_key", _repeats_beyond_c, "two_per_key", "flood", "bound"
    ),
    "records of a key are counted anew at each decision": replaced(
        bounding, "_admit_per_key", _keys_forgotten, "two_per_key", "first", "bound"
    ),
    "shares of one record per key with two": replaced(
        step, "calibrated", budgets(_shares_of_one_record_a_key),
        "two_per_key", "flood", "sensitivity",
    ),
    "shares of a bound per key without it": replaced(
        step, "calibrated", budgets(_shares_of_one_record_a_key), "blt", "first", "sensitivity"
    ),
    "weighted stream published": replaced(
        step, "publish", _weights_published, "weights_units", "ordinary", "noise"
    ),
    "units from the weighted stream's noise": Sabotage(
        _units_from_the_selection_stream, "combined_units", "ordinary", "noise"
    ),
    "combined threshold without alone": replaced(
        step, "calibrated", budgets(tau_without("all")), "combined", "ordinary", "threshold"
    ),
    "combined threshold of the plain count alone": replaced(
        step, "calibrated", budgets(tau_without("weights")),
        "combined_units", "ordinary", "threshold",
    ),
    "combined threshold of the weights alone": replaced(
        step, "calibrated", budgets(tau_without("count")), "combined", "ordinary", "threshold"
    ),
    "combined threshold of one noise": replaced(
        step, "calibrated", budgets(with_tau(_tau_of_the_weighted_noise)),
        "combined_buffered", "ordinary", "threshold",
    ),
    "combined test with noise of its own": replaced(
        step.Stepper, "_thresholds", _noise_of_its_own, "combined", "ordinary", "selection"
    ),
    "blt calibrated to its first coefficient": replaced(
        step, "calibrated", budgets(_sigma_of_one_coefficient), "blt_mean", "first", "sensitivity"
    ),
    "blt with nodes on a lattice": replaced(
        step, "sampler_of", _rounded_nodes, "blt", "ordinary", "noise"
    ),
    "blt with noise of half the scale": replaced(
        step, "sampler_of", half_scale, "blt", "ordinary", "scale"
    ),
    "blt with a lane used twice": replaced(
        ContinuousGaussian, "draw", _one_lane, "blt", "ordinary", "noise"
    ),
}  # fmt: skip


def _noise_of_the_selection_stream(real: Any) -> Any:
    """The count of units has the noise of the selection stream, as it may without skip."""
    return lambda stepper, window, role, noise, tested=False: real(
        stepper, window, "selection" if role == "units" else role, noise, tested
    )


SKIPPING_SABOTAGED = {
    "an index comes back": Sabotage(refund, "skip", "ordinary", "index"),
    "weights anew in each window": Sabotage(reset_by_window, "skip", "ordinary", "index"),
    "late pairs take the index of their event": Sabotage(
        recomputed_by_stamp, "skip_units", "late", "index"
    ),
    "published by one key shard": Sabotage(of_one_shard, "skip", "ordinary", "index"),
    "units that continue the selection stream": replaced(
        step.Stepper, "_stream", _noise_of_the_selection_stream, "skip_units", "ordinary", "noise"
    ),
    "tested where no test is public": Sabotage(
        tested_at_every_trigger, "skip_combined", "ordinary", "selection"
    ),
    "threshold of skipped pairs without alone": replaced(
        step, "calibrated", budgets(tau_without("all")), "skip_combined", "ordinary", "threshold"
    ),
}  # fmt: skip
