"""Invented iterations and codes, in numbers like those of production.

Every detailed group (level 2) is of one broad group (level 1) and has one code or more.  Each group
of race is counted alone and in combination, and all codes of the one are those of the other, so
that at most max(2, races) groups a level count a person for race.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from dpstream.accounting.arrays import Float64, Int64
from dpstream.pipelines.tabulation import characteristics as files


class Shape(NamedTuple):
    """How many of everything there are.

    Attributes:
        broad, detailed: groups of race of level 1 and 2, each counted alone and in combination.
        broad_large: the last groups of level 1 that small regions do not take.
        alone_large, combined_large: the same of level 2, where they are counted alone and where in
            combination.
        merged: groups of level 2 that only small regions take, of the codes of those they do not.
        ethnic_broad, ethnic, ethnic_large: the same of ethnicity.
        ignored: iterations of level 0.
        race_codes, ethnic_codes: at least one for each group; one ethnicity code more is of nobody
            of an ethnicity that is counted.
    """

    broad: int
    broad_large: int
    detailed: int
    alone_large: int
    combined_large: int
    merged: int
    ethnic_broad: int
    ethnic: int
    ethnic_large: int
    ignored: int
    race_codes: int
    ethnic_codes: int


#: 2,962 iterations of race (48 + 2,914) and 34 of ethnicity (4 + 30), of which large regions take
#: 52 + 2,944 and small ones 48 + 2,150; 1,755 codes; some 14,000 rows of the map.
PRODUCTION = Shape(24, 2, 1_457, 437, 354, 0, 4, 30, 3, 38, 1_700, 54)
SMALL = Shape(3, 1, 8, 2, 2, 1, 1, 3, 1, 2, 20, 6)
#: Sizes of groups fall with their number to this power.
_TAIL = 1.1
_FIRST = ("Bel", "Cor", "Dav", "Fen", "Gal", "Hes", "Jor", "Kel", "Lum", "Mar", "Nor", "Per")
_SECOND = ("a", "e", "i", "o", "u", "ai", "eo", "ia")
_THIRD = ("bri", "dan", "gor", "lin", "mos", "nar", "rel", "sta", "ter", "vin")
_LAST = ("an", "ese", "i", "ite")


class Groups(NamedTuple):
    """Invented iterations and codes.

    Attributes:
        files: rows of each parameter file by its name, as texts, without the header.
        race, ethnicity: codes of the two columns; the last ethnicity is that of most people.
        race_weights, ethnicity_weights: how often each is.
        broad: (race codes,) the number of each one's broad group.
    """

    files: dict[str, list[tuple[str, ...]]]
    race: Int64
    race_weights: Float64
    ethnicity: Int64
    ethnicity_weights: Float64
    broad: Int64


def invent(shape: Shape, seed: int) -> Groups:
    """Iterations and codes of a shape; the same seed gives the same."""
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(1,)))
    names = _names()
    of_race, broad_of = _memberships(shape.race_codes, shape.detailed, shape.broad, rng)
    of_ethnicity, ethnic_broad = _memberships(
        shape.ethnic_codes, shape.ethnic, shape.ethnic_broad, rng
    )
    codes = 1_000 + 5 * np.arange(shape.race_codes + shape.ethnic_codes + 1)
    race, ethnicity = codes[: shape.race_codes], codes[shape.race_codes :]
    lists = _Lists(names)
    lists.races(shape, race, of_race, broad_of)
    lists.ethnicities(shape, ethnicity, of_ethnicity, ethnic_broad)
    rows = {**lists.rows}
    rows[files.CODES] = [(str(code), next(names)) for code in codes.tolist()]
    weights = _weights(of_race, shape.detailed)
    most = 0.82
    ethnic = np.append(_weights(of_ethnicity, shape.ethnic) * (1 - most), most)
    return Groups(rows, race, weights, ethnicity, ethnic, broad_of[of_race])


def zipf(count: int) -> Float64:
    """Weights of heavy-tailed groups; their sum is 1."""
    weights = np.arange(1, count + 1, dtype=np.float64) ** -_TAIL
    return np.asarray(weights / weights.sum())


def _weights(group: Int64, groups: int) -> Float64:
    """How often each code is: those of a group share its weight."""
    return np.asarray(zipf(groups)[group] / np.bincount(group, minlength=groups)[group])


def _memberships(
    codes: int, groups: int, broad: int, rng: np.random.Generator
) -> tuple[Int64, Int64]:
    """The group of each code and the broad group of each group; none is empty."""
    more = rng.choice(groups, codes - groups, p=zipf(groups))
    further = rng.choice(broad, groups - broad, p=zipf(broad))
    of_code = np.concatenate([np.arange(groups), more])
    return of_code, np.concatenate([np.arange(broad), further])


def _names() -> Iterator[str]:
    """Names that are nobody's."""
    parts = itertools.product(_LAST, _THIRD, _SECOND, _FIRST)
    for number in itertools.count():
        for last, third, second, first in parts:
            yield f"{first}{second}{third}{last}"
        parts = itertools.product([f"{end}-{number}" for end in _LAST], _THIRD, _SECOND, _FIRST)


