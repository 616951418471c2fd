"""Plans of questions as text: thresholds, families of noise, points without budget.

The plan of census tables as text.

The plan of a workload as text.

What a private choice costs, and what it cuts, as text.

What ``dpstream check`` counted, as text.
"""

from typing import Any

import msgspec
import numpy as np
import pytest

from dpstream.accounting.regions.spent import decide, untouched
from dpstream.accounting.tabulation.plan import describe
from dpstream.accounting.tuning.answer import PerKey
from dpstream.pipelines.render.census_plan import census_text
from dpstream.pipelines.render.question_plan import explanation_text, lacking_lines, question_text
from dpstream.pipelines.render.source_check import check_text
from dpstream.pipelines.render.tuning import choice_text, outcome_text
from dpstream.pipelines.render.workload_plan import families_line, workload_text
from dpstream.pipelines.session.plan import decision_as_builtins
from dpstream.pipelines.tuning.choose import Outcome
from tests.accounting.tabulation.examples import persons, planned
from tests.pipelines.session.tables import PEOPLE, box


def test_refusals_in_words() -> None:
    space = PEOPLE.space
    boxes = np.concatenate([box(age=(n, n + 5)) for n in range(0, 100, 10)])
    decision = decide(untouched(space, "epsilon"), boxes, 500_000)
    fields = decision_as_builtins(space, decision)
    lines = lacking_lines(fields)
    assert lines[0] == "0 left where age < 5 AND epsilon < 0.5"
    assert lines[-1] == "... and 2 more boxes" and len(lines) == 9
    assert fields["lacking_boxes"] == 10 and fields["largest"] == 0 and not fields["accepted"]


COLUMN: dict[str, Any] = {
    "name": "n", "kind": "count", "automatic": False, "null_below": None,
    "parts": [{"what": "count", "sd": 2.0, "within": 4.0, "times": None}],
}  # fmt: skip
FAMILIES = [
    {"mechanism": name, "taken": taken, "columns": [COLUMN], "questions": questions}
    for name, taken, questions in (("gaussian", False, 1), ("geometric", True, None))
]
COST = {"epsilon": 1.0, "delta": 1e-9, "mu": 0.2, "threshold_delta": 0.0}
FEWEST = {
    "groups": 1, "tau": 5.0, "even_chance_one_group": 5.5, "even_chance_all_groups": 5.5,
    "min_units": 1,
}  # fmt: skip
MOST = FEWEST | {
    "groups": 8,
    "tau": 9.0,
    "even_chance_one_group": 9.1,
    "even_chance_all_groups": 30,
}
ACCEPTANCE = {
    "accepted": True, "refusal": None, "charged": {"epsilon": 1.0, "delta": 1e-9}, "run_id": None,
    "answered": False, "account": None,
}  # fmt: skip


def test_the_family_that_is_taken_comes_first_then_thresholds_and_noise() -> None:
    plan = {
        "acceptance": ACCEPTANCE, "left": None, "cost": COST, "families": FAMILIES,
        "columns": [COLUMN], "thresholds": [FEWEST, MOST], "warnings": ["weak"],
    }  # fmt: skip
    lines = question_text(plan).splitlines()[2:]
    assert lines == [
        "Cost        (1, 1e-09), mu 0.2 per unit",
        "Geometric   taken; n count sd 2",
        "Gaussian    not taken; n count sd 2; the limit allows 1 such question",
        "Threshold   if 1 key of a unit counts: tau 5 units; a key has a 50% chance with 6 units",
        "Threshold   if 8 keys count: tau 9 units; a key has a 50% chance with 10 units of one key "
        "each, or 30 of as many keys as count",
        "Noise       n (count): count sd 2, 95% within 4",
        "Warning     weak",
    ]
    one = question_text(plan | {"thresholds": [FEWEST]})
    assert "Threshold   tau 5 units" in one


