"""Small public files and records by seed, what a loop counts of them, and all shards measured."""

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from dpstream.accounting.tabulation.parameters import TABLES, Draws, Level, Parameters, Table, draws
from dpstream.dp_transforms.noise.prf import KeyRing
from dpstream.dp_transforms.tabulation.domain import (
    Domain,
    LevelDomain,
    PublicFiles,
    Published,
    domain_of,
    shards_of,
)
from dpstream.dp_transforms.tabulation.expand import Counts, Records, aggregated, expand, profiles
from dpstream.dp_transforms.tabulation.perturb import CellNoise, Measured, perturbed
from dpstream.dp_transforms.tabulation.release import outputs, released
from tests.fixed import INPUTS

RUN = "5a" * 16
RACE_CODES, ETHNICITIES = 14, 6
LEAVES = {table.name: table.leaves for tables in TABLES.values() for table in tables}


def ring(byte: int = 7) -> KeyRing:
    return KeyRing(bytearray([byte]) * 32)


def public_files(seed: int = 0, blocks: int = 60, shared: bool = True) -> PublicFiles:
    """Each code is in one iteration of a kind, level and size of region.

    Args:
        shared: the codes of each iteration alone are in the same one in combination.
    """
    rng = np.random.default_rng(seed)
    rows, members = list[dict[str, Any]](), list[tuple[int, int]]()

    def add(level: int, alone: bool | None, codes: list[int], only: str = "") -> None:
        rows.append(
            {"CODE": f"{1000 + (len(rows) * 37) % 997}", "NAME": f"name {len(rows)}",
             "LEVEL": level, "ALONE": alone, "DETAILED_ONLY": only == "d",
             "COARSE_ONLY": only == "c", "ETHNICITY": alone is None}
        )  # fmt: skip
        members.extend((len(rows) - 1, code) for code in codes)

    race = list(range(RACE_CODES))
    for alone in (True, False):
        for part in (race[:5], race[5:9], race[9:]):
            add(1, alone, part)
        for code in race[:6]:
            add(2, alone, [code], "d")
        coarse = [race[:3], race[3:6]] if shared or alone else [race[:2], race[2:6]]
        for part in coarse:
            add(2, alone, part, "c")
        for code in race[6:]:
            add(2, alone, [code])
    spanish = list(range(RACE_CODES, RACE_CODES + ETHNICITIES))
    for part in (spanish[:4], spanish[4:]):
        add(1, None, part)
    for code in spanish:
        add(2, None, [code])
    return PublicFiles(
        pa.Table.from_pylist(rows, _ITERATIONS),
        pa.array([f"{1000 + 10 * i}" for i in range(RACE_CODES + ETHNICITIES)]),
        np.array(members, np.int32),
        _geography(rng, blocks),
    )


_ITERATIONS = pa.schema(
    [("CODE", pa.string()), ("NAME", pa.string()), ("LEVEL", pa.int8()), ("ALONE", pa.bool_()),
     ("DETAILED_ONLY", pa.bool_()), ("COARSE_ONLY", pa.bool_()), ("ETHNICITY", pa.bool_())]
)  # fmt: skip


