"""Plans of questions as text: thresholds, families of noise, points without budget."""

from typing import Any

import numpy as np

from dpstream.accounting.regions.spent import decide, untouched
from dpstream.pipelines.render.question_plan import explanation_text, lacking_lines, question_text
from dpstream.pipelines.session.plan import decision_as_builtins
from tests.pipelines.session.people import PEOPLE, box


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
        "selection": None, "families": [],
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
        "  Plan",
        "    SELECT 1",
        "    FROM t",
        "Together    epsilon 1 at delta 1e-05",
    ]
