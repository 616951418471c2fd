"""Populations of the regimes: who has which key when; generated, and seeded.

``paper`` is the literature's Zipf-Mandelbrot law, a hundredth of it; ``singles`` the stream in
which most people have one record.  ``unequal`` and ``even`` follow other laws, and no setting of
the program was chosen on them.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tests.oracle.rivals.arrivals import Arrivals
from tests.oracle.rivals.keys import Cells

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Population(NamedTuple):
    """One record for each (person, key), in the order of person and time.

    Attributes:
        person, key: (n,); time: (n,) part of the window, in [0, 1).
        keys: how many there are.
    """

    person: Ints
    key: Ints
    time: Floats
    keys: int

    @property
    def raw(self) -> Ints:
        """(K,) people of each key before any bound."""
        return np.bincount(self.key, minlength=self.keys)

    @property
    def rank(self) -> Ints:
        """(n,) number of the record among its person's, in the order of time."""
        at = np.arange(len(self.person))
        first = np.r_[True, self.person[1:] != self.person[:-1]]
        return at - np.maximum.accumulate(np.where(first, at, 0))

    def arrivals(self, contributions: int, triggers: int) -> Arrivals:
        """The first C records of each person, by trigger."""
        rank = self.rank
        admitted = rank < contributions
        step = np.floor(self.time[admitted] * triggers).astype(np.int64) + 1
        return Arrivals(self.raw, self.key[admitted], step, rank[admitted])

    def cells(self, contributions: int, by_size: bool = False) -> Cells:
        """The same without time.

        Args:
            by_size: count people of a key by how many keys they have, not by the key's index.
        """
        stream = self.arrivals(contributions, 1)
        if by_size:
            size = np.bincount(self.person).clip(max=contributions)
            stream = stream._replace(rank=size[self.person[self.rank < contributions]] - 1)
        return stream.cells(contributions)


def _drawn(rng: np.random.Generator, mass: Floats, size: int) -> Ints:
    cdf = np.cumsum(mass / mass.sum())
    return np.searchsorted(cdf, rng.random(size), side="right").clip(max=len(mass) - 1)


def _population(
    rng: np.random.Generator, records: Ints, popularity: Floats, windows: int = 1
) -> Population:
    """People with so many records each; the first of a (person, key) counts."""
    person = np.repeat(np.arange(len(records)), records)
    window = _drawn(rng, np.ones(windows), len(records))
    keys = len(popularity) * windows
    key = window[person] * len(popularity) + _drawn(rng, popularity, len(person))
    time = rng.random(len(person))
    order = np.lexsort((time, key, person))
    person, key, time = person[order], key[order], time[order]
    code = person * keys + key
    first = np.r_[True, code[1:] != code[:-1]]
    person, key, time = person[first], key[first], time[first]
    order = np.lexsort((time, person))
    return Population(person[order], key[order], time[order], keys)


def paper(rng: np.random.Generator) -> Population:
    """Zipf-Mandelbrot: 100,000 people, 10,000 keys, 5.9 records a person on average."""
    lengths, popularity = np.arange(100_000) + 26.0, np.arange(10_000) + 10.0
    records = _drawn(rng, np.power(lengths, -6.738, dtype=np.float64), 100_000) + 1
    return _population(rng, records, np.power(popularity, -1.4, dtype=np.float64))


def singles(rng: np.random.Generator) -> Population:
    """22,000 records, 89% of people with one, in 91 months of 36 keys, Zipf 1.0."""
    people = 19_000
    records = np.where(rng.random(people) < 0.89, 1, 2 + rng.geometric(0.6, people) - 1)
    return _population(rng, records, 1 / (np.arange(36) + 1.0), 91)


def unequal(rng: np.random.Generator) -> Population:
    """Not used for tuning: log-normal popularity of 3,000 keys, log-normal records."""
    records = np.ceil(rng.lognormal(0.7, 0.9, 40_000)).astype(np.int64).clip(max=200)
    return _population(rng, records, rng.lognormal(0.0, 2.0, 3_000))


def even(rng: np.random.Generator) -> Population:
    """Not used for tuning: 2,000 keys of falling popularity, 4 to 12 records a person."""
    records = rng.integers(4, 13, 20_000)
    return _population(rng, records, np.exp(-np.arange(2_000) / 250))


GENERATORS: dict[str, Callable[[np.random.Generator], Population]] = {
    "paper": paper, "singles": singles, "unequal": unequal, "even": even,
}  # fmt: skip
#: Those that no setting was chosen on.
UNSEEN = ("unequal", "even")


@functools.lru_cache(maxsize=8)
def population(name: str) -> Population:
    """The population of a name; always the same."""
    return GENERATORS[name](np.random.default_rng(32))
