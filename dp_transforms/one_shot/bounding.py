"""Bounds of one unit: keyed bottom-kappa of its groups, its norm, r of its rows in a group.

Everything here is a function of the unit's own rows (its ids, groups and partials), of the key and
of the run: the sampling key of (unit, group) is a MAC of (run, unit id, group id), and the kappa
groups with the smallest ones are kept.  Codes and slots, which are numbered over all units, decide
nothing.  So with one unit more or less the rows of all others stay as they are, bit for bit.

**Automatic bounds** of columns come from noisy histograms of a few values of each unit, in a pass
of their own: stage 1 clamps to bounds, so they are chosen before it runs.  Sensitivity: see
``accounting.query.bounds``; that a unit has at most VALUES values in a histogram is made here.
"""

import functools
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from dpstream.accounting.arrays import Bool, Ids, Int64
from dpstream.accounting.errors import required
from dpstream.accounting.query.bounds import (
    VALUES,
    BoundsDesign,
    Settled,
    cells_of_values,
    settled,
)
from dpstream.accounting.query.parts import QueryPart, parts_by_column, parts_of
from dpstream.accounting.query.plan import QueryColumn, QueryPlan
from dpstream.accounting.tuning.question import Histogram, encoder_matrix
from dpstream.dp_transforms.noise.inputs import InputDigest
from dpstream.dp_transforms.noise.oneshot import OneShot, numbered
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.one_shot.partials import (
    Bounded,
    Partials,
    Rows,
    merged,
    pairs,
    stored_parts,
)

Float64 = npt.NDArray[np.float64]
#: Of a scale: above the float error of a root and two divisions.
_SLACK = 2.0**-46
#: Squares are summed in limbs of so many bits.
_LIMB = 24


def bounded(
    plan: QueryPlan, partials: Partials, ring: KeyRing, run_name: Sequence[bytes]
) -> Bounded:
    """Return partials within the plan's bounds.

    Args:
        run_name: run id (committed before) and digest of the question.

    Raises:
        RunError: partials do not have the plan's form.
    """
    parts = parts_of(plan)
    totals = merged(plan, parts, partials)
    sampled = _sampled(totals, ring, run_name, plan.most_groups)
    unit, group = totals.unit[sampled], totals.group[sampled]
    counts = np.bincount(unit, minlength=len(partials.unit_ids))
    sums = {i: s[sampled] for i, s in zip(stored_parts(plan, parts), totals.sums, strict=True)}
    for index, part in enumerate(parts):
        if part.what == "count" and index not in sums:
            sums[index] = np.ones(len(unit), np.int64)
    rows: dict[str, tuple[Int64, Int64, Int64]] = {}
    at = parts_by_column(plan, parts)
    for column in plan.columns:
        mine = at[column.name]
        if column.has_rows:
            rows[column.name] = _rows(
                column, parts[mine[0]], partials, (unit, group), ring, run_name
            )
        elif plan.norm_of(column) is not None:
            _scale([parts[i] for i in mine], mine, unit, sums)
    return Bounded(unit, group, counts[unit], sums, rows)


def sampling_keys(
    ring: KeyRing, purpose: bytes, run_name: Sequence[bytes], blocks: Sequence[Ids]
) -> Ids:
    """Return (n, 2) MACs of (purpose and run, and each row's blocks)."""
    state = ring.sample.blocks(np.array([(1 + len(blocks), 0)], np.uint64))
    names = (ring.name((purpose, *run_name)), *blocks)
    return functools.reduce(lambda state, block: ring.sample.blocks(state ^ block), names, state)


def _sampled(partials: Partials, ring: KeyRing, run_name: Sequence[bytes], most: int) -> Int64:
    """Return the numbers of the rows that are kept, increasing."""
    unit, group = partials.unit, partials.group
    counts = np.bincount(unit, minlength=len(partials.unit_ids))
    over = np.flatnonzero((counts > most)[unit])
    if not over.size:
        return np.arange(len(unit))
    blocks = (partials.unit_ids[unit[over]], partials.group_ids[group[over]])
    drawn = sampling_keys(ring, b"query groups", run_name, blocks)
    beyond = _beyond(unit[over], drawn, most)
    mask = np.ones(len(unit), bool)
    mask[over[beyond]] = False
    return np.flatnonzero(mask)


