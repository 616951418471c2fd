"""Automatic bounds of columns, from noisy histograms of a few values of each unit.

Its own pass: stage 1 clamps to bounds, so they are chosen before it runs.  Sensitivity: see
``accounting.query.bounds``; that a unit has at most VALUES values in a histogram is made here.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from dpstream.accounting.arrays import Ids, Int64
from dpstream.accounting.query.bounds import (
    VALUES,
    BoundsDesign,
    Settled,
    cells_of_values,
    settled,
)
from dpstream.accounting.query.plan import QueryPlan
from dpstream.accounting.tuning.question import Histogram, encoder_matrix
from dpstream.dp_transforms.noise.inputs import InputDigest
from dpstream.dp_transforms.noise.oneshot import OneShot, numbered
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.one_shot.bounding import smallest
from dpstream.dp_transforms.one_shot.partials import Partials, Rows


def choose_bounds(
    plan: QueryPlan,
    design: BoundsDesign,
    counts: Mapping[str, Int64],
    keys: KeyRing,
    run_name: Sequence[bytes],
) -> Settled:
    """Return the plan with its bounds, by noisy histograms.

    Args:
        counts: of each automatic column, ``counted`` of all units.
        run_name: run id, committed before the first draw, and digest of the question.
    """
    noisy, digest = [], InputDigest(keys)
    for of in design.histograms:
        digest.add(of.name, numbered(len(counts[of.name])), counts[of.name])
    for of in design.histograms:
        exact = encoder_matrix(of.cells) @ counts[of.name]
        noise = OneShot(keys, (b"query bounds", *run_name, of.name.encode()), digest.value)
        draw = noise.rounded_gaussian if design.law == "gaussian" else noise.discrete_laplace
        noisy.append(np.asarray(exact + draw(numbered(len(exact)), of.sigma), np.int64))
    return settled(plan, design, noisy)


def counted(
    of: Histogram, rows: Rows, ids: tuple[Ids, Ids], keys: KeyRing, run_name: Sequence[bytes]
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
        return np.zeros(of.cells, np.int64)
    partials = Partials(rows.unit, rows.group, *ids)
    name = (b"of a unit", *run_name, of.name.encode())
    chosen = smallest(partials, rows, rows.unit, VALUES, keys, name)
    return np.bincount(cells_of_values(of, rows.value[chosen]), minlength=of.cells)
