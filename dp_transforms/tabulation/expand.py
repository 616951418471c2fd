"""EXPAND and AGGREGATE: each record goes to its groups, at most s of a level; groups are counted.

What it must hold, because all noise rests on it: a record adds 1 to at most s groups of a level and
to one leaf in each, whatever other records are there.  Which groups those are is a function of the
record alone: its block has one region of a kind, and its codes are in some iterations,

* *alone*: all race codes of the record are the iteration's (intersection of what each is in);
* *in combination*: at least one is (union);
* of ethnicity: its ethnicity code is.

Only the first ``races`` race codes count, so a file with more cannot put a record into more groups.
That there are at most s is proven from the public lists (`accounting.tabulation.plan`) and
checked here for every record all the same: one too many ends the execution before any noise.

Records with equal codes are in the same iterations, so these are found once for each distinct row
of codes of a batch.

Records have codes by public index, and nothing else of a person.  Exact counts are sorted pairs
(group and leaf, count), which batches add up to, and counts of a shard's groups.  They are PRIVATE
and leave a worker only on the way to where noise is added.

**Sensitivity.**  A record is in at most s groups of a level and in one leaf of each, so removing it
lowers at most s totals by one, and for whatever partition of the leaves at most s cells by one: one
for each group.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dpstream.accounting.arrays import Bool, Int32, Int64
from dpstream.accounting.errors import PolicyError
from dpstream.accounting.tabulation.parameters import Detail, Table
from dpstream.dp_transforms.tabulation.domain import Domain, LevelDomain, Members, Shard

Int8 = npt.NDArray[np.int8]
Int16 = npt.NDArray[np.int16]

#: Columns of race codes, and the column of the ethnicity behind them.
RACES = 8


class Records(NamedTuple):
    """A batch of records; each row is one unit (a person or a household).

    Attributes:
        block: (n,) row of the geography that the record lies in, which is in the run.
        codes: (n, 9) index of race codes 1..8 and the ethnicity code in the public code list, -1
            where there is none.
        leaf: by name of a table, (n,) leaf that the record falls into, -1: none, the table does
            not count it.
    """

    block: Int32
    codes: Int16
    leaf: dict[str, Int8]

    def __len__(self) -> int:
        """How many records there are."""
        return len(self.block)


class Pairs(NamedTuple):
    """Counts that are not 0.

    Attributes:
        keys: (n,) ``group * leaves + leaf``, increasing.
        counts: (n,) how many records.
    """

    keys: Int64
    counts: Int64

    def within(self, first: int, last: int) -> "Pairs":
        """Return the pairs with keys ``first .. last - 1``."""
        begin, end = np.searchsorted(self.keys, (first, last))
        return Pairs(self.keys[begin:end], self.counts[begin:end])


NONE = Pairs(np.zeros(0, np.int64), np.zeros(0, np.int64))


def counted(keys: Int64) -> Pairs:
    """Count keys in any order; ``keys`` is sorted in place."""
    keys.sort()
    starts = _starts(keys)
    return Pairs(keys[starts], np.diff(starts, append=len(keys)))


def summed(parts: Sequence[Pairs]) -> Pairs:
    """Return one list from several, whose counts add up."""
    parts = [part for part in parts if len(part.keys)]
    if len(parts) < 2:
        return parts[0] if parts else NONE
    keys = np.concatenate([part.keys for part in parts])
    counts = np.concatenate([part.counts for part in parts])
    order = np.argsort(keys, kind="stable")  # runs that are sorted: merged
    keys, counts = keys[order], counts[order]
    starts = _starts(keys)
    return Pairs(keys[starts], np.add.reduceat(counts, starts))


def _starts(keys: Int64) -> Int64:
    """Return where a new key begins."""
    new = np.empty(len(keys), np.bool_)
    new[:1] = True
    np.not_equal(keys[1:], keys[:-1], out=new[1:])
    return np.flatnonzero(new)


class Profiles(NamedTuple):
    """Distinct rows of codes of a batch.

    Attributes:
        profile_numbers: (n,) int64, the row of ``races`` that each record has.
        races: (p, races) race codes of each profile, each once, -1 elsewhere.
        ethnicity: (p,) ethnicity code or -1.
        cached: iterations of the profiles that were found already, by what levels have in common.
    """

    profile_numbers: Int64
    races: Int16
    ethnicity: Int16
    cached: dict[tuple[int, bool], tuple[Int64, Int32]]


def profiles(domain: Domain, records: Records) -> Profiles:
    """Return the profiles of a batch."""
    codes = np.concatenate([records.codes[:, : domain.races], records.codes[:, RACES:]], axis=1)
    width = int(codes.max(initial=-1)) + 2
    key, size = np.zeros(len(codes), np.int64), 1
    for column in codes.T:
        if size * width >= 1 << 62:
            key, size = _dense(key)
        if int(column.max(initial=-1)) < 0:
            continue  # nobody has one here
        key, size = key * width + (column.astype(np.int64) + 1), size * width
    profile_numbers, _ = _dense(key)
    first = np.zeros(int(profile_numbers.max(initial=-1)) + 1, np.int64)
    first[profile_numbers[::-1]] = np.arange(len(profile_numbers) - 1, -1, -1)
    races = np.sort(codes[first, :-1], axis=1)
    races[:, 1:][races[:, 1:] == races[:, :-1]] = -1  # a code that is given twice is one
    return Profiles(profile_numbers, races, codes[first, -1], {})


def expand(
    domain: Domain, level: LevelDomain, table: Table, records: Records, profiles: Profiles
) -> Pairs:
    """Return how many records of a batch are in each leaf of each group of a level.

    Raises:
        PolicyError: a record would be in more groups than its noise is for.
    """
    starts, iterations = iterations_of(level, profiles)
    region = domain.regions_of[level.level.region_type][records.block]
    leaf = records.leaf[table.name]
    rows = np.flatnonzero((region >= 0) & (leaf >= 0))
    profile = profiles.profile_numbers[rows]
    base = region[rows].astype(np.int64) * (len(level.iterations) * table.leaves) + leaf[rows]
    counts: Int64 | None = None
    size = len(profiles.ethnicity)
    if level.level.detailed and len(rows) and (int(base.max()) + 1) * size < 1 << 62:
        # Equal records of a region are one row with a count: few rows, where regions are large.
        alike = counted(base * size + profile)
        base, profile = np.divmod(alike.keys, size)
        counts = alike.counts
    many = starts[profile + 1] - starts[profile]
    take = _ragged(starts[profile], many)
    keys = np.repeat(base, many) + iterations[take].astype(np.int64) * table.leaves
    return _summed(keys, None if counts is None else np.repeat(counts, many))


def iterations_of(level: LevelDomain, profiles: Profiles) -> tuple[Int64, Int32]:
    """Return the iterations of each profile, compressed by rows: (p + 1,) starts, and indices.

    Raises:
        PolicyError: a profile is in more than s.
    """
    common = level.level.iteration_level, level.level.detailed
    if common not in profiles.cached:
        profiles.cached[common] = _iterations(level, profiles)
    starts, iterations = profiles.cached[common]
    if np.diff(starts).max(initial=0) > level.stability.groups:
        raise PolicyError(
            f"level {level.level.label}",
            "a record would be in more groups than its noise is for",
            "report this: the program's bound on groups is wrong for these public files",
        )
    return starts, iterations


def _iterations(level: LevelDomain, profiles: Profiles) -> tuple[Int64, Int32]:
    count, m = len(profiles.ethnicity), len(level.iterations)
    alone, times = _of_codes(level.alone, profiles.races, m)
    distinct = (profiles.races >= 0).sum(axis=1)
    alone = alone[times == distinct[alone // max(m, 1)]]
    combined, _ = _of_codes(level.combined, profiles.races, m)
    ethnicity, _ = _of_codes(level.ethnicity, profiles.ethnicity[:, None], m)
    keys = np.concatenate([alone, combined, ethnicity])
    keys.sort()
    profile, iteration = np.divmod(keys, max(m, 1))
    starts = np.searchsorted(profile, np.arange(count + 1)).astype(np.int64)
    return starts, iteration.astype(np.int32)


def _of_codes(members: Members, codes: Int16, m: int) -> Pairs:
    """Keys ``profile * m + iteration``, and how many codes of the profile are the iteration's."""
    profile, at = np.nonzero(codes >= 0)
    code = codes[profile, at].astype(np.int64)
    begin = members.starts[code]
    many = members.starts[code + 1] - begin
    keys = np.repeat(profile.astype(np.int64) * m, many)
    keys += members.iterations[_ragged(begin, many)]
    return counted(keys)