def _beyond(slot: Int64, drawn: Ids, most: int) -> Int64:
    """Rows of each slot that are not among its ``most`` smallest draws."""
    bits = np.uint64(int(slot.max()).bit_length())
    key = slot.astype(np.uint64) << (np.uint64(64) - bits) if bits else np.zeros(1, np.uint64)
    key = key | (drawn[:, 1] >> bits)
    order = np.argsort(key)
    near = key[order]
    if (near[1:] == near[:-1]).any():  # so the order needs all bits
        order = np.lexsort((drawn[:, 0], drawn[:, 1], slot))
    sorted_slot = slot[order]
    first = np.flatnonzero(np.diff(sorted_slot, prepend=-1))
    size = np.diff(first, append=len(slot))
    rank = np.arange(len(slot)) - np.repeat(first, size)
    return np.asarray(order[rank >= most])


def _scale(
    parts: Sequence[QueryPart], mine: Sequence[int], unit: Int64, sums: dict[int, Int64]
) -> None:
    """Multiply a column's partials by each unit's factor, rounded towards 0."""
    leads = next((n for n, p in enumerate(parts) if p.what == "count"), 0)
    norm = parts[leads].norm
    factor = _factor(unit, sums[mine[leads]], required(norm, "norm is there"))
    for part, index in zip(parts, mine, strict=True):
        sums[index] = _times(sums[index] << part.refine, factor)


def _factor(unit: Int64, vector: Int64, norm: float) -> Float64:
    """(n,) the factor of each row's unit: at most min(1, R / norm of its vector).

    Squares are summed exactly, so that the factor does not depend on an order of rows.
    """
    if not len(unit):
        return np.ones(0)
    first = np.flatnonzero(np.diff(unit, prepend=-1))
    size = np.abs(vector)
    upper, lower = size >> _LIMB, size & ((1 << _LIMB) - 1)
    high = np.add.reduceat(upper * upper, first).astype(np.float64)
    middle = np.add.reduceat(upper * lower, first).astype(np.float64)
    low = np.add.reduceat(lower * lower, first).astype(np.float64)
    square = high * 2.0 ** (2 * _LIMB) + middle * 2.0 ** (_LIMB + 1) + low
    length = np.sqrt(square)
    over = length * (1 + _SLACK) > norm
    factor = np.where(over, norm / np.where(over, length, 1.0) * (1 - _SLACK), 1.0)
    return np.repeat(factor, np.diff(first, append=len(unit)))


def _times(vector: Int64, factor: Float64) -> Int64:
    return np.where(factor == 1, vector, np.trunc(vector * factor).astype(np.int64))


def _rows(
    column: QueryColumn,
    part: QueryPart,
    partials: Partials,
    sampled: tuple[Int64, Int64],
    ring: KeyRing,
    run_name: Sequence[bytes],
) -> tuple[Int64, Int64, Int64]:
    """Rows of kept (unit, group)s, at most r of each, and their weights."""
    unit, group = sampled
    table: Rows = partials.rows[column.name]
    groups = len(partials.group_ids)
    pair, mine = pairs(unit, group, groups), pairs(table.unit, table.group, groups)
    at = np.minimum(np.searchsorted(pair, mine), max(len(pair) - 1, 0))
    there = (table.group >= 0) & (pair[at] == mine) if len(pair) else np.zeros(len(mine), bool)
    at, value = at[there], table.value[there]
    chosen = at_most(column, partials, sampled, at, value, ring, run_name)
    at, value = at[chosen], value[chosen]
    counts = np.bincount(at, minlength=len(pair))
    weight = np.full(len(at), part.unit, np.int64)
    if part.norm is not None:
        weight = _times(weight, _factor(unit, counts.astype(np.int64), part.norm)[at])
    return at, value, weight


