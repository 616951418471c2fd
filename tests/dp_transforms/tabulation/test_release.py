"""Columns, sums, suppression and order of what is published; margins hold, level by level."""

import itertools
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest
from scipy import stats

from dpstream.accounting.tabulation import margins
from dpstream.accounting.tabulation.margins import margin, quantile
from dpstream.accounting.tabulation.parameters import AGE_BINS, PR_LEVELS, TABLES, US_LEVELS
from dpstream.dp_transforms.tabulation.release import figures_of, outputs, released
from tests.dp_transforms.tabulation.worlds import (
    World,
    exact,
    exact_counts,
    measured,
    parameters,
    texts,
    totals_as_published,
    world,
)

[PERSONS] = TABLES["p"]
INF = float("inf")
#: Detail that no group has; region types below the state.
NEVER = {"t1t2": dict.fromkeys((*US_LEVELS, *PR_LEVELS), (1e6, 2e6, 3e6))}
BELOW = {level.region_type for level in (*US_LEVELS, *PR_LEVELS) if not level.detailed}


def test_headers_and_folders() -> None:
    headers = {
        o.folder: o.header() for table in (*TABLES["p"], *TABLES["h"]) for o in outputs(table)
    }
    group = "REGION_ID|REGION_TYPE|ITERATION_CODE|"
    assert headers == {
        "t1": f"{group}COUNT\n",
        "t2": f"{group}AGESTART|AGEEND|SEX|COUNT\n",
        **{f"t3/T0300{d}": f"{group}T3_DATA_CELL|COUNT\n" for d in (1, 2, 3, 4)},
        **{f"t4/T0400{d}": f"{group}T4_DATA_CELL|COUNT\n" for d in (1, 2)},
    }


def test_without_noise_tables_of_persons_are_exact_counts() -> None:
    w = world(700, budget=INF, allow_negative=False, zero_suppression=0.9)
    folders = texts(w, PERSONS)
    truth: Counter[Any] = Counter()
    leaves: Counter[Any] = Counter()
    for (group, leaf), count in exact(w, PERSONS).items():
        truth[group] += count
        leaves[group, leaf] += count
    t1, t2 = list[list[str]](), list[list[str]]()
    edges = (0, *AGE_BINS[23], 116)
    for level in w.domain.levels:
        for region in level.regions.to_pylist():
            for code, only in zip(level.iterations.to_pylist(), level.total_only, strict=True):
                group = (level.level, region, code)
                name = [region, level.level.region_type, code]
                if truth[group] or level.level.detailed:  # no noise exceeds 0 below the state
                    t1.append([*name, str(truth[group])])
                bins = 0 if only else (0, 4, 9, 23)[
                    sum(truth[group] >= step for step in (4, 15, 60))
                ]  # fmt: skip
                if not bins:
                    continue
                coarse = (0, *AGE_BINS[bins], 116)
                for sex in (1, 2):
                    ages = Counter(
                        {
                            start: leaves[group, (sex - 1) * 23 + i]
                            for i, start in enumerate(edges[:-1])
                        }
                    )
                    t2.append([*name, "*", "*", str(sex), str(ages.total())])
                    for low, high in itertools.pairwise(coarse):
                        count = sum(ages[age] for age in range(low, high))
                        t2.append([*name, str(low), str(high - 1), str(sex), str(count)])
    assert folders["t1"] == sorted(t1)
    assert folders["t2"] == sorted(t2)


