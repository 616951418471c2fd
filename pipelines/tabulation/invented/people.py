"""Invented records of persons and households, written as columns of bytes.

All fields of a line but one have a fixed width, so lines are a matrix of bytes, and no text is made
for a person.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dpstream.accounting.arrays import Bool, Int64
from dpstream.accounting.tabulation.parameters import OLDEST
from dpstream.dp_transforms.tabulation.records import RACES
from dpstream.pipelines.tabulation.geography import BLOCK, BLOCK_DIGITS
from dpstream.pipelines.tabulation.invented.groups import Groups
from dpstream.pipelines.tabulation.invented.regions import Regions

Bytes = npt.NDArray[np.uint8]
#: Records whose columns are made together.
CHUNK = 1 << 19
#: Shares of people with one, two, ... race codes.
_MANY = np.array([0.88, 0.09, 0.02, 0.006, 0.002, 0.001, 0.0006, 0.0004])
#: People of each age fall off after the middle of life.
_AGES = np.concatenate([np.full(60, 1.0), np.linspace(1.0, 0.002, OLDEST - 59)])
_HOUSEHOLDERS = 0.4
#: Shares of household types 1 .. 5 and of tenures 1 .. 4.
_TYPES, _TENURES = np.array([0.47, 0.05, 0.13, 0.28, 0.07]), np.array([0.42, 0.22, 0.34, 0.02])
_NULL = np.frombuffer(b"Null", np.uint8)


class _Draws(NamedTuple):
    """What places and codes are drawn by: sums of weights."""

    block: npt.NDArray[np.float64]
    race: npt.NDArray[np.float64]
    ethnicity: npt.NDArray[np.float64]


def persons(count: int, groups: Groups, regions: Regions, seed: int) -> Iterator[bytes]:
    """Lines of ``person-records.txt``, some at a time."""
    draws = _draws(groups, regions)
    for rng, size in _chunks(count, seed, 3):
        lines = _Lines(size)
        lines.digits(_drawn(np.cumsum(_AGES) / _AGES.sum(), size, rng), 3)
        lines.digits(1 + rng.integers(0, 2, size), 1)
        drop = lines.householders(rng.random(size) < _HOUSEHOLDERS)
        _place_and_race(lines, size, draws, groups, regions, rng)
        yield lines.text(drop)


def households(count: int, groups: Groups, regions: Regions, seed: int) -> Iterator[bytes]:
    """Lines of ``household-records.txt``, some at a time."""
    draws = _draws(groups, regions)
    for rng, size in _chunks(count, seed, 4):
        lines = _Lines(size)
        _place_and_race(lines, size, draws, groups, regions, rng)
        lines.digits(1 + _drawn(np.cumsum(_TYPES), size, rng), 1)
        lines.digits(1 + _drawn(np.cumsum(_TENURES), size, rng), 1)
        yield lines.text(None)


def _draws(groups: Groups, regions: Regions) -> _Draws:
    return _Draws(
        np.cumsum(regions.weights),
        np.cumsum(groups.race_weights),
        np.cumsum(groups.ethnicity_weights),
    )


def _chunks(count: int, seed: int, key: int) -> Iterator[tuple[np.random.Generator, int]]:
    """Sizes of chunks, each with random numbers of its own."""
    for number, begin in enumerate(range(0, count, CHUNK)):
        sequence = np.random.SeedSequence(seed, spawn_key=(key, number))
        yield np.random.default_rng(sequence), min(CHUNK, count - begin)


def _drawn(sums: npt.NDArray[np.float64], count: int, rng: np.random.Generator) -> Int64:
    """Indices drawn by sums of weights."""
    at = np.searchsorted(sums, rng.random(count) * sums[-1], side="right")
    return np.asarray(np.minimum(at, len(sums) - 1))


def _place_and_race(
    lines: "_Lines",
    count: int,
    draws: _Draws,
    groups: Groups,
    regions: Regions,
    rng: np.random.Generator,
) -> None:
    """The fields that both kinds of records share: block, race group, race codes, ethnicity."""
    block = regions.block[_drawn(draws.block, count, rng)]
    left = BLOCK_DIGITS
    for width in BLOCK.values():
        left -= width
        lines.digits(block // 10**left % 10**width, width)
    codes = _races(count, draws, rng)
    there = codes >= 0
    broad = np.where(there, 1 << (groups.broad[codes] % 6), 0)
    lines.digits(np.bitwise_or.reduce(broad, axis=1), 2)
    for place in range(RACES):
        lines.codes(groups.race[codes[:, place]], there[:, place])
    ethnicity = groups.ethnicity[_drawn(draws.ethnicity, count, rng)]
    lines.codes(ethnicity, np.ones(count, np.bool_))


def _races(count: int, draws: _Draws, rng: np.random.Generator) -> Int64:
    """(count, 8) indices of race codes, none twice in a row, -1 behind the last one."""
    out = np.full((count, RACES), -1, np.int64)
    out[:, 0] = _drawn(draws.race, count, rng)
    many = np.flatnonzero((sizes := _drawn(np.cumsum(_MANY), count, rng)) > 0)
    codes = _drawn(draws.race, len(many) * (RACES - 1), rng).reshape(-1, RACES - 1)
    codes[np.arange(RACES - 1) >= sizes[many, None]] = -1
    codes = np.concatenate([out[many, :1], codes], axis=1)
    codes = -np.sort(-codes, axis=1)
    codes[:, 1:][codes[:, 1:] == codes[:, :-1]] = -1
    out[many] = -np.sort(-codes, axis=1)
    return out


class _Lines:
    """Lines as a matrix of bytes, filled field by field."""

    def __init__(self, count: int) -> None:
        self._bytes = np.full((count, 128), ord("|"), np.uint8)
        self._at = 0

    def digits(self, values: Int64, width: int) -> None:
        """A field of decimal digits."""
        left = values.astype(np.uint64)
        for place in range(self._at + width - 1, self._at - 1, -1):
            self._bytes[:, place] = left % 10 + ord("0")
            left //= 10
        self._at += width + 1

    def codes(self, values: Int64, there: Bool) -> None:
        """A field of four digits, or of Null."""
        self.digits(values, 4)
        self._bytes[~there, self._at - 5 : self._at - 1] = _NULL

    def householders(self, mask: Bool) -> int:
        """A field of True or False, with room for the longer one.

        Returns:
            The place of the byte that a line with True has too much.
        """
        begin, end = self._at, self._at + 5
        self._bytes[:, begin:end] = np.frombuffer(b"False", np.uint8)
        self._bytes[mask, begin:end] = np.frombuffer(b"True\0", np.uint8)
        self._at = end + 1
        return end - 1

    def text(self, drop: int | None) -> bytes:
        """The lines, each with its line feed.

        Args:
            drop: place of a byte that is left out where it is 0.
        """
        self._bytes[:, self._at - 1] = ord("\n")
        lines = self._bytes[:, : self._at]
        if drop is None:
            return lines.tobytes()
        mask = np.ones(lines.shape, np.bool_)
        mask[:, drop] = lines[:, drop] != 0
        return lines[mask].tobytes()
