"""s against every record there can be, over small lists of codes; and a rule that is too low."""

import itertools

import numpy as np
import pytest

from dpstream.accounting.arrays import Int64
from dpstream.accounting.tabulation.stability import explained, stability

NONE = np.zeros((0, 2), np.int64)


def pairs(*iterations: str) -> Int64:
    """(m, 2) members of iterations, each a text of its codes' letters."""
    rows = [(i, ord(c)) for i, codes in enumerate(iterations) for c in codes]
    return np.array(rows, np.int64).reshape(-1, 2)


def most_groups(alone: Int64, combined: Int64, ethnicity: Int64, codes: str, k: int) -> int:
    """Groups of the worst record: every set of up to k race codes, every ethnicity code."""

    def sets(members: Int64) -> list[set[int]]:
        return [set(members[members[:, 0] == i, 1].tolist()) for i in np.unique(members[:, 0])]

    alones, combs, eths = sets(alone), sets(combined), sets(ethnicity)
    records = (
        set(map(ord, some)) for n in range(1, k + 1) for some in itertools.combinations(codes, n)
    )
    race = max(sum(r <= a for a in alones) + sum(bool(r & c) for c in combs) for r in records)
    return race + max((sum(ord(c) in e for e in eths) for c in codes), default=0)


def test_nine_as_the_production_files_have_it() -> None:
    codes = "abcdefghijkl"
    alone, combined = pairs(*codes), pairs(*codes)
    found = explained(alone, combined, pairs("x", "y"), 8)
    assert found.groups == 9 == max(2, 8) + 1 and found.shared
    assert "share" in found.words and "s = 9" in found.words


@pytest.mark.parametrize("k", [1, 2, 3, 8])
def test_shared_is_h_max_2_k(k: int) -> None:
    assert stability(pairs("ab", "cd"), pairs("ab", "cd"), pairs("x"), k) == max(2, k) + 1


def test_split_groups_cost_one_more() -> None:
    """One iteration alone over two in combination: a record of both is in three groups."""
    alone, combined = pairs("abc"), pairs("ab", "c")
    found = explained(alone, combined, NONE, 2)
    assert found.groups == 3 == most_groups(alone, combined, NONE, "abc", 2) and not found.shared
    assert "different iterations" in found.words
    too_low = max(found.alone + found.combined, 2 * found.combined)
    assert too_low < most_groups(alone, combined, NONE, "abc", 2)


def test_never_below_any_record_and_tight_where_nothing_is_twice() -> None:
    rng = np.random.default_rng(4)
    codes, tight, shared = "abcde", 0, 0
    for _ in range(300):
        kinds = [
            np.unique(
                np.stack([rng.integers(0, 3, m), rng.integers(97, 102, m)], axis=1), axis=0
            ).astype(np.int64)
            for m in rng.integers(0, 7, 3)
        ]
        k = int(rng.integers(1, 5))
        found = explained(kinds[0], kinds[1], kinds[2], k)
        exact = max(1, most_groups(kinds[0], kinds[1], kinds[2], codes, k))
        assert found.groups >= exact
        tight += found.groups == exact
        shared += found.shared
    assert tight > 80 and 30 < shared < 270


def test_repeated_pairs_count_once() -> None:
    twice = np.concatenate([pairs("ab"), pairs("ab")])
    assert stability(twice, twice, NONE, 1) == 2
    assert stability(NONE, NONE, NONE, 8) == 1
