"""Sabotaged variants of the product: each is one plausible mistake, patched in while it is audited.

``SABOTAGED`` says for each which neighbours show it and which rule must be reported.
"""

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import msgspec
import numpy as np

from dpstream.accounting.limits import DECODE_BITS
from dpstream.dp_transforms import aggregation, bounding, step
from dpstream.dp_transforms.ingest.records import Canonicaliser
from dpstream.dp_transforms.noise.paths import NoiseStream
from dpstream.dp_transforms.noise.sampler import RoundedGaussian
from dpstream.state.idtable import PairSet
from dpstream.state.sqlite.store import SqliteStore
from tests.audit.sabotage import Sabotage, half_scale, replaced, with_tau
from tests.bench.paper.paper import published_thresholds
from tests.budgets import budgets


def _every_pair(real: Any) -> Any:
    return lambda unit, stamp, partition, offset, wanted, *rest: (
        wanted.copy(),
        np.zeros(len(wanted), np.int32),
    )


def _windows_once(real: Any) -> Any:
    """A record in several windows costs one of the C contributions."""

    def admit(unit: Any, stamp: Any, partition: Any, offset: Any, wanted: Any, *rest: Any) -> Any:
        taken, rank = real(unit, stamp, partition, offset, np.minimum(wanted, 1), *rest)
        return np.where(taken > 0, wanted, 0), rank

    return admit


def _arrival_order(real: Any) -> Any:
    return lambda stamp, *ties: np.arange(len(stamp))


def _no_union(plan: Any, budget: Any) -> Any:
    return published_thresholds(budget.b, plan.privacy.pre_threshold + 1, budget.selection.sd)


def _window_left_out(real: Any) -> Any:
    return lambda stepper, window, role, noise, tested=False: real(stepper, 0, role, noise, tested)


def _column_left_out(real: Any) -> Any:
    return lambda stepper, window, role, noise, tested=False: real(
        stepper, window, role, msgspec.structs.replace(noise, name="value"), tested
    )


def _unkeyed(real: Any) -> Any:
    """Names that everybody can compute from the parts of a name."""

    def names(stream: Any, key_ids: Any) -> Any:
        label = repr(getattr(stream, "label", ())).encode()
        tweaks = [
            hashlib.blake2b(label + key.tobytes(), digest_size=16).digest() for key in key_ids
        ]
        return np.frombuffer(b"".join(tweaks), np.uint64).reshape(-1, 2).copy()

    return names


def _fresh_noise(real: Any) -> Any:
    """Noise from a generator instead of from the node's name."""
    rng = np.random.default_rng(5)

    def draw(sampler: Any, prf: Any, tweaks: Any, first: Any, last: Any) -> Any:
        noise, starts = real(sampler, prf, tweaks, first, last)
        noise[:] = np.rint(rng.normal(0, sampler.sigma, len(noise)))
        return noise, starts

    return draw


def _not_clamped(real: Any) -> Any:
    def value(door: Any, batch: Any, stream: Any, reason: Any) -> Any:
        wide = msgspec.structs.replace(stream, lo=-(1 << 20), hi=1 << 20)
        return real(door, batch, wide, reason)

    return value


def _not_centred(real: Any) -> Any:
    return lambda door, batch, stream, reason: real(door, batch, stream, reason) + stream.mid


def _latest_seen(real: Any) -> Any:
    """The stamp follows the largest event time seen, as a data-driven watermark does."""

    def times(door: Any, batch: Any, *rest: Any) -> Any:
        event, stamp = real(door, batch, *rest)
        door.high = max(getattr(door, "high", 0), int(event.max(initial=0)))
        return event, np.maximum(stamp, door.high)

    return times


def _units_per_batch(real: Any) -> Any:
    def aggregate(plan: Any, states: Any, *rows: Any) -> Any:
        states.pairs = PairSet()
        return real(plan, states, *rows)

    return aggregate


def _counted_from_the_crossing_on(real: Any) -> Any:
    """Algorithm 2 read literally: what came before the pre-threshold was met is lost."""

    def aggregate(plan: Any, states: Any, *rows: Any) -> Any:
        out = real(plan, states, *rows)
        below = states.units[: states.size] <= plan.privacy.pre_threshold
        states.values[: states.size][below] = 0
        return out

    return aggregate


