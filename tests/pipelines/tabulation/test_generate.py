"""Generated files: right and repeatable."""

import itertools
import json
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from dpstream.pipelines.tabulation.config import Choice
from dpstream.pipelines.tabulation.generate import Size, generate
from dpstream.pipelines.tabulation.inputs import figures, plan
from dpstream.pipelines.tabulation.public_files import (
    CODES,
    ETHNICITY_ITERATIONS,
    MAP,
    RACE_ITERATIONS,
)
from tests.golden.pinned import check, of_cases, of_files, of_refusals
from tests.golden.refusals import Refused
from tests.pipelines.tabulation.office import (
    Office,
    charges,
    executed,
    ledger_of,
    left_over,
    office,
)
from tests.pipelines.tabulation.oracle import CELLS, Oracle, age_rows, published


def rows_of(made: Office, name: str) -> list[list[str]]:
    """Rows of a file without its header."""
    return [line.split("|") for line in made.path(name).read_text().splitlines()[1:]]


def test_every_region_is_there(made: Office) -> None:
    geography = made.load().files.geography.to_pydict()
    blocks, states, areas = geography["block"], geography["state"], geography["aiannh"]
    assert blocks == sorted(set(blocks)) and set(states) == {"01", "02", "72"}
    assert len(set(geography["tract"])) == 12
    assert len({*geography["place"]} - {None}) == 6 and len({*areas} - {None}) == 3
    assert {area for area, state in zip(areas, states, strict=True) if state == "72"} == {None}
    of_area = {(area, state) for area, state in zip(areas, states, strict=True) if area}
    assert len(of_area) == 4  # one lies in two states
    place = geography["place"]
    assert sum(a != b is not None for a, b in itertools.pairwise([None, *place])) == 6
    assert 0.7 < sum(map(bool, place)) / len(place) < 0.8


def test_every_group_has_a_code_and_every_code_a_group(made: Office) -> None:
    pairs, listed = rows_of(made, MAP), rows_of(made, CODES)
    iterations = [*rows_of(made, RACE_ITERATIONS), *rows_of(made, ETHNICITY_ITERATIONS)]
    assert {code for _, code in pairs} == {code for code, _ in listed}
    assert {row[0] for row in iterations} == {iteration for iteration, _ in pairs}
    for rows in (iterations, listed):
        assert len({row[0] for row in rows}) == len({row[1] for row in rows}) == len(rows)


def test_alone_and_in_combination_have_the_same_codes(made: Office) -> None:
    codes = dict[str, set[str]]()
    for iteration, code in rows_of(made, MAP):
        codes.setdefault(iteration, set()).add(code)
    of_name = dict[str, list[set[str]]]()
    for code, name, level, *_ in rows_of(made, RACE_ITERATIONS):
        if level != "0":
            of_name.setdefault(name.partition(" alone")[0], []).append(codes[code])
    assert all(len(pair) == 2 and pair[0] == pair[1] for pair in of_name.values())


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Office:
    """An office of many persons."""
    return office(tmp_path_factory.mktemp("many"), Size(20_000, seed=1))


def test_persons(many: Office) -> None:
    person_columns = list(zip(*rows_of(many, "person-records.txt"), strict=True))
    assert len(person_columns) == 17 and len(person_columns[0]) == 20_000
    ages = np.array(person_columns[0], int)
    assert ages.min() == 0 and 100 < ages.max() <= 115 and set(map(len, person_columns[0])) == {3}
    assert set(person_columns[1]) == {"1", "2"} and set(person_columns[2]) == {"True", "False"}
    assert 0.35 < np.mean([flag == "True" for flag in person_columns[2]]) < 0.45
    assert all("01" <= group <= "63" for group in set(person_columns[7]))
    codes = np.array(person_columns[8:16])
    every = [code for code, _ in rows_of(many, CODES)]
    assert set(np.unique(codes)) == {*every[:20], "Null"}
    null = codes == "Null"
    assert not null[0].any() and (np.diff(null.astype(int), axis=0) >= 0).all()
    assert 0.09 < 1 - null[1].mean() < 0.15
    counts = np.sort(np.unique(codes[0], return_counts=True)[1])[::-1]
    assert counts[0] > 5 * counts[-1]  # sizes of groups are heavy-tailed
    for person in codes[:, ~null[1]].T[:500]:
        given = [code for code in person if code != "Null"]
        assert len(set(given)) == len(given)
    assert 0.78 < np.mean([code == every[-1] for code in person_columns[16]]) < 0.86


def test_households(many: Office) -> None:
    household_columns = list(zip(*rows_of(many, "household-records.txt"), strict=True))
    assert len(household_columns) == 16 and len(household_columns[0]) == 8_000
    assert set(household_columns[14]) == set("12345") and set(household_columns[15]) == set("1234")
    blocks = {"".join(parts) for parts in zip(*household_columns[:4], strict=True)}
    assert blocks <= {"".join(row[:4]) for row in rows_of(many, "GRF-C.txt")}