class _Lists:
    """Rows of the lists of iterations and of the map, as they grow."""

    def __init__(self, names: Iterator[str]) -> None:
        self._names = names
        self.rows: dict[str, list[tuple[str, ...]]] = {
            files.RACE_ITERATIONS: [],
            files.ETHNICITY_ITERATIONS: [],
            files.MAP: [],
        }
        self._next = {files.RACE_ITERATIONS: 1, files.ETHNICITY_ITERATIONS: 4_001}

    def races(self, shape: Shape, codes: Int64, group: Int64, broad: Int64) -> None:
        """Level 0 without codes of its own, then both levels, each alone and in combination."""
        for number in range(shape.ignored):
            self._add(
                files.RACE_ITERATIONS, next(self._names), 0, "True", "", codes[number % 9 :: 9]
            )
        for number in range(shape.broad):
            large = number >= shape.broad - shape.broad_large
            self._pair(
                1, "DL" if large else "", "DL" if large else "", codes[broad[group] == number]
            )
        for number in range(shape.detailed):
            alone = "DL" if number >= shape.detailed - shape.alone_large else ""
            combined = "DL" if number >= shape.detailed - shape.combined_large else ""
            self._pair(2, alone, combined, codes[group == number])
        for number in range(shape.merged):
            first = shape.detailed - max(shape.alone_large, shape.combined_large)
            own = (group >= first) & ((group - first) % shape.merged == number)
            self._pair(2, "CO", "CO", codes[own])

    def ethnicities(self, shape: Shape, codes: Int64, group: Int64, broad: Int64) -> None:
        """That of most people is of level 0."""
        name = files.ETHNICITY_ITERATIONS
        self._add(name, f"Not {next(self._names)}", 0, None, "", codes[-1:])
        for number in range(shape.ethnic_broad):
            self._add(name, next(self._names), 1, None, "", codes[:-1][broad[group] == number])
        for number in range(shape.ethnic):
            large = "DL" if number >= shape.ethnic - shape.ethnic_large else ""
            self._add(name, next(self._names), 2, None, large, codes[:-1][group == number])

    def _pair(self, level: int, alone: str, combined: str, codes: Int64) -> None:
        name = next(self._names)
        kinds = (("True", "alone", alone), ("False", "alone or in combination", combined))
        for flag, words, only in kinds:
            self._add(files.RACE_ITERATIONS, f"{name} {words}", level, flag, only, codes)

    def _add(
        self, file: str, name: str, level: int, alone: str | None, only: str, codes: Int64
    ) -> None:
        """An iteration and its codes; ``only``: large regions (DL), small ones (CO), or both."""
        code = f"{self._next[file]:04d}"
        self._next[file] += 1
        flags = (str(only == "DL"), str(only == "CO")) if level else (files.NONE, files.NONE)
        alone_flag = () if alone is None else (alone,)
        self.rows[file].append((code, name, str(level), *alone_flag, *flags))
        self.rows[files.MAP] += [(code, str(own)) for own in codes.tolist()]
