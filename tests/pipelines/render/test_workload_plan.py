"""The plan of a workload as text."""

from typing import Any

import pytest

from dpstream.pipelines.render.workload_plan import families_line, workload_text

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