def test_the_same_seed_gives_the_same_files(made: Office, tmp_path: Path) -> None:
    """Bytes that other golden files rest on."""
    again = office(tmp_path / "again")
    assert of_files(again.data) == of_files(made.data)
    other = office(tmp_path / "other", Size(persons=300, seed=1))
    texts = {name: of_files(folder) for name, folder in (
        ("parameters", made.parameters), ("data", made.data),
        ("other parameters", other.parameters), ("other data", other.data),
    )}  # fmt: skip
    check(Path(__file__).with_name("generated.txt"), of_cases(texts))


def test_small_files_have_every_kind_of_iteration(made: Office) -> None:
    counted = made.load().files.iterations.to_pylist()
    kinds = {(r["LEVEL"], r["ALONE"], r["DETAILED_ONLY"], r["COARSE_ONLY"]) for r in counted}
    for alone in (True, False):
        assert {(2, alone, True, False), (2, alone, False, True), (2, alone, False, False),
                (1, alone, True, False), (1, alone, False, False)} <= kinds  # fmt: skip
    assert {(1, None, False, False), (2, None, True, False)} <= kinds


def test_puerto_rico_alone_and_nothing_of_it(tmp_path: Path) -> None:
    alone = office(tmp_path / "pr", Size(100, ("72",)))
    assert alone.faults() == []
    config = json.loads((alone.parameters / "config.json").read_text())
    assert (config["run_us"], config["run_pr"], config["state_filter_us"]) == (False, True, [])
    nothing = office(tmp_path / "us", Size(100, ("04", "01")))
    assert nothing.faults() == [] and not nothing.load().parameters.run_pr


def test_what_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("mine")
    calls: dict[str, Callable[[], object]] = {
        "a file that is there": lambda: generate(tmp_path / "mine", tmp_path / "d", Size(300)),
        "below a file": lambda: generate(tmp_path / "file" / "p", tmp_path / "d", Size(1)),
    }
    check(Path(__file__).with_name("refusals_generate.txt"), of_refusals(calls))


# Exact counts of infinite budgets, equal to a recount; margins that cover what is published.


STAMP = "NOT-PRIVATE.txt"
_STATES = ["01", "02", "72"]


@pytest.fixture
def exact(lively: Office, tmp_path: Path) -> Office:
    """An office whose budgets are infinite: of persons as texts, of households as numbers."""
    own = Office(tmp_path / "parameters", tmp_path / "data")
    shutil.copytree(lively.parameters, own.parameters)
    shutil.copytree(lively.data, own.data)
    content = json.loads(own.path("config.json").read_text())
    own.configure(
        **{name: "inf" for name in content if name.startswith("privacy_budget_p_level")},
        **{name: float("inf") for name in content if name.startswith("privacy_budget_h")},
        thresholds_h_t3={label: [2, 8, 30] for label in content["thresholds_h_t3"]},
        thresholds_h_t4={label: [5] for label in content["thresholds_h_t4"]},
    )
    assert "Infinity" in own.path("config.json").read_text()
    return own


def test_cells_equal_an_independent_recount(exact: Office, tmp_path: Path) -> None:
    out, config = tmp_path / "out", json.loads(exact.path("config.json").read_text())
    executed(exact, out)
    oracle = Oracle(exact, "p", _STATES)
    totals = oracle.totals()
    t1 = published(out / "t1")
    assert t1 == oracle.exact_t1() and len(t1) < len(totals)
    ages = {bins: oracle.ages(bins) for bins in (4, 9, 23)}
    wanted = dict[tuple[str, ...], int]()
    for key, (total, level, only) in totals.items():
        steps = config["thresholds_p"][f"({key[1]}, {level})"][:3]
        if not only and total >= steps[0]:
            bins = (4, 9, 23)[sum(total >= step for step in steps) - 1]
            wanted |= {(*key, *row): ages[bins].get((*key, *row), 0) for row in age_rows(bins)}
    assert published(out / "t2") == wanted and len(wanted) > 500

    published_totals = exact.data / "pop-group-totals.txt"
    shutil.copytree(out / "t1", published_totals)
    executed(exact, tmp_path / "homes", Choice("h"))
    homes = Oracle(exact, "h", _STATES)
    for table in CELLS:
        rows = homes.households(table, published_totals, config[f"thresholds_h_{table}"])
        number = table.removeprefix("t")
        assert rows == [
            published(tmp_path / "homes" / table / f"T0{number}00{detail + 1}")
            for detail in range(len(rows))
        ]
        assert all(rows)


def test_plan_and_output_say_that_nothing_is_promised(exact: Office, tmp_path: Path) -> None:
    plan_figures = figures(plan(*exact, Choice("p")))
    assert plan_figures["guarantee"]["epsilon"] is None and plan_figures["warnings"]
    assert {row["margin"] for level in plan_figures["levels"] for row in level["figures"]} == {0}
    out = tmp_path / "out"
    done = executed(exact, out)
    assert done.manifest.epsilon is None and STAMP in done.manifest.files
    assert "NO GUARANTEE" in (out / STAMP).read_text()
    assert set(published(out / "margins" / "t1").values()) == {0}


