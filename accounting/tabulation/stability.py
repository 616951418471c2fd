"""s: the largest number of groups of one level that a record can be in, from the public code lists.

A level takes some iterations of race, each *alone* or *in combination*, and some of ethnicity.
A record has one to k race codes, one ethnicity code, and one region of each kind.  It is in an
iteration alone if all its race codes are the iteration's, in combination if one is, and in an
iteration of ethnicity if its ethnicity code is.  Any code of the list can stand in any of these
fields; a race code that is repeated counts once; a code may belong to no iteration.

Validation allows a code at most one iteration of each kind at a level (h <= 1).  With it s has a
closed form.  Let g be the number of iterations in combination that have a code, and g_i the number
of those that have a code of the iteration alone i.  Then

    s = max( min(k, g),  max over i of 1 + min(k, g_i) ) + (1 if any code has an ethnicity).

*Proof.*  The ethnicity code is independent of the race codes, and is in one iteration or none.  Let
S be the set of a record's race codes, 1 <= |S| <= k.  Each code of S is in at most one iteration
in combination, so S is in at most min(k, g) of them.  S is in at most one iteration alone, because
its first code is in at most one.  If S is in none, the record is in at most min(k, g) groups.  If S
is in i, all its codes are codes of i, so S is in at most min(k, g_i) iterations in combination, and
the record in at most 1 + min(k, g_i).  Every term is reached: one code each from min(k, g)
iterations in combination; and, for an i that has a code, one code of i from each of min(k, g_i)
iterations in combination, or any code of i if g_i = 0.  (If the first record is in an iteration
alone too, the second term counts it.)  So s is the maximum, neither more nor less.  ∎

The production lists have g_i = 1 everywhere and g > 8: s = 8 + 1 = 9.
"""

from typing import NamedTuple

import numpy as np

from dpstream.accounting.arrays import Int32, Int64
from dpstream.accounting.errors import PolicyError

#: (m, 2) pairs of an iteration's number and a code's number.
Members = Int32 | Int64


class Stability(NamedTuple):
    """s of one level, with what it follows from.

    Attributes:
        groups: s, at least 1: a level without a member has noise too.
        combined: min(k, g), the most groups of a record that is in no iteration alone.
        alone: the largest 1 + min(k, g_i), 0 where no iteration alone has a code.
        ethnicity: 1 if an iteration of ethnicity has a code, else 0.
        codes: k.
    """

    groups: int
    combined: int
    alone: int
    ethnicity: int
    codes: int

    @property
    def description(self) -> str:
        """The rule, for people."""
        return (
            f"s = {self.groups}: up to {self.codes} race codes reach {self.combined} groups in "
            f"combination, codes that share a group alone reach {self.alone}, "
            f"and the ethnicity code {self.ethnicity}"
        )


def stability(
    alone: Members, combined: Members, ethnicity: Members, max_race_codes: int
) -> Stability:
    """s of the level that takes these iterations.

    Args:
        alone, combined, ethnicity: (m, 2) pairs (iteration, code) of the iterations of each kind
            that the level takes; pairs may be repeated.
        max_race_codes: k, 1 or more.

    Raises:
        PolicyError: a code is in two iterations of a kind, for which the closed form is too small.
    """
    kinds = [np.unique(pairs, axis=0).astype(np.int64) for pairs in (alone, combined, ethnicity)]
    for pairs in kinds:
        if len(np.unique(pairs[:, 1])) < len(pairs):
            raise PolicyError(
                "iterations", "have a code twice in one level and kind", "validate the lists"
            )
    own, joint, eth = kinds
    together = min(max_race_codes, len(np.unique(joint[:, 0])))
    reached = 1 + min(max_race_codes, _most_shared(own, joint)) if len(own) else 0
    of_ethnicity = int(len(eth) > 0)
    groups = max(1, max(together, reached) + of_ethnicity)
    return Stability(groups, together, reached, of_ethnicity, max_race_codes)


def _most_shared(alone: Int64, combined: Int64) -> int:
    """The largest g_i; both lists have each code once."""
    order = np.argsort(combined[:, 1])
    codes, iterations = combined[order, 1], combined[order, 0]
    place = np.searchsorted(codes, alone[:, 1])
    inside = place < len(codes)
    inside[inside] = codes[place[inside]] == alone[inside, 1]
    both = np.stack([alone[inside, 0], iterations[place[inside]]], axis=1)
    _, counts = np.unique(np.unique(both, axis=0)[:, 0], return_counts=True)
    return int(counts.max(initial=0))
