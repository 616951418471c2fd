"""What is shown of a guarantee is never less than what it is, anywhere in the code."""

import ast
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.figures import down, duration, exact, human, up
from dpstream.accounting.guarantee import describe
from dpstream.accounting.plan.plan import Plan
from dpstream.pipelines.render.job_plan import details_text

ROOT = Path(__file__).parents[2]
FIGURES = st.floats(allow_nan=False, allow_infinity=False, allow_subnormal=True)


@given(figure=FIGURES, digits=st.integers(1, 12))
@example(1.2345644, 6)
@example(1.2345644e-6, 6)
@example(0.1, 1)
@example(999999.5, 6)
@example(-1.5, 1)
def test_up_and_down_bracket_a_figure(figure: float, digits: int) -> None:
    above, below = float(up(figure, digits)), float(down(figure, digits))
    assert below <= figure <= above
    if abs(figure) > 1e-300 and math.isfinite(above - below):  # a subnormal number has fewer digits
        step = 10.0 ** (math.floor(math.log10(abs(figure))) - digits + 1)
        assert above - below <= 1.001 * max(step, math.ulp(figure))


@given(figure=FIGURES)
def test_exact_is_exact(figure: float) -> None:
    assert float(exact(figure)) == figure


def test_what_a_person_wrote_stays_as_it_is() -> None:
    for written in (0.1, 0.3, 1e-9, 6.0, 1.46, 0.4, 1e-6):
        assert up(written) == down(written) == exact(written) == f"{written:g}"
    assert (up(1.2345644), up(1.2345644e-6), up(2e-9 * 1.00001, 3)) == (
        "1.23457", "1.23457e-06", "2.01e-09",
    )  # fmt: skip
    assert (down(1.2345694), down(3.99999, 3)) == ("1.23456", "3.99")
    assert (up(math.inf), down(math.inf), exact(1.46e-6)) == ("inf", "inf", "1.46e-06")
    assert exact(1.2345644) == "1.2345644"


def test_the_plan_prints_no_less_than_it_promises(make_plan: Callable[..., Plan]) -> None:
    plan = make_plan(epsilon=1.2345644, delta=1.2345644e-6, windows=9, period=100_000_000)
    budget = allocate(plan)
    figures = describe(plan, budget)
    assert "(1.23457, 1.23457e-06)-differential privacy" in figures["guarantee"]["text"]
    assert figures["guarantee"]["epsilon"] == json.loads(json.dumps(1.2345644))  # JSON is exact
    lines = [line for line in details_text(plan, budget).splitlines() if "k = " in line]
    assert len(lines) == len(figures["periods"]) == 5
    for line, row in zip(lines, figures["periods"], strict=True):
        words = line.replace(",", "").split()
        printed = [float(words[words.index(name) + 1]) for name in ("mu", "epsilon", "delta")]
        for got, least in zip(printed, (row["mu"], row["epsilon"], row["delta"]), strict=True):
            assert least <= got <= least * 1.01


def _rounded_to_nearest(source: str) -> list[int]:
    """Lines that format a figure of a guarantee by ``:g`` or the like, which may round it down."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FormattedValue) or node.format_spec is None:
            continue
        spec, value = ast.unparse(node.format_spec), ast.unparse(node.value)
        names = {"epsilon", "delta", "mu", "spent", "slack", "tail"}
        called = isinstance(node.value, ast.Call) and ast.unparse(node.value.func) in ("up", "down")
        parts = {part.strip("'\"") for part in value.replace("[", ".").replace("]", "").split(".")}
        if not called and parts & names and spec.rstrip("'\"").endswith(("g", "e", "f")):
            lines.append(node.lineno)
    return lines


def test_the_search_finds_what_it_is_for() -> None:
    assert _rounded_to_nearest("f\"{budget.epsilon:g} {split['mu']:.3g} {delta:.2e}\"") == [1] * 3
    assert _rounded_to_nearest('f"{up(budget.epsilon, 4):<9} {c.sd:.6g} {epsilon}"') == []


@pytest.mark.parametrize("package", ["accounting", "state", "dp_transforms", "pipelines"])
def test_no_figure_of_a_guarantee_is_rounded_to_the_nearest(package: str) -> None:
    violations = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for line in _rounded_to_nearest(path.read_text("utf-8"))
    ]
    assert violations == []


def test_numbers_have_three_digits() -> None:
    numbers = {
        0.0: "0", 1e-9: "1e-9", 0.00099: "9.9e-4", 0.001: "0.001", 0.12345: "0.123", 1.0: "1",
        9.994: "9.99", 10.04: "10", 10.46: "10.5", 99.94: "99.9", 100.4: "100", 12_345.6: "12,346",
        9.99e11: "999,000,000,000", 1e12: "1e12", -2.5: "-2.5", math.inf: "–",
    }  # fmt: skip
    assert {number: human(number) for number in numbers} == numbers and human(None) == "–"


def test_durations() -> None:
    second = 1_000_000
    assert [duration(d * second) for d in (1, 90, 120, 3600, 86400, 604800)] == [
        "1 second",
        "90 seconds",
        "2 minutes",
        "1 hour",
        "1 day",
        "7 days",
    ]
    assert duration(1500) == "1500 microseconds"
