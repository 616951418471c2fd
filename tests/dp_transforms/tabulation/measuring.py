"""All shards of a world, measured and released; a test may put other parts in their place."""

from collections.abc import Callable
from typing import Any

import numpy as np

from dpstream.accounting.tabulation.parameters import Draws, Level, Table, draws
from dpstream.dp_transforms.tabulation.domain import LevelDomain, Published, shards_of
from dpstream.dp_transforms.tabulation.expand import Counts, aggregated, expand, profiles
from dpstream.dp_transforms.tabulation.perturb import CellNoise, Measured, perturbed
from dpstream.dp_transforms.tabulation.release import outputs, released
from tests.dp_transforms.tabulation.worlds import RUN, World, ring
from tests.fixed import INPUTS


def exact_counts(w: World, table: Table, most: int = 50) -> list[tuple[LevelDomain, Counts]]:
    profile_table = profiles(w.domain, w.records)
    shards = shards_of(w.domain.levels, most)
    out = []
    for number, level in enumerate(w.domain.levels):
        pairs = expand(w.domain, level, table, w.records, profile_table)
        for shard in shards:
            if shard.level == number:
                mine = pairs.within(shard.first * table.leaves, shard.last * table.leaves)
                out.append((level, aggregated(shard, table, mine)))
    return out


Scales = Callable[[Draws], Draws]


def measured(
    w: World, table: Table, run_id: str = RUN, most: int = 50, scaled: Scales = lambda d: d,
    published: dict[Level, Published] | None = None, measure: Any = perturbed,
) -> list[tuple[LevelDomain, list[Measured]]]:  # fmt: skip
    with ring() as keys:
        noise = CellNoise(keys, run_id, INPUTS)
        out = []
        for level, counts in exact_counts(w, table, most):
            kinds = draws(w.parameters, table, level.level, level.stability.groups)
            assert kinds is not None
            thresholds = w.parameters.thresholds[table.name][level.level]
            totals = None if published is None else published[level.level]
            parts = measure(level, table, counts, scaled(kinds), thresholds, noise, totals)
            out.append((level, parts))
    return out


def texts(w: World, table: Table, **more: Any) -> dict[str, list[list[str]]]:
    """Rows of each published table, sorted."""
    measurements = measured(w, table, **more)
    out: dict[str, list[list[str]]] = {}
    for output in outputs(table):
        rows = list[list[str]]()
        for level, parts in measurements:
            text = released(level, output, parts, w.parameters).counts.decode()
            assert text.startswith(output.header()) and text.endswith("\n")
            rows += [line.split("|") for line in text.splitlines()[1:]]
        out[output.folder] = sorted(rows)
    return out


def totals_as_published(w: World, seed: int = 0) -> dict[Level, Published]:
    """Totals of some groups, any."""
    rng = np.random.default_rng(seed)
    out = {}
    for level in w.domain.levels:
        groups = np.flatnonzero(rng.random(level.groups) < 0.6)
        out[level.level] = Published(groups, rng.integers(-5, 90, len(groups)))
    return out