def test_noise_of_chosen_bounds_is_a_multiple() -> None:
    part = {"what": "sum", "sd": 2.0, "within": 4.0, "times": "high - low"}
    column = COLUMN | {"automatic": True, "null_below": 30, "parts": [part]}
    statement = {
        "plan": "SELECT 1\nFROM t", "columns": [column], "cost": COST, "warnings": [],
        "selection": None, "families": [], "offers": [],
        "by_epsilon": [{"epsilon": 0.5, "columns": [column]}],
    }  # fmt: skip
    text = explanation_text({
        "acceptance": ACCEPTANCE, "warnings": [], "statements": [statement],
        "together": {"epsilon": 1.0, "delta": 1e-5},
    })  # fmt: skip
    assert text.splitlines()[2:] == [
        "Statement 1",
        "  Cost        (1, 1e-09), mu 0.2 per unit",
        "  Noise       n (count): sum sd at most 2, 95% within 4, both times high - low, of the "
        "bounds that the query chooses; NULL if fewer than about 30 units have a value",
        "  Epsilon     0.5      n sum ±4 times high - low",
        "  Plan",
        "    SELECT 1",
        "    FROM t",
        "Together    epsilon 1 at delta 1e-05",
    ]


def test_every_margin_is_in_the_table_of_its_level() -> None:
    """A row for each level; a cell for each kind of figure, ``-`` where a level has none."""
    public = describe(planned(persons()))
    lines = census_text(public).splitlines()
    assert lines[0].startswith("Plan        ") and lines[1].startswith("Guarantee   ")
    kinds = {(f["table"], f["figure"], f["detail"]) for r in public["levels"] for f in r["figures"]}
    for level in public["levels"]:
        [line] = [line for line in lines if line.startswith(f"{level['label']:<14}")]
        cells = line.split()[-len(kinds) :]
        margins = [f"{figure['margin']:,}" for figure in level["figures"]]
        assert sorted(cells) == sorted([*margins, *["-"] * (len(kinds) - len(margins))])


PRODUCT = {
    "product": 0, "queries": 36, "weight": 1.0, "attributes": {"age": "range"}, "rmse": 2.0,
    "least": None, "most": 3.5,
}  # fmt: skip
PLAN: dict[str, Any] = {
    "workload": "ab" * 32, "cells": 8, "queries": 36, "most_answers": 100, "half_width": 2.0,
    "products": [PRODUCT], "guarantee": {"mu": 0.2, "epsilon": 1.0, "delta": 1e-9,
                                         "contributions": 3},
    "objective": "total", "strategy": "ranges", "rmse": 2.0, "floor": 1.9, "gap": 0.001,
    "floor_of": "Gaussian mechanism on these cells", "note": "", "certificate": [], "stored": None,
    "answered_by": "cells", "refused": None, "warnings": ["weak"],
}  # fmt: skip


def test_error_and_floor_are_side_by_side() -> None:
    assert workload_text(PLAN).splitlines() == [
        "Workload    36 queries of 8 cells; abababababababab",
        "Guarantee   (1, 1e-09), mu 0.2; 3 record(s) of a unit",
        "Answers     all, from noisy cells, all of which are published",
        "Strategy    ranges",
        "Error       2: RMSE of a query (weighted)",
        "            an answer of this error has a 95% interval of ±4",
        "Floor       1.9: no Gaussian mechanism on these cells has less (gap 0.001 of the squared "
        "error)",
        "",
        "Queries                                     number        RMSE       least        most",
        "age: range                                      36           2           -         3.5",
        "Warning     weak",
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"objective": "worst"}, "largest standard error of a query"),
        ({"objective": "relative"}, "divided by its norm"),
        ({"answered_by": None, "refused": "too large; ask parts"}, "refuses: too large; ask parts"),
        ({"queries": 101}, "too many for a table of 100: ask for parts with --from"),
        ({"stored": "cache/x"}, "Certificate closed form, with the strategy in cache/x"),
        ({"stored": "x", "certificate": [3]}, "Certificate weights that prove the floor"),
        ({"note": "bounded"}, "            bounded"),
        ({"products": [PRODUCT] * 14}, "... and 2 more products (--json)"),
        ({"products": [PRODUCT | {"attributes": {}, "queries": 10**9}]}, "total    "),
        ({"guarantee": PLAN["guarantee"] | {"mu": None}}, "pure epsilon 1;"),
        ({"guarantee": PLAN["guarantee"] | {"epsilon": None}}, "Guarantee   mu 0.2;"),
    ],
)
def test_what_else_a_plan_says(changes: dict[str, Any], words: str) -> None:
    assert words in workload_text(PLAN | changes) and words not in workload_text(PLAN)


def test_the_family_that_is_taken_comes_first() -> None:
    gaussian = {"mechanism": "gaussian", "taken": False, "rmse": 2.0, "at_least": True}
    geometric = {"mechanism": "geometric", "taken": True, "rmse": None, "refused": "no tables"}
    line = "geometric (taken) cannot: no tables; gaussian at least RMSE 2"
    assert families_line([gaussian, geometric]) == line
    assert f"Mechanism   {line}" in workload_text(PLAN | {"families": [gaussian, geometric]})