def _geography(rng: np.random.Generator, blocks: int) -> pa.Table:
    rows = []
    for block in range(blocks):
        state = ("01", "02", "72")[block * 5 // blocks % 3]
        county = f"{state}{rng.integers(3):03d}"
        tract = f"{county}{rng.integers(4):06d}"
        rows.append(
            {"block": f"{tract}{block:04d}", "state": state, "county": county, "tract": tract,
             "place": f"{state}{rng.integers(4):05d}" if rng.random() < 0.7 else None,
             "aiannh": f"{rng.integers(3):04d}" if rng.random() < 0.3 else None}
        )  # fmt: skip
    names = ("block", "state", "county", "tract", "place", "aiannh")
    return pa.Table.from_pylist(rows, pa.schema([(name, pa.string()) for name in names]))


def parameters(program: Any = "p", budget: float = 1.0, **changed: Any) -> Parameters:
    tables = TABLES[program]
    base = Parameters(
        program=program, noise="census", definition="zcdp", budgets={}, thresholds={},
        fraction=0.1 if program == "p" else None, zero_suppression=0.0, allow_negative=True,
        run_us=True, run_pr=True, max_race_codes=8, state_filter=("01", "02"),
    )  # fmt: skip
    steps = (4.0, 15.0, 60.0)
    values = {name: getattr(base, name) for name in base.__struct_fields__}
    values["budgets"] = {t.name: dict.fromkeys(base.levels, budget) for t in tables}
    values["thresholds"] = {
        t.name: dict.fromkeys(base.levels, steps[: len(t.details) - 1]) for t in tables
    }
    return Parameters(**values | changed)


def records(files: PublicFiles, count: int, seed: int = 0, program: str = "p") -> Records:
    rng = np.random.default_rng(seed)
    codes = np.full((count, 9), -1, np.int16)
    many = np.minimum(8, rng.geometric(0.6, count))
    # A few codes are common, so that some groups are large.
    common = np.minimum(RACE_CODES - 1, rng.geometric(0.25, (count, 8)) - 1)
    for column in range(8):
        there = many > column
        codes[there, column] = common[there, column]
    codes[:, 8] = RACE_CODES + rng.integers(0, ETHNICITIES, count)
    leaf = {
        table.name: rng.integers(0, table.leaves, count).astype(np.int8)
        for table in TABLES[program]
    }
    blocks = files.geography.num_rows
    return Records(rng.integers(0, blocks, count).astype(np.int32), codes, leaf)


class World(NamedTuple):
    """Everything that a table is made of."""

    files: PublicFiles
    parameters: Parameters
    domain: Domain
    records: Records


def world(count: int = 3_000, seed: int = 0, program: str = "p", **changed: Any) -> World:
    files, settings = public_files(seed), parameters(program, **changed)
    return World(files, settings, domain_of(files, settings), records(files, count, seed, program))


Group = tuple[Level, str, str]


def groups_of(files: PublicFiles, settings: Parameters, block: int, codes: list[int]) -> set[Group]:
    """Groups of one record, by the definition and a loop."""
    place = files.geography.slice(block, 1).to_pylist()[0]
    races = {code for code in codes[: settings.max_race_codes] if code >= 0}
    sets: dict[int, set[int]] = {}
    for iteration, code in files.members.tolist():
        sets.setdefault(iteration, set()).add(code)
    out = set[Group]()
    for level in settings.levels:
        if level.puerto_rico != (place["state"] == "72"):
            continue
        kind = level.region_type.removeprefix("PR-").lower()
        region = "1" if kind == "usa" else place[kind]
        if region is None:
            continue
        for number, row in enumerate(files.iterations.to_pylist()):
            left_out = row["COARSE_ONLY"] if level.detailed else row["DETAILED_ONLY"]
            mine = sets.get(number, set())
            if row["LEVEL"] != level.iteration_level or left_out:
                continue
            if row["ETHNICITY"]:
                inside = codes[8] in mine
            else:
                inside = bool(races) and races <= mine if row["ALONE"] else bool(races & mine)
            if inside:
                out.add((level, region, row["CODE"]))
    return out


def exact(w: World, table: Table) -> Counter[tuple[Group, int]]:
    """Records by group and leaf."""
    out: Counter[tuple[Group, int]] = Counter()
    for block, codes, leaf in zip(
        w.records.block.tolist(), w.records.codes.tolist(), w.records.leaf[table.name].tolist(),
        strict=True,
    ):  # fmt: skip
        for group in groups_of(w.files, w.parameters, block, codes) if leaf >= 0 else ():
            out[group, leaf] += 1
    return out


def exact_counts(w: World, table: Table, most: int = 50) -> list[tuple[LevelDomain, Counts]]:
    profile_table = profiles(w.domain, w.records)
    shards = shards_of(w.domain.levels, most)
    out = []
    for number, level in enumerate(w.domain.levels):
        pairs = expand(w.domain, level, table, w.records, profile_table)
        for shard in shards:
            if shard.level == number:
                mine = pairs.within(shard.first * table.leaves, shard.last * table.leaves)
                out.append((level, aggregated(shard, table, mine)))
    return out


Scales = Callable[[Draws], Draws]


def measured(
    w: World, table: Table, run_id: str = RUN, most: int = 50, scaled: Scales = lambda d: d,
    published: dict[Level, Published] | None = None, measure: Any = perturbed,
) -> list[tuple[LevelDomain, list[Measured]]]:  # fmt: skip
    with ring() as keys:
        noise = CellNoise(keys, run_id, INPUTS)
        out = []
        for level, counts in exact_counts(w, table, most):
            kinds = draws(w.parameters, table, level.level, level.stability.groups)
            assert kinds is not None
            thresholds = w.parameters.thresholds[table.name][level.level]
            totals = None if published is None else published[level.level]
            parts = measure(level, table, counts, scaled(kinds), thresholds, noise, totals)
            out.append((level, parts))
    return out


def texts(w: World, table: Table, **more: Any) -> dict[str, list[list[str]]]:
    """Rows of each published table, sorted."""
    measurements = measured(w, table, **more)
    out: dict[str, list[list[str]]] = {}
    for output in outputs(table):
        rows = list[list[str]]()
        for level, parts in measurements:
            text = released(level, output, parts, w.parameters).counts.decode()
            assert text.startswith(output.header()) and text.endswith("\n")
            rows += [line.split("|") for line in text.splitlines()[1:]]
        out[output.folder] = sorted(rows)
    return out


def totals_as_published(w: World, seed: int = 0) -> dict[Level, Published]:
    """Totals of some groups, any."""
    rng = np.random.default_rng(seed)
    out = {}
    for level in w.domain.levels:
        groups = np.flatnonzero(rng.random(level.groups) < 0.6)
        out[level.level] = Published(groups, rng.integers(-5, 90, len(groups)))
    return out
