"""Exact counts of infinite budgets, equal to a recount; margins that cover what is published."""

import json
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from dpstream.pipelines.tabulation.config import Choice
from dpstream.pipelines.tabulation.inputs import figures, plan
from tests.golden.refusals import Refused
from tests.pipelines.tabulation.office import Office, charges, executed, ledger_of, left_over
from tests.pipelines.tabulation.oracle import CELLS, Oracle, age_rows, published

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