def _counted_again_once_selected(real: Any) -> Any:
    """A selected key has a set of units of its own."""

    def fresh_units(plan: Any, states: Any, slots: Any, rows: Any) -> Any:
        add = states.pairs.add

        def marked(owners: Any, units: Any, stale: Any = None) -> Any:
            units = units.copy()
            units[:, 1] ^= states.selected[owners].astype(np.uint64)
            return add(owners, units, stale)

        with mock.patch.object(states.pairs, "add", marked):
            return real(plan, states, slots, rows)

    return fresh_units


def _short_fingerprints(real: Any) -> Any:
    def add(pairs: Any, slots: Any, units: Any, stale: Any = None) -> Any:
        return real(pairs, slots, units & np.uint64(7), stale)

    return add


def _forgotten_counters(real: Any) -> Any:
    """The counters of a unit start again after each trigger time (or a period, or an expiry)."""

    def commit_units(store: Any, shard: int, trigger_time: int, units: Any, admitted: Any) -> None:
        real(store, shard, trigger_time, units, admitted)
        units.counts[:] = 0

    return commit_units


@contextlib.contextmanager
def _published_with_data_only() -> Iterator[None]:
    touched: list[Any] = [None]
    aggregate, sticky = aggregation.aggregate, step.Stepper._chosen

    def remember(plan: Any, states: Any, *rows: Any) -> Any:
        out = aggregate(plan, states, *rows)
        touched[0] = out.touched
        return out

    def publish(stepper: Any, states: Any, window: int, slots: Any, trigger: int) -> Any:
        chosen, newly = sticky(stepper, states, window, slots, trigger)
        return np.union1d(np.intersect1d(chosen, touched[0]), newly), newly

    with (
        mock.patch.object(step, "aggregate", remember),
        mock.patch.object(step.Stepper, "_chosen", publish),
    ):
        yield


SABOTAGED = {
    "noise of half the scale": replaced(
        step, "sampler_of", half_scale, "sticky", "ordinary", "scale"
    ),
    "contributions not bounded": replaced(
        bounding, "admit", _every_pair, "sticky", "flood", "sensitivity"
    ),
    "windows of a record counted once": replaced(
        bounding, "admit", _windows_once, "sliding", "flood", "bound"
    ),
    "admission in the order of arrival": replaced(
        bounding, "stamp_order", _arrival_order, "sticky", "ordinary", "others"
    ),
    "counters forgotten": replaced(
        SqliteStore, "commit_units", _forgotten_counters, "periods", "flood", "bound"
    ),
    "threshold less one": replaced(
        step, "calibrated", budgets(with_tau(lambda _, b: b.tau - (1 << DECODE_BITS))),
        "sticky", "ordinary", "threshold",
    ),
    "threshold without the union over triggers": replaced(
        step, "calibrated", budgets(with_tau(_no_union)), "sticky", "ordinary", "threshold"
    ),
    "window left out of the name": replaced(
        step.Stepper, "_stream", _window_left_out, "sliding", "ordinary", "names"
    ),
    "column left out of the name": replaced(
        step.Stepper, "_stream", _column_left_out, "columns", "ordinary", "names"
    ),
    "names without the key": replaced(
        NoiseStream, "names", _unkeyed, "sticky", "ordinary", "names"
    ),
    "noise drawn anew": replaced(
        RoundedGaussian, "draw", _fresh_noise, "refresh", "ordinary", "noise"
    ),
    "values not clamped": replaced(
        Canonicaliser, "_value", _not_clamped, "columns", "ordinary", "sensitivity"
    ),
    "values of a mean not centred": replaced(
        Canonicaliser, "_value", _not_centred, "mean_sliding", "first", "sensitivity"
    ),
    "stamps that follow the data": replaced(
        Canonicaliser, "_times", _latest_seen, "buffered", "far_future", "others"
    ),
    "units counted per batch": replaced(
        step, "aggregate", _units_per_batch, "sticky", "ordinary", "counts"
    ),
    "units counted again once selected": replaced(
        aggregation, "_fresh_units", _counted_again_once_selected, "refresh", "flood", "counts"
    ),
    "units known by short fingerprints": replaced(
        PairSet, "add", _short_fingerprints, "sticky", "ordinary", "counts"
    ),
    "counted from the crossing on": replaced(
        step, "aggregate", _counted_from_the_crossing_on, "buffered", "flood", "sensitivity"
    ),
    "published only with new data": Sabotage(
        _published_with_data_only, "refresh", "ordinary", "calendar"
    ),
}  # fmt: skip
