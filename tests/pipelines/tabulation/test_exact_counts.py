"""Infinite budgets: exact counts of public data, equal to a recount, and stamped as such."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dpstream.accounting.errors import PolicyError
from dpstream.pipelines.tabulation.config import Choice
from dpstream.pipelines.tabulation.public_plan import figures, plan
from tests.pipelines.tabulation.executing import charges, executed, ledger_of, left_over
from tests.pipelines.tabulation.office import Office
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


def test_a_ledger_refuses_them_before_a_record_is_read(exact: Office, tmp_path: Path) -> None:
    with pytest.raises(PolicyError):
        executed(exact, tmp_path / "out", ledger=ledger_of(tmp_path))
    assert charges(tmp_path) == [] and not (tmp_path / "out").exists()
    assert left_over(tmp_path) == []


def test_a_finite_output_has_no_stamp(runs: tuple[Path, Path]) -> None:
    assert not (runs[0] / STAMP).exists()
