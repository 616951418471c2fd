"""Invented offices: parameter files, geography and records of people who do not exist.

The sets of files are complete, in the format and in numbers like those of production.  Names are
invented, and nobody is described; sizes of groups are heavy-tailed.  The same arguments give the
same bytes.

Counties, tracts and blocks have the codes of real states.  Iterations and codes come in numbers
like those of production.  Every detailed group (level 2) is of one broad group (level 1) and has
one code or more.  Each group of race is counted alone and in combination, and all codes of the one
are those of the other, so that at most max(2, races) groups a level count a person for race.

Records of persons and households are written as columns of bytes: all fields of a line but one have
a fixed width, so lines are a matrix of bytes, and no text is made for a person.
"""

import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dpstream.accounting.arrays import Bool, Float64, Int64
from dpstream.accounting.errors import InvariantError, UsageError
from dpstream.accounting.tabulation.parameters import (
    OLDEST,
    PR_LEVELS,
    T4,
    TABLES,
    US_LEVELS,
    Level,
)
from dpstream.dp_transforms.tabulation.expand import RACES
from dpstream.pipelines.tabulation.config import CONFIG, PUERTO_RICO, names_of
from dpstream.pipelines.tabulation.private import LAYOUTS
from dpstream.pipelines.tabulation.public_files import (
    BLOCK,
    BLOCK_DIGITS,
    CODES,
    ETHNICITY_ITERATIONS,
    GEOGRAPHY,
    GEOGRAPHY_COLUMNS,
    MAP,
    NO_AREA,
    NO_PLACE,
    NONE,
    PARAMETER_FILES,
    RACE_ITERATIONS,
    texts,
)
from dpstream.state.disk_errors import file_errors
from dpstream.state.durable import make_folder, replacing

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


def invent_regions(
    states: tuple[str, ...], tracts: int, places: int, areas: int, seed: int
) -> Regions:
    """Return blocks of tracts, places and areas over some states; each is there exactly once.

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


class Shape(NamedTuple):
    """The numbers of groups and codes.

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
PRODUCTION_SHAPE = Shape(24, 2, 1_457, 437, 354, 0, 4, 30, 3, 38, 1_700, 54)
SMALL_SHAPE = Shape(3, 1, 8, 2, 2, 1, 1, 3, 1, 2, 20, 6)
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


def invent_groups(shape: Shape, seed: int) -> Groups:
    """Return the iterations and codes of a shape; the same seed gives the same."""
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
    rows = lists.rows | {CODES: [(str(code), next(names)) for code in codes.tolist()]}
    weights = _weights(of_race, shape.detailed)
    most = 0.82
    ethnic = np.append(_weights(of_ethnicity, shape.ethnic) * (1 - most), most)
    return Groups(rows, race, weights, ethnicity, ethnic, broad_of[of_race])


def zipf(count: int) -> Float64:
    """Return weights of heavy-tailed groups; their sum is 1."""
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
            RACE_ITERATIONS: [],
            ETHNICITY_ITERATIONS: [],
            MAP: [],
        }
        self._next = {RACE_ITERATIONS: 1, ETHNICITY_ITERATIONS: 4_001}

    def races(self, shape: Shape, codes: Int64, group: Int64, broad: Int64) -> None:
        """Level 0 without codes of its own, then both levels, each alone and in combination."""
        for number in range(shape.ignored):
            self._add(RACE_ITERATIONS, next(self._names), 0, "True", "", codes[number % 9 :: 9])
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
        name = ETHNICITY_ITERATIONS
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
            self._add(RACE_ITERATIONS, f"{name} {words}", level, flag, only, codes)

    def _add(
        self, file: str, name: str, level: int, alone: str | None, only: str, codes: Int64
    ) -> None:
        """An iteration and its codes; ``only``: large regions (DL), small ones (CO), or both."""
        code = f"{self._next[file]:04d}"
        self._next[file] += 1
        flags = (str(only == "DL"), str(only == "CO")) if level else (NONE, NONE)
        alone_flag = () if alone is None else (alone,)
        self.rows[file].append((code, name, str(level), *alone_flag, *flags))
        self.rows[MAP] += [(code, str(own)) for own in codes.tolist()]


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


