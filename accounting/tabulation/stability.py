"""s: how many groups of one level a record can be in, from the public lists of codes.

A level takes some iterations of race, each *alone* or *in combination*, and some of ethnicity.
A record has one to k race codes and one ethnicity code, and one region of each kind.  It is in an
iteration alone if all its race codes are the iteration's, in combination if one is; in one of
ethnicity if its ethnicity code is.  Let h_alone be the most iterations alone that one code is in,
h_comb and h_eth the same in combination and of ethnicity.

* Always: alone are at most those of the first code, in combination at most h_comb for each code:
  s = h_alone + k h_comb + h_eth.
* Where all codes of each iteration alone are in the same iterations in combination ("shared"): a
  record that is alone somewhere has all its codes there, and so is in at most h_alone + h_comb
  iterations; any other is in at most k h_comb.  s = max(h_alone + h_comb, k h_comb) + h_eth.  With
  one iteration of each kind for a code, h_alone = h_comb = h, this is h max(2, k) + h_eth.

Whether the codes are shared is checked, never assumed: with a list that splits a group in
combination which it has whole alone, the second figure would be too small by one, and the
guarantee void (mechanism.md section 12).
"""

from typing import NamedTuple

import numpy as np

from dpstream.accounting.arrays import Int32, Int64

#: (m, 2) pairs of an iteration's number and a code's number.
Members = Int32 | Int64


class Stability(NamedTuple):
    """s of one level, with what it follows from.

    Attributes:
        groups: s, at least 1.
        alone, combined, ethnicity: h of each kind.
        shared: whether the codes of each iteration alone share their iterations in combination.
        codes: k.
    """

    groups: int
    alone: int
    combined: int
    ethnicity: int
    shared: bool
    codes: int

    @property
    def words(self) -> str:
        """The rule that applied, for people."""
        h_a, h_c, h_e, k = self.alone, self.combined, self.ethnicity, self.codes
        if self.shared:
            rule = f"max({h_a} alone + {h_c} in combination, {k} race codes x {h_c}) + {h_e}"
            why = "the codes of each iteration alone share their iterations in combination"
        else:
            rule = f"{h_a} alone + {k} race codes x {h_c} in combination + {h_e}"
            why = "the codes of an iteration alone are in different iterations in combination"
        return f"s = {self.groups} = {rule} of ethnicity: {why}"


def stability(alone: Members, combined: Members, ethnicity: Members, max_race_codes: int) -> int:
    """s of the level that takes these iterations.

    Args:
        alone, combined, ethnicity: (m, 2) pairs (iteration, code) of the iterations of each kind
            that the level takes; pairs may be repeated.
        max_race_codes: k, 1 or more.
    """
    return explained(alone, combined, ethnicity, max_race_codes).groups


def explained(
    alone: Members, combined: Members, ethnicity: Members, max_race_codes: int
) -> Stability:
    """The same with what it follows from."""
    a, c, e = _most(alone), _most(combined), _most(ethnicity)
    shared = _shared(alone, combined)
    race = max(a + c, max_race_codes * c) if shared else a + max_race_codes * c
    return Stability(max(1, race + e), a, c, e, shared, max_race_codes)


def _most(pairs: Members) -> int:
    """Most iterations that one code is in."""
    if not len(pairs):
        return 0
    once = np.unique(pairs, axis=0)
    return int(np.unique(once[:, 1], return_counts=True)[1].max())


def _shared(alone: Members, combined: Members) -> bool:
    """Whether the codes of each iteration alone are in the same iterations in combination."""
    of = dict[int, set[int]]()
    for iteration, code in combined.tolist():
        of.setdefault(code, set()).add(iteration)
    first = dict[int, set[int]]()
    return all(
        first.setdefault(iteration, of.get(code, set())) == of.get(code, set())
        for iteration, code in alone.tolist()
    )
