"""An invented office: parameter files, geography and records of people who do not exist.

The files are complete and in the format of production.  Names are invented, and nobody is
described; sizes of groups are heavy-tailed.  The same arguments give the same bytes.

Every detailed group (level 2) is of one broad group (level 1).  Each group of race is counted alone
and in combination, and all codes of the one are those of the other.  Large regions do not take the
groups that are for small ones, and the reverse.
"""

import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dpstream.accounting.arrays import Float64
from dpstream.accounting.errors import UsageError
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
from dpstream.pipelines.tabulation.private import ETHNICITY, LAYOUTS, RACE_COLUMNS
from dpstream.pipelines.tabulation.public_files import (
    BLOCK,
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
)
from dpstream.state.disk_errors import file_errors
from dpstream.state.durable import make_folder, replacing

Row = tuple[str, ...]
_FIRST = ("Bel", "Cor", "Dav", "Fen", "Gal", "Hes", "Jor", "Kel", "Lum", "Mar", "Nor", "Per")
#: Codes and their names, which no group has; those of race come first.  The last ethnicity is that
#: of most people.
_NAMES = [first + rest for rest in ("ebrian", "ibrian", "obrian") for first in _FIRST][7:34]
_CODES = [str(1000 + 5 * number) for number in range(len(_NAMES))]
_RACE_CODES, _ETHNIC_CODES = _CODES[:20], _CODES[20:]
#: Groups of race and of ethnicity: name, level, the regions that take it, its codes.
_RACE_GROUPS = (
    ("Belabrian", "0", "none", "1000 1045 1090"),
    ("Corabrian", "0", "none", "1005 1050 1095"),
    ("Davabrian", "1", "all", "1000 1015 1025 1030 1035 1045 1065 1085"),
    ("Fenabrian", "1", "all", "1005 1020 1055 1060 1070 1080 1090"),
    ("Galabrian", "1", "large", "1010 1040 1050 1075 1095"),
    ("Hesabrian", "2", "all", "1000 1045"),
    ("Jorabrian", "2", "all", "1005 1055 1070 1080"),
    ("Kelabrian", "2", "all", "1010 1040 1050 1075 1095"),
    ("Lumabrian", "2", "all", "1015 1065"),
    ("Marabrian", "2", "all", "1020 1060 1090"),
    ("Norabrian", "2", "all", "1025"),
    ("Perabrian", "2", "large", "1030 1085"),
    ("Belebrian", "2", "large", "1035"),
    ("Corebrian", "2", "small", "1030 1035 1085"),
)
_ETHNIC_GROUPS = (
    ("Not Davebrian", "0", "none", "1130"),
    ("Fenebrian", "1", "all", "1100 1105 1110 1115 1120 1125"),
    ("Galebrian", "2", "all", "1100 1120 1125"),
    ("Hesebrian", "2", "all", "1105 1115"),
    ("Jorebrian", "2", "large", "1110"),
)
#: DETAILED_ONLY and COARSE_ONLY by the regions that take a group.
_FLAGS = {
    "none": (NONE, NONE),
    "all": ("False", "False"),
    "large": ("True", "False"),
    "small": ("False", "True"),
}
#: How a group of race is counted: the value of ALONE and the end of the name.
_COUNTED = (("True", " alone"), ("False", " alone or in combination"))


def _lists() -> dict[str, list[Row]]:
    """Rows of the iterations, the codes and the map, by file, without headers."""
    counted = [
        (name + end, level, flag, taken, codes)
        for name, level, taken, codes in _RACE_GROUPS
        for flag, end in (_COUNTED if level != "0" else [("True", "")])
    ]
    races = [(f"{number:04d}", *group) for number, group in enumerate(counted, 1)]
    ethnicities = [(str(number), *group) for number, group in enumerate(_ETHNIC_GROUPS, 4001)]
    return {
        RACE_ITERATIONS: [
            (code, name, level, flag, *_FLAGS[taken]) for code, name, level, flag, taken, _ in races
        ],
        ETHNICITY_ITERATIONS: [
            (code, name, level, *_FLAGS[taken]) for code, name, level, taken, _ in ethnicities
        ],
        CODES: [*zip(_CODES, _NAMES, strict=True)],
        MAP: [
            (iteration, code)
            for iteration, *_, codes in [*races, *ethnicities]
            for code in codes.split()
        ],
    }


