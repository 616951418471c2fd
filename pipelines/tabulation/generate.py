"""Complete sets of invented files, in the format and in numbers like those of production.

Names are invented, and nobody is described; sizes of groups are heavy-tailed.  The same arguments
give the same bytes.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from dpstream.accounting.errors import UsageError
from dpstream.accounting.tabulation.parameters import PR_LEVELS, T4, TABLES, US_LEVELS, Level
from dpstream.pipelines.tabulation.config import CONFIG, PUERTO_RICO, STATES, names_of
from dpstream.pipelines.tabulation.invented import (
    BLOCKS_PER_TRACT,
    PRODUCTION_SHAPE,
    SMALL_SHAPE,
    Regions,
    households,
    invent_groups,
    invent_regions,
    persons,
)
from dpstream.pipelines.tabulation.private import LAYOUTS
from dpstream.pipelines.tabulation.public_files import (
    BLOCK_DIGITS,
    GEOGRAPHY,
    GEOGRAPHY_COLUMNS,
    PARAMETER_FILES,
    texts,
)
from dpstream.state.disk_errors import file_errors
from dpstream.state.durable import make_folder, replacing

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
MOST_PERSONS, MOST_TRACTS = 400_000_000, 100_000


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


def generate(parameters: Path, data: Path, size: Size, overwrite: bool = False) -> dict[str, int]:
    """Write a complete set of files.

    Args:
        parameters: folder of the parameter files; data: of the data files.
        overwrite: whether files that are there may be replaced.

    Returns:
        By file, how many rows it has.

    Raises:
        UsageError: a file is there, or a size is not possible.
        RunError: a file cannot be written.
    """
    _check(size)
    shape = PRODUCTION_SHAPE if size.production else SMALL_SHAPE
    made = invent_groups(shape, size.seed)
    states = tuple(sorted(size.states))
    places = invent_regions(states, size.tracts, size.places, size.aiannh, size.seed)
    homes = int(size.persons * _HOUSEHOLDS)
    written: dict[Path, tuple[int, Iterable[bytes]]] = {
        parameters / name: (len(rows), [_listed(name, rows)]) for name, rows in made.files.items()
    }
    written[parameters / CONFIG] = (1, [_config(size)])
    written[data / GEOGRAPHY] = (len(places.block), [_geography(places)])
    written[data / LAYOUTS["p"].file] = (
        size.persons,
        _headed("p", persons(size.persons, made, places, size.seed)),
    )
    written[data / LAYOUTS["h"].file] = (
        homes,
        _headed("h", households(homes, made, places, size.seed)),
    )
    for path in written:
        if path.exists() and not overwrite:
            raise UsageError(path.name, "exists", "choose another folder")
    for path, (_, parts) in written.items():
        _write(path, parts)
    return {path.name: rows for path, (rows, _) in written.items()}


def _check(size: Size) -> None:
    mainland = [state for state in size.states if state != PUERTO_RICO]
    codes = (*STATES, PUERTO_RICO)
    if wrong := sorted({*(size.states or [""])} - {*codes}):
        rule = f"has {wrong[0]!r}, which is no FIPS code"
        raise UsageError("--states", rule, f"choose from {', '.join(codes)}")
    if len(set(size.states)) < len(size.states):
        raise UsageError("--states", "has a state twice", "write each once")
    ranges = [
        ("--persons", size.persons, 1, MOST_PERSONS),
        ("--tracts", size.tracts, len(size.states), MOST_TRACTS),
        ("--places", size.places, len(size.states), size.tracts * BLOCKS_PER_TRACT // 4),
        ("--aiannh", size.aiannh, 0, size.tracts * BLOCKS_PER_TRACT // 4 if mainland else 0),
        ("--seed", size.seed, 0, (1 << 63) - 1),
    ]
    for field, value, least, most in ranges:
        if not least <= value <= min(most, 9_998 if field == "--aiannh" else most):
            raise UsageError(field, f"must be {least:,} to {most:,} here", "correct it")


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


def _write(path: Path, parts: Iterable[bytes]) -> None:
    """A file that appears whole or not at all."""
    with file_errors(path.name, "cannot be written"):
        make_folder(path.parent)
        with replacing(path) as draft, open(draft, "wb") as file:
            file.writelines(parts)
