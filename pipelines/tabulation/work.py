"""The work on pieces of records and on shards of groups, on any runner.

`counted` is done for each piece of the private file, `finished` for each shard once all pieces are
counted.  Between the two exact counts travel, as pairs (group and leaf, count).
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from dpstream.accounting.errors import required
from dpstream.accounting.tabulation.parameters import Table, draws
from dpstream.accounting.tabulation.plan import NO_GUARANTEE
from dpstream.dp_transforms.noise.inputs import InputDigest
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.tabulation.domain import Domain, Shard
from dpstream.dp_transforms.tabulation.expand import (
    NONE,
    Pairs,
    Records,
    aggregated,
    expand,
    profiles,
    summed,
)
from dpstream.dp_transforms.tabulation.perturb import CellNoise, perturbed
from dpstream.dp_transforms.tabulation.release import outputs, released
from dpstream.pipelines.ask.draft import File
from dpstream.pipelines.tabulation.inputs import Prepared

#: Folder of the margins, in the folders of their tables.
MARGINS = "margins"
#: File that says that nothing is promised.
STAMP = "NOT-PRIVATE.txt"
#: Pairs that come together before they are summed.
_PAIRS_AT_ONCE = 4_000_000


class Part(NamedTuple):
    """A shard of a table: the unit of work.

    Attributes:
        number: among all parts.
        table: index among the program's tables.
        shard: the range of groups.
    """

    number: int
    table: int
    shard: Shard


def parts_of(setup: Prepared) -> list[Part]:
    """Return all parts, in public order: of tables and levels that have a budget."""
    plan, out = setup.plan, list[Part]()
    on = {(table.name, level) for table, level, _ in plan.measured()}
    for number, table in enumerate(plan.parameters.tables):
        for shard in setup.shards:
            if (table.name, setup.domain.levels[shard.level].level) in on:
                out.append(Part(len(out), number, shard))
    return out


class Tally:
    """Sums of pairs by table and level, batch after batch.

    Args:
        tables: the tables whose records are counted.
    """

    def __init__(self, domain: Domain, tables: tuple[Table, ...]) -> None:
        self._domain, self._tables = domain, tables
        self._pairs: dict[tuple[int, int], list[Pairs]] = {}
        self._sizes: dict[tuple[int, int], int] = {}

    def add(self, records: Records) -> None:
        """Count a batch of records.

        Raises:
            PolicyError: a record is in more groups than its noise is for.
        """
        if not len(records):
            return
        unit_profiles = profiles(self._domain, records)
        for place, level in enumerate(self._domain.levels):
            for number, table in enumerate(self._tables):
                pairs = expand(self._domain, level, table, records, unit_profiles)
                if len(pairs.keys):
                    self._put((number, place), pairs)

    def of(self, table: int, level: int) -> Pairs:
        """Return all pairs of a table and level."""
        key = table, level
        if key not in self._pairs:
            return NONE
        pairs = summed(self._pairs[key])
        self._pairs[key] = [pairs]
        return pairs

    def _put(self, key: tuple[int, int], pairs: Pairs) -> None:
        parts = self._pairs.setdefault(key, [])
        parts.append(pairs)
        size = self._sizes.get(key, 0) + len(pairs.keys)
        # What is summed already is summed again only when as much has come.
        if size > max(_PAIRS_AT_ONCE, 2 * len(parts[0].keys)):
            parts[:] = [summed(parts)]
            size = len(parts[0].keys)
        self._sizes[key] = size


def counted(setup: Prepared, batches: Iterable[Records]) -> Tally:
    """Return the exact counts of batches of records."""
    tally = Tally(setup.domain, setup.plan.parameters.tables)
    for records in batches:
        tally.add(records)
    return tally


def pairs_of(setup: Prepared, tally: Tally, part: Part) -> Pairs:
    """Return the pairs of a part."""
    leaves = setup.plan.parameters.tables[part.table].leaves
    level_pairs = tally.of(part.table, part.shard.level)
    return level_pairs.within(part.shard.first * leaves, part.shard.last * leaves)


def counts_digest(setup: Prepared, part: Part, pairs: Pairs, ring: KeyRing) -> bytes:
    """Return the digest of the counts of a part.

    Those of all parts add up to that of the execution (`dp_transforms.noise.inputs`).
    """
    table, level = setup.plan.parameters.tables[part.table], setup.domain.levels[part.shard.level]
    items = np.zeros((len(pairs.keys), 2), np.uint64)
    items[:, 0] = pairs.keys
    label = f"{table.name} {level.level.name}"
    return InputDigest(ring).add(label, items, pairs.counts).value


def finished(
    setup: Prepared, part: Part, pairs: Pairs, ring: KeyRing, run_id: str, inputs: bytes
) -> Iterator[File]:
    """Measure a part, with noise, and publish it.

    Args:
        pairs: pairs of the part, from all pieces of the input.
        run_id: run id of the charge; inputs: digest of the counts of all parts.
    """
    parameters = setup.plan.parameters
    table, level = parameters.tables[part.table], setup.domain.levels[part.shard.level]
    kinds = required(
        draws(parameters, table, level.level, level.stability.groups),
        "a part is of a level that is on",
    )
    measured = perturbed(
        level,
        table,
        aggregated(part.shard, table, pairs),
        kinds,
        parameters.thresholds[table.name][level.level],
        CellNoise(ring, run_id, inputs),
        None if setup.published is None else setup.published[level.level],
    )
    names = iter(names_of_part(setup, part))
    for output in outputs(table):
        text = released(level, output, measured, parameters)
        yield File(next(names), text.counts)
        yield File(next(names), text.margins)
    for name in names:
        yield File(name, (NO_GUARANTEE + "\n").encode())


def name_of(setup: Prepared, part: Part) -> str:
    """Return the name of a part among those of its table: ``tract-2-003``."""
    level = setup.domain.levels[part.shard.level].level
    return f"{level.region_type.lower()}-{level.iteration_level}-{part.shard.part:03d}"


def names_of_part(setup: Prepared, part: Part) -> list[str]:
    """Return the files of a part, in the order in which they are written.

    The first part of an execution without a guarantee has its stamp too.
    """
    own, out = f"{name_of(setup, part)}.csv", list[str]()
    for output in outputs(setup.plan.parameters.tables[part.table]):
        out += [f"{output.folder}/{own}", f"{MARGINS}/{output.folder}/{own}"]
    return [*out, STAMP] if setup.plan.exact and part.number == 0 else out


def names_of(setup: Prepared) -> list[str]:
    """Return every file of an execution, by public files alone."""
    return [name for part in parts_of(setup) for name in names_of_part(setup, part)]