#: Each state has four tracts of blocks and two places; most blocks of a place's range lie in it.
_TRACTS, _TRACT_BLOCKS, _PLACE_RANGE, _PLACE_BLOCKS = 4, 40, 80, 60
#: Outside of Puerto Rico one block in some lies in an area, which may cross a border of states.
_AREA_RANGE, _AREA_BLOCKS = 100, range(50, 65)


def _geography(states: tuple[str, ...]) -> list[Row]:
    """Blocks of the states, sorted."""
    blocks = itertools.product(sorted(states), range(_TRACTS), range(_TRACT_BLOCKS))
    rows = list[Row]()
    for number, (state, tract, block) in enumerate(blocks):
        place, at = divmod(tract * _TRACT_BLOCKS + block, _PLACE_RANGE)
        area, inside = divmod(number, _AREA_RANGE)
        has_area = inside in _AREA_BLOCKS and state != PUERTO_RICO
        rows.append(
            (
                state,
                "001",
                f"{100 * (1 + tract):06d}",
                f"{1000 + block}",
                f"{10 * (1 + place) if at < _PLACE_BLOCKS else NO_PLACE:05d}",
                f"{10 * (1 + area) if has_area else NO_AREA:04d}",
            )
        )
    return rows


#: Shares of people with one, two, ... race codes.
_MANY = np.array([0.88, 0.09, 0.02, 0.006, 0.002, 0.001, 0.0006, 0.0004])
#: People of each age fall off after the middle of life.
_AGES = np.concatenate([np.full(60, 1.0), np.linspace(1.0, 0.002, OLDEST - 59)])
#: Share of people of the last ethnicity; households for each person.
_MOST, _HOUSEHOLDS = 0.82, 0.4
#: Shares of household types 1 .. 5 and of tenures 1 .. 4.
_TYPES, _TENURES = (0.47, 0.05, 0.13, 0.28, 0.07), (0.42, 0.22, 0.34, 0.02)


def _heavy_tailed(count: int) -> Float64:
    """(count,) shares that fall with their number; their sum is 1."""
    weights = np.arange(1, count + 1) ** -1.1
    return np.asarray(weights / weights.sum())