def persons(count: int, groups: Groups, regions: Regions, seed: int) -> Iterator[bytes]:
    """Yield the lines of ``person-records.txt``, some at a time."""
    for rng, size in _chunks(count, seed, 3):
        lines = _Lines(size)
        lines.digits(_drawn(np.cumsum(_AGES) / _AGES.sum(), size, rng), 3)
        lines.digits(1 + rng.integers(0, 2, size), 1)
        drop = lines.householders(rng.random(size) < _HOUSEHOLDERS)
        _place_and_race(lines, size, groups, regions, rng)
        yield lines.text(drop)


def households(count: int, groups: Groups, regions: Regions, seed: int) -> Iterator[bytes]:
    """Yield the lines of ``household-records.txt``, some at a time."""
    for rng, size in _chunks(count, seed, 4):
        lines = _Lines(size)
        _place_and_race(lines, size, groups, regions, rng)
        lines.digits(1 + _drawn(np.cumsum(_TYPES), size, rng), 1)
        lines.digits(1 + _drawn(np.cumsum(_TENURES), size, rng), 1)
        yield lines.text(None)


def _chunks(count: int, seed: int, key: int) -> Iterator[tuple[np.random.Generator, int]]:
    """Sizes of chunks, each with random numbers of its own."""
    for number, begin in enumerate(range(0, count, CHUNK)):
        sequence = np.random.SeedSequence(seed, spawn_key=(key, number))
        yield np.random.default_rng(sequence), min(CHUNK, count - begin)


def _drawn(sums: Float64, count: int, rng: np.random.Generator) -> Int64:
    """Indices drawn by sums of weights."""
    at = np.searchsorted(sums, rng.random(count) * sums[-1], side="right")
    return np.asarray(np.minimum(at, len(sums) - 1))