def fields(outcome: Outcome) -> dict[str, Any]:
    """The outcome as values for JSON."""
    return dict(msgspec.to_builtins(outcome._asdict()))


def test_words_say_what_it_costs() -> None:
    public = {
        "how": "private", "rule": "R", "bias": "B", "epsilon": 0.5, "delta": 1e-9, "mu": 0.1,
        "reads": ["2024-01-01T00:00:00Z", "2024-01-03T00:00:00Z"],
        "histograms": [{"name": "pairs", "candidates": 7, "rank_error_95": 12.0,
                        "units_for_5_points": 1000, "no_answer_below": 30}], "warnings": [],
    }  # fmt: skip
    rendered = choice_text(public)
    assert rendered.startswith("Cost        (0.5") and "good from 1,000 units" in rendered
    assert "\nReads       records from 2024-01-01T00:00:00Z to 2024-01-03T00:00:00Z\n" in rendered
    assert "without noise" in choice_text({**public, "how": "proxy"})


def test_words_say_what_is_cut() -> None:
    outcome = Outcome(
        job="new", releases="releases-new", how="proxy", contributions=80, bounds={}, cut=0.31,
        sd=232.0,
        per_key=(PerKey(1, 448, 0.07, 128.0), PerKey(4, 200, 0.2, 250.0)), notes=(), run_id=None,
        charged=False, insecure=False,
    )  # fmt: skip
    rendered = outcome_text(fields(outcome), 1_000)
    assert (
        "Cut         about 31% of all pairs" in rendered and "is about 310 short, ±232" in rendered
    )
    assert "or per_key_bound = 1, contributions = 448: cuts about 7%" in rendered
    assert "beyond 4 records of a key" in rendered and "Job         new" in rendered
    assert rendered.endswith("Releases    releases-new\n")
    private = outcome_text(fields(outcome._replace(run_id="ab")), 1_000)
    assert "at least about 31%" in private and "not seen" in private
    old = outcome_text(fields(outcome._replace(cut=None, sd=None, per_key=())), 1_000)
    assert "Cut" not in old and "Noise" not in old


FAULT = {
    "reason": "time", "problem": "its time cannot be read", "records": 2, "no_time": 0,
    "first": [["a.csv", 3], ["b.csv", 1_000]], "fix": "correct the files",
}  # fmt: skip
CHECKED: dict[str, Any] = {
    "read": 1_005, "left_out": 0, "usable": 998, "complete": True, "unusable": [FAULT],
    "units_needed": 1, "most_units_up_to_needed": 4, "beyond_contributions": None,
}  # fmt: skip


def test_every_fault_has_its_place_and_fix() -> None:
    assert check_text(CHECKED, "daily --env prod").splitlines() == [
        "Read        1,005 rows, all of the source",
        "Usable      998 records",
        "Unusable    2 records (0.2%)",
        "  2 with the reason time: its time cannot be read",
        "    first at a.csv, row 3; b.csv, row 1,000 (rows are counted from 0, without header and "
        "blank lines)",
        "    Fix: correct the files.",
        "Appears     yes: a key has 1 unit of one window, enough for a 50% chance of being "
        "published",
        "Nothing was charged or stored. Next: `dpstream plan daily --env prod`.",
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"complete": False}, "the first ones only (--limit)"),
        ({"left_out": 7}, "Left out    7 by query"),
        ({"beyond_contributions": 1_234}, "Not counted 1,234 contributions beyond the bound"),
        ({"usable": 0}, "No record is usable"),
        ({"most_units_up_to_needed": None}, "not counted: too many keys"),
        ({"units_needed": 5}, "nothing is likely: no key has 5 units of one window"),
        ({"units_needed": 5, "complete": False}, "the most is 4, among the rows read"),
        ({"unusable": [FAULT | {"no_time": 1}]}, "Fix: say in the table how its times are written"),
    ],
)
def test_what_else_it_says(changes: dict[str, Any], words: str) -> None:
    assert words in check_text(CHECKED | changes, "a") and words not in check_text(CHECKED, "a")


@pytest.mark.parametrize("changes", [{"units_needed": None}, {"usable": 0}])
def test_public_keys_and_no_records_need_no_units(changes: dict[str, Any]) -> None:
    assert "Appears" not in check_text(CHECKED | changes, "a")