def _ragged(begin: Int64, many: Int64) -> Int64:
    """``begin[i], begin[i] + 1, ...``, so many of each."""
    ends = np.cumsum(many)
    total = int(ends[-1]) if len(ends) else 0
    return np.asarray(np.arange(total) + np.repeat(begin - (ends - many), many), np.int64)


def _summed(keys: Int64, counts: Int64 | None) -> Pairs:
    """Pairs of keys, each with a count or once."""
    if counts is None:
        return counted(keys)
    order = np.argsort(keys)
    keys, counts = keys[order], counts[order]
    new: Bool = np.empty(len(keys), np.bool_)
    new[:1] = True
    np.not_equal(keys[1:], keys[:-1], out=new[1:])
    starts = np.flatnonzero(new)
    return Pairs(keys[starts], np.add.reduceat(counts, starts) if len(starts) else counts)


def _dense(key: Int64) -> tuple[Int64, int]:
    """Numbers 0, 1, ... of distinct keys in the order in which they come, and how many."""
    encoded = pa.array(key).dictionary_encode()
    return np.asarray(encoded.indices.to_numpy(), np.int64), max(1, len(encoded.dictionary))


class Counts(NamedTuple):
    """Exact counts of the groups of a shard.

    Attributes:
        shard: the range of groups; leaves: number of leaves of each group.
        pairs: counts by ``group * leaves + leaf``, of groups in the level.
        totals: (groups of the shard,) records of each group.
    """

    shard: Shard
    leaves: int
    pairs: Pairs
    totals: Int64

    def cells(self, groups: Int64, detail: Detail) -> Int64:
        """Return (n, size) counts of the cells of a detail.

        Args:
            groups: (n,) numbers in the level, without duplicates.
        """
        if detail.size == 1:
            return self.totals[groups - self.shard.first][:, None]
        row = np.full(len(self.totals), -1, np.int64)
        row[groups - self.shard.first] = np.arange(len(groups))
        group, leaf = np.divmod(self.pairs.keys, self.leaves)
        row = row[group - self.shard.first]
        mine = row >= 0
        at = row[mine] * detail.size + np.array(detail.cells)[leaf[mine]]
        # float64 sums of whole numbers are exact below 2^53.
        sums = np.bincount(at, self.pairs.counts[mine], len(groups) * detail.size)
        return sums.astype(np.int64).reshape(len(groups), detail.size)


def aggregated(shard: Shard, table: Table, pairs: Pairs) -> Counts:
    """Return counts of a shard from the counts of all batches in its groups."""
    groups = shard.last - shard.first
    at = pairs.keys // table.leaves - shard.first
    totals = np.bincount(at, pairs.counts, groups).astype(np.int64)
    return Counts(shard, table.leaves, pairs, totals)