def _place_and_race(
    lines: "_Lines",
    count: int,
    groups: Groups,
    regions: Regions,
    rng: np.random.Generator,
) -> None:
    """The fields that both kinds of records share: block, race group, race codes, ethnicity."""
    block = regions.block[_drawn(np.cumsum(regions.weights), count, rng)]
    digits = BLOCK_DIGITS
    for width in BLOCK.values():
        digits -= width
        lines.digits(block // 10**digits % 10**width, width)
    codes = _races(count, np.cumsum(groups.race_weights), rng)
    there = codes >= 0
    broad = np.where(there, 1 << (groups.broad[codes] % 6), 0)
    lines.digits(np.bitwise_or.reduce(broad, axis=1), 2)
    for place in range(RACES):
        lines.codes(groups.race[codes[:, place]], there[:, place])
    ethnicity = groups.ethnicity[_drawn(np.cumsum(groups.ethnicity_weights), count, rng)]
    lines.codes(ethnicity, np.ones(count, np.bool_))


def _races(count: int, sums: Float64, rng: np.random.Generator) -> Int64:
    """(count, 8) indices of race codes, none twice in a row, -1 behind the last one."""
    out = np.full((count, RACES), -1, np.int64)
    out[:, 0] = _drawn(sums, count, rng)
    many = np.flatnonzero((sizes := _drawn(np.cumsum(_MANY), count, rng)) > 0)
    codes = _drawn(sums, len(many) * (RACES - 1), rng).reshape(-1, RACES - 1)
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
        rest = values.astype(np.uint64)
        for place in range(self._at + width - 1, self._at - 1, -1):
            self._bytes[:, place] = rest % 10 + ord("0")
            rest //= 10
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


#: Households for each person.
_HOUSEHOLDS = 0.4
#: Budgets (rho) of the 2020 tables by kind of region, for levels 1 and 2: persons, households.
_LARGE, _SMALL = (
    {"p": (0.008, 2.134), "h": (0.006915, 1.9208)},
    {"p": (0.008, 0.159), "h": (0.006915, 0.142869)},
)
#: Thresholds of production; and of small data, in which no group would pass these.
_BROAD, _NATION, _LOCAL = (4971, 19971, 149971), (471, 971, 6971), (971, 4971, 19971)
_LOW = (20, 100, 400)


class Size(NamedTuple):
    """The size of a set of files.

    Attributes:
        persons: records of persons; households are two for five of them.
        states: FIPS codes, 72 with them for Puerto Rico.
        tracts, places, aiannh: regions over all states.
        production: iterations, thresholds and suppression like those of production.
        seed: the same gives the same files.
    """

    persons: int = 10_000
    states: tuple[str, ...] = ("01", "02", "72")
    tracts: int = 12
    places: int = 6
    aiannh: int = 3
    production: bool = False
    seed: int = 0


PRODUCTION = Size(1_000_000, ("01", "02", "04"), 1_820, 949, 200, production=True)


def generate(parameters: Path, data: Path, size: Size) -> dict[str, int]:
    """Write a complete set of files.

    Args:
        parameters: folder of the parameter files; data: of the data files.

    Returns:
        By file, how many rows it has.

    Raises:
        UsageError: a file is there.
        RunError: a file cannot be written.
    """
    shape = PRODUCTION_SHAPE if size.production else SMALL_SHAPE
    made = invent_groups(shape, size.seed)
    states = tuple(sorted(size.states))
    places = invent_regions(states, size.tracts, size.places, size.aiannh, size.seed)
    homes = int(size.persons * _HOUSEHOLDS)
    written: dict[Path, tuple[int, Iterable[bytes]]] = {
        **{parameters / n: (len(rows), [_listed(n, rows)]) for n, rows in made.files.items()},
        parameters / CONFIG: (1, [_config(size)]),
        data / GEOGRAPHY: (len(places.block), [_geography(places)]),
        data / LAYOUTS["p"].file: (
            size.persons,
            _headed("p", persons(size.persons, made, places, size.seed)),
        ),
        data / LAYOUTS["h"].file: (
            homes,
            _headed("h", households(homes, made, places, size.seed)),
        ),
    }
    for path in written:
        if path.exists():
            raise UsageError(path.name, "exists", "choose another folder")
    for path, (_, parts) in written.items():
        with file_errors(path.name, "cannot be written"):
            make_folder(path.parent)
            with replacing(path) as draft, open(draft, "wb") as file:
                file.writelines(parts)
    return {path.name: rows for path, (rows, _) in written.items()}


def _listed(name: str, rows: list[tuple[str, ...]]) -> bytes:
    """A parameter file."""
    lines = [PARAMETER_FILES[name], *rows]
    return "".join("|".join(line) + "\n" for line in lines).encode()


def _headed(program: str, parts: Iterator[bytes]) -> Iterator[bytes]:
    yield ("|".join(LAYOUTS[program].columns) + "\n").encode()
    yield from parts


def _geography(made: Regions) -> bytes:
    """The geography, in the order of its blocks."""
    blocks = texts(made.block, BLOCK_DIGITS).to_pylist()
    lines = ["|".join(GEOGRAPHY_COLUMNS) + "\n"]
    for block, place, area in zip(blocks, made.place.tolist(), made.area.tolist(), strict=True):
        parts = (block[:2], block[2:5], block[5:11], block[11:], f"{place:05d}", f"{area:04d}")
        lines.append("|".join(parts) + "\n")
    return "".join(lines).encode()


def _config(size: Size) -> bytes:
    """The parameters of both programs."""
    mainland = sorted(state for state in size.states if state != PUERTO_RICO)
    config: dict[str, Any] = {"max_race_codes": 8}
    for program, tables in TABLES.items():
        for table in tables:
            prefix, thresholds = names_of(program)[table.name]
            for level in (*US_LEVELS, *PR_LEVELS):
                config[f"{prefix}_{level.name}"] = _budget(program, level)
            count = 1 if table is T4 else 3
            config[thresholds] = {
                level.label: list(_thresholds(level, size.production)[:count])
                for level in (*US_LEVELS, *PR_LEVELS)
            }
    config |= {
        "privacy_budget_p_stage_1_fraction": 0.1,
        "zero_suppression_chance": 0.9999 if size.production else 0.5,
        "allow_negative_counts": True,
        "run_us": bool(mainland),
        "run_pr": PUERTO_RICO in size.states,
        "reader": "csv",
        "state_filter_us": mainland,
        "privacy_defn": "zcdp",
    }
    return (json.dumps(config, indent=2) + "\n").encode()


def _budget(program: str, level: Level) -> float:
    """The budget of a level as in 2020: small areas of natives have none at level 1."""
    if level.region_type == "AIANNH" and level.iteration_level == 1:
        return 0.0
    return (_LARGE if level.detailed else _SMALL)[program][level.iteration_level - 1]


def _thresholds(level: Level, production: bool) -> tuple[int, ...]:
    if not production:
        return _LOW
    if level.iteration_level == 1:
        return _BROAD
    return _NATION if level.detailed else _LOCAL