def at_most(
    column: QueryColumn,
    partials: Partials,
    pair: tuple[Int64, Int64],
    at: Int64,
    value: Int64,
    ring: KeyRing,
    run_name: Sequence[bytes],
) -> Bool | slice:
    """Return which of a column's rows count: at most r of each (unit, group), by a keyed choice.

    Args:
        pair: units and groups.
        at: (n,) the place of each row's unit and group among them; value: (n,) of each row.

    Returns:
        (n,) mask, or a slice of all rows.
    """
    crowded = np.bincount(at) > column.most_rows
    over = np.flatnonzero(crowded[at])
    if not over.size:
        return slice(None)
    owners, (unit, group) = at[over], pair
    few = Rows(unit[owners], group[owners], value[over])
    name = (b"of a group", *run_name, column.name.encode())
    mask = ~crowded[at]
    mask[over[smallest(partials, few, owners, column.most_rows, ring, name)]] = True
    return mask


def smallest(
    partials: Partials,
    rows: Rows,
    slot: Int64,
    most: int,
    ring: KeyRing,
    name: Sequence[bytes],
) -> Int64:
    """Return the numbers of at most ``most`` rows of each slot, chosen by MACs.

    A row's MAC is over (name, unit, group, value, which of the rows that are equal in these), so
    that a choice within a unit, or a unit's group, is a function of its own rows.

    Args:
        slot: (n,) what has a choice of its own: number of the unit, or of its group.
        name: purpose, run and column.
    """
    order = np.lexsort((rows.value, rows.group, rows.unit))
    sorted_rows = np.stack([part[order] for part in rows], axis=1)
    new = np.ones(len(order), bool)
    new[1:] = (sorted_rows[1:] != sorted_rows[:-1]).any(axis=1)
    first = np.flatnonzero(new)
    which = np.arange(len(order)) - np.repeat(first, np.diff(first, append=len(order)))
    block = np.stack([sorted_rows[:, 2], which], axis=1).view(np.uint64)
    unit, group = sorted_rows[:, 0], sorted_rows[:, 1]
    blocks = (partials.unit_ids[unit], partials.group_ids[group], block)
    drawn = sampling_keys(ring, b"query rows", name, blocks)
    left = np.ones(len(order), bool)
    left[_beyond(slot[order], drawn, most)] = False
    return np.asarray(order[left])


def choose_bounds(
    plan: QueryPlan,
    design: BoundsDesign,
    counts: Mapping[str, Int64],
    ring: KeyRing,
    run_name: Sequence[bytes],
) -> Settled:
    """Return the plan with its bounds, by noisy histograms.

    Args:
        counts: of each automatic column, ``counted`` of all units.
        run_name: run id, committed before the first draw, and digest of the question.
    """
    noisy, digest = [], InputDigest(ring)
    for histogram in design.histograms:
        digest.add(histogram.name, numbered(len(counts[histogram.name])), counts[histogram.name])
    for histogram in design.histograms:
        exact = encoder_matrix(histogram.cells) @ counts[histogram.name]
        noise = OneShot(ring, (b"query bounds", *run_name, histogram.name.encode()), digest.value)
        draw = noise.rounded_gaussian if design.law == "gaussian" else noise.discrete_laplace
        noisy.append(np.asarray(exact + draw(numbered(len(exact)), histogram.sigma), np.int64))
    return settled(plan, design, noisy)


def counted(
    histogram: Histogram, rows: Rows, ids: tuple[Ids, Ids], ring: KeyRing, run_name: Sequence[bytes]
) -> Int64:
    """Return (cells,) exact histogram of VALUES values of each unit: PRIVATE; shards add up.

    Args:
        rows: the values that bounds are for, in grid units: of each row, or (bounds per group) of
            each (unit, group).
        ids: (unit ids, group ids) of the rows' slots and codes.
    """
    listed = rows.group >= 0  # a row of no public group belongs to nothing
    rows = Rows(*(part[listed] for part in rows))
    if not len(rows.unit):
        return np.zeros(histogram.cells, np.int64)
    partials = Partials(rows.unit, rows.group, *ids)
    name = (b"of a unit", *run_name, histogram.name.encode())
    chosen = smallest(partials, rows, rows.unit, VALUES, ring, name)
    return np.bincount(cells_of_values(histogram, rows.value[chosen]), minlength=histogram.cells)