def test_one_infinite_budget_is_enough_to_promise_nothing(
    exact: Office, lively: Office, tmp_path: Path
) -> None:
    finite = json.loads(lively.path("config.json").read_text())
    exact.configure(**finite | {"privacy_budget_p_level_2_tract": "inf"})
    done = executed(exact, tmp_path / "out")
    assert done.manifest.epsilon is None and (tmp_path / "out" / STAMP).exists()
    margins = published(tmp_path / "out" / "margins" / "t1")
    by_type: dict[Any, set[bool]] = {}
    for key, margin in margins.items():
        by_type.setdefault(key[1], set()).add(margin == 0)
    assert True in by_type["TRACT"] and by_type["USA"] == {False}


def test_a_ledger_refuses_them_before_a_record_is_read(
    exact: Office, tmp_path: Path, refused: Refused
) -> None:
    refused(lambda: executed(exact, tmp_path / "out", ledger=ledger_of(tmp_path)))
    assert charges(tmp_path) == [] and not (tmp_path / "out").exists()
    assert left_over(tmp_path) == []


def test_a_finite_output_has_no_stamp(runs: tuple[Path, Path]) -> None:
    assert not (runs[0] / STAMP).exists()


Key = tuple[str, ...]


def true_counts(made: Office) -> dict[Key, int]:
    """Exact figures of every row that t1 or t2 may have."""
    oracle = Oracle(made, "p", ["01", "02", "72"])
    counts: dict[Key, int] = defaultdict(int)
    counts |= {key: row[0] for key, row in oracle.totals().items()}
    for bins in (4, 9, 23):
        counts |= oracle.ages(bins)
    return counts


def errors_by_kind(
    runs: tuple[Path, Path], truth: dict[Key, int]
) -> dict[str, list[tuple[int, int]]]:
    """(error, margin) of each figure by its kind: totals, sexes and cells of groups with detail.

    Totals below the state are left out: some are suppressed, by their noise.
    """
    out: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for run in runs:
        for folder in ("t1", "t2"):
            counts, margins = published(run / folder), published(run / "margins" / folder)
            assert list(counts) == list(margins)
            detailed = {key[:3] for key in published(run / "t2")}
            for key, count in counts.items():
                kind = "sex" if "*" in key else "cell"
                if folder == "t1":
                    if key[:3] not in detailed and key[1] not in ("USA", "STATE", "PR-STATE"):
                        continue
                    kind = "sum" if key[:3] in detailed else "total"
                out[kind].append((abs(count - truth[key]), margins[key]))
    return out


def misses_too_often(figures: list[tuple[int, int]]) -> bool:
    """Whether more than 5% are beyond their margin, with all but no doubt."""
    beyond = sum(error > margin for error, margin in figures)
    return bool(stats.binom.sf(beyond - 1, len(figures), 0.05) < 1e-6)


def test_margins_cover_what_is_published(lively: Office, runs: tuple[Path, Path]) -> None:
    by_kind = errors_by_kind(runs, true_counts(lively))
    assert by_kind.keys() == {"total", "sum", "sex", "cell"}
    assert all(len(figures) > 60 for figures in by_kind.values())
    assert not any(map(misses_too_often, by_kind.values()))
    # The margin of one cell is too narrow for a sum of cells.
    narrow = min(margin for _, margin in by_kind["cell"])
    assert misses_too_often([(error, narrow) for error, _ in by_kind["sum"]])
    assert misses_too_often([(error, narrow) for error, _ in by_kind["sex"]])


def test_each_kind_has_the_margin_of_the_plan(lively: Office, runs: tuple[Path, Path]) -> None:
    from dpstream.pipelines.tabulation.config import Choice
    from dpstream.pipelines.tabulation.inputs import figures, plan

    iterations = lively.load().files.iterations.to_pylist()
    level_of = {row["CODE"]: row["LEVEL"] for row in iterations}
    stated: dict[tuple[str, str, str], set[int]] = defaultdict(set)
    for level in figures(plan(*lively, Choice("p")))["levels"]:
        for row in level["figures"]:
            kind = row["figure"] if row["table"] == "t2" else "total"
            stated[level["label"], row["table"], kind].add(row["margin"])
    written: dict[tuple[str, str, str], set[int]] = defaultdict(set)
    for folder in ("t1", "t2"):
        for key, margin in published(runs[0] / "margins" / folder).items():
            kind = "total" if folder == "t1" else "sex" if "*" in key else "sex by age"
            written[f"({key[1]}, {level_of[key[2]]})", folder, kind].add(margin)
    assert len(written) > 30
    assert all(margins <= stated[kind] for kind, margins in written.items())


def test_the_header_names_the_margin(runs: tuple[Path, Path]) -> None:
    head = (runs[0] / "margins" / "t1" / "usa-1-000.csv").read_text().splitlines()[0]
    assert head == "REGION_ID|REGION_TYPE|ITERATION_CODE|MARGIN_95"
    head = (runs[0] / "margins" / "t2" / "usa-1-000.csv").read_text().splitlines()[0]
    assert head == "REGION_ID|REGION_TYPE|ITERATION_CODE|AGESTART|AGEEND|SEX|MARGIN_95"