def _records(
    program: str, count: int, blocks: list[Row], rng: np.random.Generator
) -> Iterator[Row]:
    """Rows of a private file; a few tracts have most of the people."""
    crowds = np.repeat(rng.lognormal(0.0, 0.7, len(blocks) // _TRACT_BLOCKS), _TRACT_BLOCKS)
    block = np.array(blocks)[rng.choice(len(blocks), count, p=crowds / crowds.sum())]
    # The smallest of exponential times are a sample by weights in which no code is twice.
    times = rng.exponential(size=(count, len(_RACE_CODES))) / _heavy_tailed(len(_RACE_CODES))
    codes = np.argsort(times, axis=1)[:, :RACES]
    there = np.arange(RACES) <= rng.choice(RACES, count, p=_MANY / _MANY.sum())[:, None]
    race_group = np.bitwise_or.reduce(np.where(there, 1 << codes % 6, 0), axis=1)
    ethnic = np.append(_heavy_tailed(len(_ETHNIC_CODES) - 1) * (1 - _MOST), _MOST)
    columns = {
        **dict(zip(BLOCK, block.T, strict=False)),
        LAYOUTS[program].race_group: np.char.mod("%02d", race_group),
        **dict(
            zip(RACE_COLUMNS, np.where(there, np.array(_RACE_CODES)[codes], NONE).T, strict=True)
        ),
        ETHNICITY: rng.choice(_ETHNIC_CODES, count, p=ethnic),
        "QAGE": np.char.mod("%03d", rng.choice(OLDEST + 1, count, p=_AGES / _AGES.sum())),
        "QSEX": rng.choice(["1", "2"], count),
        "HOUSEHOLDER": rng.choice(["True", "False"], count, p=(_HOUSEHOLDS, 1 - _HOUSEHOLDS)),
        "HOUSEHOLD_TYPE": rng.choice(["1", "2", "3", "4", "5"], count, p=_TYPES),
        "TEN": rng.choice(["1", "2", "3", "4"], count, p=_TENURES),
    }
    return zip(*(columns[name] for name in LAYOUTS[program].columns), strict=True)


#: Budgets (rho) of the 2020 tables by kind of region, for levels 1 and 2: persons, households.
_LARGE, _SMALL = (
    {"p": (0.008, 2.134), "h": (0.006915, 1.9208)},
    {"p": (0.008, 0.159), "h": (0.006915, 0.142869)},
)
#: Thresholds of detail: no group of so few people would pass those of production.
_THRESHOLDS = (20, 100, 400)


class Size(NamedTuple):
    """The size of a set of files.

    Attributes:
        persons: records of persons; households are two for five of them.
        states: FIPS codes, 72 with them for Puerto Rico.
        seed: the same gives the same files.
    """

    persons: int = 10_000
    states: tuple[str, ...] = ("01", "02", "72")
    seed: int = 0


def generate(parameters: Path, data: Path, size: Size) -> None:
    """Write a complete set of files.

    Args:
        parameters: folder of the parameter files; data: of the data files.

    Raises:
        UsageError: a file is there.
        RunError: a file cannot be written.
    """
    rng, blocks = np.random.default_rng(size.seed), _geography(size.states)
    texts = {
        parameters / name: _text(PARAMETER_FILES[name], rows) for name, rows in _lists().items()
    }
    texts[parameters / CONFIG] = _config(size.states)
    texts[data / GEOGRAPHY] = _text(tuple(GEOGRAPHY_COLUMNS), blocks)
    for program, count in (("p", size.persons), ("h", int(size.persons * _HOUSEHOLDS))):
        records = _records(program, count, blocks, rng)
        texts[data / LAYOUTS[program].file] = _text(LAYOUTS[program].columns, records)
    for path in texts:
        if path.exists():
            raise UsageError(path.name, "exists", "choose another folder")
    for path, text in texts.items():
        with file_errors(path.name, "cannot be written"):
            make_folder(path.parent)
            with replacing(path) as draft:
                draft.write_text(text, encoding="utf-8", newline="\n")


def _text(header: Row, rows: Iterable[Row]) -> str:
    return "".join("|".join(row) + "\n" for row in (header, *rows))


def _config(states: tuple[str, ...]) -> str:
    """The parameters of both programs."""
    mainland = sorted(state for state in states if state != PUERTO_RICO)
    levels = (*US_LEVELS, *PR_LEVELS)
    config: dict[str, Any] = {"max_race_codes": 8}
    for program, tables in TABLES.items():
        for table in tables:
            prefix, thresholds = names_of(program)[table.name]
            config |= {f"{prefix}_{level.name}": _budget(program, level) for level in levels}
            count = 1 if table is T4 else 3
            config[thresholds] = {level.label: _THRESHOLDS[:count] for level in levels}
    config |= {
        "privacy_budget_p_stage_1_fraction": 0.1,
        "zero_suppression_chance": 0.5,
        "allow_negative_counts": True,
        "run_us": bool(mainland),
        "run_pr": PUERTO_RICO in states,
        "reader": "csv",
        "state_filter_us": mainland,
        "privacy_defn": "zcdp",
    }
    return json.dumps(config, indent=2) + "\n"


def _budget(program: str, level: Level) -> float:
    """The budget of a level as in 2020: small areas of natives have none at level 1."""
    if level.region_type == "AIANNH" and level.iteration_level == 1:
        return 0.0
    return (_LARGE if level.detailed else _SMALL)[program][level.iteration_level - 1]
