"""Invented geography: counties, tracts and blocks of real states' codes, places and areas."""

from typing import NamedTuple

import numpy as np

from dpstream.accounting.arrays import Float64, Int64
from dpstream.accounting.errors import InvariantError
from dpstream.pipelines.tabulation.config import PUERTO_RICO
from dpstream.pipelines.tabulation.geography import BLOCK_DIGITS, NO_AREA, NO_PLACE

BLOCKS_PER_TRACT = 40
#: Counties have odd numbers of three digits.
_TRACTS_PER_COUNTY, _COUNTIES = 25, 499
#: Shares of blocks that lie in a place, and in an area.
_IN_PLACE, _IN_AREA = 0.75, 0.1


class Regions(NamedTuple):
    """Invented blocks, by state, county and tract.

    Attributes:
        block: (n,) numbers of 15 digits, rising; place, area: of each, or that of none.
        weights: (n,) how many people live there, as shares.
    """

    block: Int64
    place: Int64
    area: Int64
    weights: Float64


def invent(states: tuple[str, ...], tracts: int, places: int, areas: int, seed: int) -> Regions:
    """Blocks of so many tracts, places and areas over some states; each is there exactly once.

    Args:
        states: FIPS codes, rising; each gets at least one tract and one place.
        areas: none of them is in Puerto Rico.
    """
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(2,)))
    of_tracts, of_places = _shares(tracts, len(states)), _shares(places, len(states))
    parts = [
        _state(int(state), own_tracts, own_places, rng)
        for state, own_tracts, own_places in zip(states, of_tracts, of_places, strict=True)
    ]
    block, place, weights = map(np.concatenate, zip(*parts, strict=True))
    area = np.full(len(block), NO_AREA, np.int64)
    mainland = block // 10 ** (BLOCK_DIGITS - 2) != int(PUERTO_RICO)
    area[mainland] = _segments(int(mainland.sum()), areas, _IN_AREA, NO_AREA, rng)
    return Regions(block, place, area, weights / weights.sum())


def _shares(total: int, parts: int) -> list[int]:
    """A number in almost equal parts."""
    return [total // parts + (part < total % parts) for part in range(parts)]


def _state(
    state: int, tracts: int, places: int, rng: np.random.Generator
) -> tuple[Int64, Int64, Float64]:
    """Blocks, places and weights of a state; a few tracts have most of the people."""
    tract, together = np.arange(tracts), max(_TRACTS_PER_COUNTY, -(-tracts // _COUNTIES))
    county = 1 + 2 * (tract // together)
    number = (state * 1_000 + county) * 1_000_000 + 100 * (1 + tract % together)
    inside = 1_000 + np.arange(BLOCKS_PER_TRACT)
    block = (number[:, None] * 10_000 + inside).ravel()
    weights = np.repeat(rng.lognormal(0.0, 0.7, tracts), BLOCKS_PER_TRACT)
    place = _segments(len(block), places, _IN_PLACE, NO_PLACE, rng)
    return block, np.asarray(place), weights * rng.lognormal(0.0, 0.5, len(block))


def _segments(blocks: int, count: int, share: float, none: int, rng: np.random.Generator) -> Int64:
    """(blocks,) the number of the part that a block is in: so many parts of blocks in a row."""
    out = np.full(blocks, none, np.int64)
    if not count or not blocks:
        return out
    if not count <= blocks:
        raise InvariantError("each part has a block")
    begins = np.sort(rng.choice(blocks, count, replace=False))
    sizes = np.maximum(1, (np.diff(begins, append=blocks) * share).astype(np.int64))
    codes = 10 * (1 + np.arange(count)) if 10 * count < none else 1 + np.arange(count)
    first = np.repeat(begins - np.append(0, np.cumsum(sizes)[:-1]), sizes)
    out[np.arange(len(first)) + first] = np.repeat(codes, sizes)
    return out