def test_without_noise_tables_of_households_are_exact_counts() -> None:
    w = world(700, program="h", budget=INF)
    by_level = totals_as_published(w)
    measured_cells = {
        "t3": ((0,), (0, 1, 6), (0, 1, 2, 3, 6, 7, 8), tuple(range(9))),
        "t4": ((0,), (0, 1, 2, 3)),
    }
    for table in TABLES["h"]:
        folders = texts(w, table, published=by_level)
        truth = exact(w, table)
        wanted: dict[str, list[list[str]]] = {o.folder: [] for o in outputs(table)}
        for level in w.domain.levels:
            of = by_level[level.level]
            m = len(level.iterations)
            for group, total in zip(of.groups.tolist(), of.totals.tolist(), strict=True):
                region, i = level.regions[group // m].as_py(), group % m
                code = level.iterations[i].as_py()
                detail = sum(total >= step for step in (4, 15, 60)[: len(table.details) - 1])
                for cell in measured_cells[table.name][detail]:
                    count = sum(truth[(level.level, region, code), leaf]
                                for leaf in table.data_cells[cell])  # fmt: skip
                    folder = outputs(table)[detail].folder
                    wanted[folder].append(
                        [region, level.level.region_type, code, str(cell), str(count)]
                    )
        assert folders == {folder: sorted(rows) for folder, rows in wanted.items()}
        assert all(folders.values())


def test_what_is_summed_is_the_sum_of_what_is_published() -> None:
    for negative in (True, False):
        w = world(700, allow_negative=negative)
        folders = texts(w, PERSONS)
        cells, margins = Counter[Any](), Counter[Any]()
        for *group, start, _, sex, count in folders["t2"]:
            (margins if start == "*" else cells)[*group, sex] += int(count)
            assert negative or int(count) >= 0
        assert cells == margins and cells
        by_group = Counter[Any]()
        for name, total in cells.items():
            by_group[name[:-1]] += total
        totals = {tuple(group): int(count) for *group, count in folders["t1"]}
        assert all(totals[group] == count for group, count in by_group.items())
        assert (min(totals.values()) < 0) == negative


@pytest.mark.parametrize("negative", [True, False])
def test_combined_figures_are_nearer_and_of_the_same_groups(negative: bool) -> None:
    w = world(900, allow_negative=negative, zero_suppression=0.6, budget=0.2)
    both = w._replace(parameters=parameters(
        budget=0.2, allow_negative=negative, zero_suppression=0.6, estimates="combined"
    ))  # fmt: skip
    plain, combined = texts(w, PERSONS), texts(both, PERSONS)
    truth: Counter[Any] = Counter()
    for ((level, region, code), _), count in exact(w, PERSONS).items():
        truth[region, level.region_type, code] += count
    detailed = {tuple(row[:3]) for row in plain["t2"]}
    errors = {}
    for name, folders in (("plain", plain), ("combined", combined)):
        errors[name] = np.mean(
            [(int(row[3]) - truth[tuple(row[:3])]) ** 2 for row in folders["t1"]
             if tuple(row[:3]) in detailed]
        )  # fmt: skip
    assert errors["combined"] < 0.7 * errors["plain"]
    for folder in ("t1", "t2"):
        assert [row[:-1] for row in plain[folder]] == [row[:-1] for row in combined[folder]]
    if negative:
        cells, margins = Counter[Any](), Counter[Any]()
        for *group, begin, _, sex, figure in combined["t2"]:
            (margins if begin == "*" else cells)[*group, sex] += int(figure)
        assert cells == margins
        totals = {tuple(row[:3]): int(row[3]) for row in combined["t1"]}
        for place in detailed:
            assert totals[place] == margins[*place, "1"] + margins[*place, "2"]
    else:
        assert min(int(row[-1]) for rows in combined.values() for row in rows) == 0


def test_suppression_is_of_measured_totals_below_the_state() -> None:
    w = world(400, zero_suppression=0.8)
    [t1, t2] = outputs(PERSONS)
    without = parameters()
    below = {x for x in (*US_LEVELS, *PR_LEVELS) if not x.detailed}
    dropped = zeros = 0
    for level, parts in measured(w, PERSONS):
        rows = released(level, t1, parts, w.parameters).counts.decode().splitlines()[1:]
        groups = {tuple(row.split("|")[:3]) for row in rows}
        m = len(level.iterations)
        for part in parts:
            for group, values in zip(part.groups.tolist(), part.values.tolist(), strict=True):
                name = (level.regions[group // m].as_py(), level.level.region_type,
                        level.iterations[group % m].as_py())  # fmt: skip
                tested = part.detail == 0 and level.level in below
                stays = not tested or values[0] > quantile(part.noise, 0.8)
                assert (name in groups) == stays
                dropped += not stays
                zeros += tested
        all_of_t2 = released(level, t2, parts, w.parameters)
        assert all_of_t2 == released(level, t2, parts, without)
    assert 0.5 < dropped / zeros < 1


@pytest.mark.parametrize("chance", [0.0, 1e-6, 0.5, 0.99999])
@pytest.mark.parametrize("budget", [INF, 10.0])
def test_totals_of_zero_without_noise_are_suppressed_at_any_chance(
    chance: float, budget: float
) -> None:
    """As production has it: COUNT > 0, and everything is kept at chance 0 alone."""
    w = world(60, 1, budget=budget, zero_suppression=chance, thresholds=NEVER)
    rows = [row for row in texts(w, PERSONS)["t1"] if row[1] in BELOW]
    groups = sum(level.groups for level in w.domain.levels if level.level.region_type in BELOW)
    counts = [int(row[3]) for row in rows]
    if budget < INF:
        assert chance > 0 or len(rows) == groups
    elif chance == 0:
        assert len(rows) == groups and 0 in counts
    else:
        truth: Counter[Any] = Counter()
        for ((level, region, code), _), count in exact(w, PERSONS).items():
            truth[region, level.region_type, code] += count * (level.region_type in BELOW)
        assert {tuple(row[:3]): int(row[3]) for row in rows} == dict(+truth)


def test_a_group_without_anybody_is_kept_at_most_so_often() -> None:
    """Also where figures below 0 are set to 0, and the quantile itself is below 0."""
    for chance in (0.3, 0.9):
        w = world(0, zero_suppression=chance, allow_negative=False, thresholds=NEVER)
        rows = texts(w, PERSONS)["t1"]
        below = [row for row in rows if row[1] in BELOW]
        all_ = sum(x.groups for x in w.domain.levels if x.level.region_type in BELOW)
        spread = 4 * (all_ * chance * (1 - chance)) ** 0.5
        assert len(below) <= all_ * (1 - chance) + spread


def test_keys_do_not_depend_on_the_data_but_for_suppression() -> None:
    """The same groups are in t1 whoever is counted; what has detail follows step 1 alone."""
    keys = [[row[:-1] for row in texts(world(count, 0), PERSONS)["t1"]] for count in (0, 40, 900)]
    assert keys[0] == keys[1] == keys[2]
    by_level = totals_as_published(world(0, program="h"))
    for table in TABLES["h"]:
        executions = [texts(world(count, 0, "h"), table, published=by_level) for count in (0, 700)]
        rows = [{f: [row[:-1] for row in rows] for f, rows in t.items()} for t in executions]
        assert rows[0] == rows[1]


def test_without_a_chance_nothing_is_suppressed_however_low_it_is() -> None:
    w = world(100)
    [t1, _] = outputs(PERSONS)
    assert w.parameters.zero_suppression == 0
    level, part = next(
        (level, part)
        for level, parts in measured(w, PERSONS)
        for part in parts
        if part.detail == 0 and not level.level.detailed
    )
    low = part._replace(values=np.full_like(part.values, -(10**9)))
    rows = released(level, t1, [low], w.parameters).counts.decode().splitlines()[1:]
    assert len(rows) == len(part.groups) > 0 and all(row.endswith("|-1000000000") for row in rows)


def test_suppression_takes_rows_out_and_changes_no_other() -> None:
    """Also of combined estimates, whose step 1 goes with the groups that stay."""
    w = world(400, estimates="combined")
    all_of = {tuple(row) for row in texts(w, PERSONS)["t1"]}
    suppressed = w._replace(parameters=parameters(zero_suppression=0.6, estimates="combined"))
    rows = {tuple(row) for row in texts(suppressed, PERSONS)["t1"]}
    assert rows < all_of


def _stated(w: World, part: Any, cells: int, size: int) -> int:
    if w.parameters.estimates == "combined" and part.first is not None:
        return margins.combined_margin(part.first_noise, part.noise, size, cells)
    return margin(part.noise, cells, clipped=not w.parameters.allow_negative)


def missed(w: World, runs: int) -> dict[Any, list[int]]:
    """By level, detail and cells of a figure: figures beyond their margin, and all."""
    exact = exact_counts(w, PERSONS)
    stated: dict[Any, int] = {}
    out: dict[Any, list[int]] = defaultdict(lambda: [0, 0])
    for run in range(runs):
        for (level, counts), (_, parts) in zip(
            exact, measured(w, PERSONS, run_id=f"{run:032x}"), strict=True
        ):
            for part in parts:
                truth = counts.cells(part.groups, PERSONS.details[part.detail])
                size = truth.shape[1]
                for output in outputs(PERSONS):
                    rows = output.rows.get(part.detail, ())
                    for row, figures in zip(
                        rows, figures_of(part, rows, w.parameters), strict=True
                    ):
                        key = level.level, part.detail, part.first is None, len(row.cells)
                        if key not in stated:
                            stated[key] = _stated(w, part, len(row.cells), size)
                        errors = figures - truth[:, list(row.cells)].sum(axis=1)
                        out[key][0] += int((np.abs(errors) > stated[key]).sum())
                        out[key][1] += len(errors)
    return out


def _wrong(misses: dict[Any, list[int]]) -> list[Any]:
    """Kinds of figures that miss their margin more often than 5% with all but no doubt."""
    alpha = 1e-6 / len(misses)
    return [key for key, (beyond, all_) in misses.items()
            if stats.binom.sf(beyond - 1, all_, 0.05) < alpha]  # fmt: skip


@pytest.mark.parametrize("settings", [
    {"noise": "census"},
    {"noise": "rounded"},
    {"noise": "census", "definition": "puredp", "budget": 9.0},
    {"noise": "census", "allow_negative": False},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("runs", [2, pytest.param(200, marks=pytest.mark.slow)])
def test_margins_hold(settings: dict[str, Any], runs: int) -> None:
    misses = missed(world(1_500, **settings), runs)
    assert len(misses) > 40 and _wrong(misses) == []


@pytest.mark.parametrize("runs", [2, pytest.param(200, marks=pytest.mark.slow)])
def test_margins_of_combined_figures_hold(runs: int) -> None:
    """Where no threshold is near, so that nothing was selected: they do not cover its bias."""
    for steps in ((-1e6, -9e5, 1e6), (1e6, 2e6, 3e6), (-3e6, -2e6, -1e6)):
        far = {"t1t2": dict.fromkeys((*US_LEVELS, *PR_LEVELS), steps)}
        misses = missed(world(300, estimates="combined", thresholds=far), runs)
        assert _wrong(misses) == []


def test_margins_of_less_noise_do_not() -> None:
    w = world(1_500)
    less = w._replace(parameters=world(0, budget=1.6).parameters)
    stated = {}
    for _, parts in measured(less, PERSONS):
        for part in parts:
            stated[part.first is None, part.detail] = margin(part.noise)
    beyond = all_ = 0
    for (_, counts), (_, parts) in zip(exact_counts(w, PERSONS), measured(w, PERSONS), strict=True):
        for part in parts:
            truth = counts.cells(part.groups, PERSONS.details[part.detail])
            errors = np.abs(part.values - truth)
            beyond += int((errors > stated[part.first is None, part.detail]).sum())
            all_ += errors.size
    assert stats.binom.sf(beyond - 1, all_, 0.05) < 1e-6
