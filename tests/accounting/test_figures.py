"""What is shown of a guarantee is never less than what it is, anywhere in the code.

Coded errors: a field, a rule and a fix, for people, machines and other processes.

Limits keep the reasons that stand beside them: integers, services, waiting, defaults.

The names of array types are those of the dtypes they annotate; products of many arrays.

What is warned of and what is refused: at the borders, in figures that are never too small.

The parts of a plan that name columns: bounds on a grid, and no word that nobody reads.
"""

import ast
import inspect
import json
import math
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dpstream.accounting import arrays, limits
from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.errors import (
    DpstreamError,
    InvariantError,
    PolicyError,
    RunError,
    UsageError,
    closest,
    column_list,
    instance,
    required,
)
from dpstream.accounting.fields import Aggregate, Field
from dpstream.accounting.figures import down, duration, exact, human, up
from dpstream.accounting.guarantee import describe
from dpstream.accounting.plan.plan import Plan
from dpstream.accounting.query.grids import grids_of
from dpstream.accounting.query.plan import QueryColumn, QueryPlan
from dpstream.accounting.strength import (
    MOST_DELTA,
    check_delta,
    weaknesses,
    weaknesses_of_budget,
    weaknesses_of_mu,
    weaknesses_of_rho,
)
from dpstream.pipelines.render.job_plan import details_text
from tests.golden.refusals import Refused

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


def test_errors_travel_between_processes() -> None:
    import pickle

    error = UsageError("a.b", "rule", "fix")
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert isinstance(copy, DpstreamError)
    assert copy.as_dict() == error.as_dict() and str(copy) == "a.b: rule. Fix: fix."
    assert error.as_dict() == {
        "error": "usage", "exit_code": 2, "field": "a.b", "rule": "rule", "fix": "fix",
    }  # fmt: skip


def test_a_near_name_is_suggested_and_the_others_are_listed() -> None:
    fix = "did you mean 'epsilon'? known here: delta, epsilon"
    assert closest("epsilom", ["epsilon", "delta"]) == fix
    assert closest("zzz", ["b", "a"]) == "known here: a, b"
    assert column_list(["Patient ID", "ward", "", "a\nb", "x" * 101]) == "'Patient ID', ward"
    assert column_list(f"c{n}" for n in range(60)).endswith("c49, ...")
    assert closest("zzz", []) == "known here: none"
    assert closest("zzz", (f"c{k:04}" for k in range(1_050))).endswith("c0049, and 1,000 more")


@pytest.mark.parametrize(
    ("kind", "code", "word"),
    [(UsageError, 2, "usage"), (PolicyError, 3, "refused"), (RunError, 4, "failed")],
)
def test_scripts_tell_them_apart_by_exit_code_and_word(
    kind: type[DpstreamError], code: int, word: str
) -> None:
    error = kind("store", "is busy", "wait")
    assert error.exit_code == code and error.as_dict()["exit_code"] == code
    assert error.as_dict()["error"] == word
    assert isinstance(error, DpstreamError) and (error.field, error.rule, error.fix) == (
        "store", "is busy", "wait",
    )  # fmt: skip


def test_values_that_must_be_there_and_of_a_kind() -> None:
    assert required(0, "a number is there") == 0 and instance(True, int) is True
    with pytest.raises(InvariantError, match="a number is there"):
        required(None, "a number is there")
    with pytest.raises(InvariantError, match="str is no int"):
        instance("1", int)


def reasonless(source: str) -> list[str]:
    """Limits above whose group of lines no reason stands."""
    lines, names = source.splitlines(), []
    for node in ast.parse(source).body:
        if not isinstance(node, ast.Assign):
            continue
        at = node.lineno - 1
        while at > 0 and lines[at - 1].strip() and not lines[at - 1].startswith("#"):
            at -= 1
        if at == 0 or not lines[at - 1].startswith("#:"):
            names.append(ast.unparse(node.targets[0]))
    return names


def test_each_has_its_reason() -> None:
    names = reasonless(inspect.getsource(limits))
    assert names == ["MICROS_PER_SECOND"]  # no limit, a unit
    assert reasonless('"""M."""\n\nMOST = 3\n#: Why.\nLEAST = 1\n') == ["MOST"]


def test_all_are_positive_numbers() -> None:
    for name, value in vars(limits).items():
        if name.isupper():
            figures = value.values() if isinstance(value, dict) else (value,)
            for figure in figures:
                assert isinstance(figure, int | float) and 0 < figure < math.inf, name


def test_sums_on_the_grid_fit_into_64_bits() -> None:
    """A key's sum at its largest, as decoded, and noise beside it."""
    largest = limits.MAX_GRID_VALUE * limits.MAX_PAIRS << limits.DECODE_BITS
    assert largest <= 1 << 62
    assert limits.MAX_REAL_SIGMA * (1 << limits.DECODE_BITS) < 2.0**53


def test_numbers_of_triggers_fit_their_types() -> None:
    assert limits.MAX_TRIGGERS.bit_length() == 21  # levels of a path's state
    assert limits.MAX_DENSE_TRIGGERS <= limits.MAX_MIXED_TRIGGERS <= limits.MAX_TRIGGERS
    # 19 numbers a trigger of at most 5 characters, committed in one cell.
    assert limits.MAX_DENSE_TRIGGERS * 19 * 5 < limits.CELL_CHARACTERS
    assert limits.MAX_TRIGGER_TIME < (1 << 31) - 1
    seconds_of_life = limits.LEAST_LIFE / limits.MICROS_PER_SECOND
    assert seconds_of_life / 86_400 >= 366 and limits.MAX_TRIGGER_TIME / seconds_of_life > 67


def test_defaults_lie_within_what_may_be_asked_for() -> None:
    assert limits.BATCH_ROWS <= limits.SPLIT_BUFFER_ROWS
    assert limits.MAX_WEIGHTED <= limits.MAX_CONTRIBUTIONS <= limits.MAX_PAIRS


def test_spanners_own_limits_are_kept() -> None:
    """80,000 mutations and 100 MiB of a commit, 10 MiB and 2,621,440 characters of a cell."""
    assert limits.COMMIT_MUTATIONS <= 80_000 and limits.COMMIT_BYTES < 100 << 20
    assert limits.CELL_BYTES < 10 << 20 and limits.CELL_CHARACTERS < 2_621_440
    assert limits.CELL_BYTES < limits.COMMIT_BYTES


def test_a_lost_call_leaves_time_for_another() -> None:
    assert 2 * limits.CALL_SECONDS <= limits.COMMIT_RETRY_SECONDS


def test_products_are_in_order() -> None:
    a, b, c = np.arange(2.0), np.arange(3.0), np.arange(1.0, 3.0)
    assert arrays.kron([a, b, c]).tolist() == [x * y * z for x in a for y in b for z in c]
    assert arrays.kron([]).tolist() == [1.0]


def factor(text: str) -> float:
    """The factor of the odds that a warning names."""
    [number] = re.findall(r"by a factor of up to ([0-9,.e]+)", text)
    return float(number.replace(",", ""))


def test_borders() -> None:
    assert weaknesses(10.0, 1e-4) == []
    assert len(weaknesses(10.000001, 0.0)) == 1
    assert len(weaknesses(1.0, 1.0001e-4)) == 1
    assert len(weaknesses(11.0, 0.5)) == 2


@pytest.mark.parametrize("epsilon", [10.1, 12.0, 24.402, 50.0, 690.0])
def test_the_factor_is_e_to_the_epsilon_rounded_up(epsilon: float) -> None:
    [warning] = weaknesses(epsilon, 0.0)
    assert 1 <= factor(warning) / math.exp(epsilon) < 1.01


def test_what_is_beyond_floats_is_warned_of() -> None:
    [warning] = weaknesses(1000.0, 0.0)
    assert "1e435;" in warning  # e^1000 is 1.97e434
    [warning] = weaknesses(math.inf, 0.0)
    assert "infinity" in warning
    assert weaknesses_of_rho(math.inf)


@pytest.mark.parametrize(
    ("delta", "units"), [(0.01, "one unit in 100;"), (0.03, "one unit in 33;"),
                         (1.1e-4, "one unit in 9,090;"), (0.9, "every second unit or more;")],
)  # fmt: skip
def test_a_delta_in_units(delta: float, units: str) -> None:
    [warning] = weaknesses(1.0, delta)
    assert units in warning


def test_other_terms() -> None:
    assert weaknesses_of_mu(1.0) == weaknesses_of_rho(0.5) == []
    [of_mu] = weaknesses_of_mu(2.0)
    [of_rho] = weaknesses_of_rho(2.0)
    assert "mu 2," in of_mu and "rho 2," in of_rho
    # rho is mu^2 / 2: its epsilon follows from less, so that it is larger.
    assert factor(weaknesses_of_mu(2.0)[0]) <= factor(of_rho)
    assert weaknesses_of_budget("epsilon", 12.0) == weaknesses(12.0, 0.0)
    assert weaknesses_of_budget("rho", 2.0) == weaknesses_of_rho(2.0)


def test_a_large_delta_is_refused_unless_it_is_wanted(refused: Refused) -> None:
    check_delta(MOST_DELTA, False)
    check_delta(0.5, True)
    refused(
        lambda: check_delta(0.0100001, False, "budget.delta", "mechanism.allow_large_delta = true")
    )


def test_grid_bounds_snap_inward_exactly() -> None:
    assert Aggregate("s", "sum", "x", (0.1, 0.7), 0.1).grid_bounds() == (1, 7)
    assert Aggregate("s", "sum", "x", (-0.25, 0.99), 0.5).grid_bounds() == (0, 1)
    assert Aggregate("s", "sum", "x", (-1e-3, 1e3), 1e-3).grid_bounds() == (-1, 10**6)
    with pytest.raises(ValueError, match="bounds"):
        Aggregate("n", "count").grid_bounds()


@pytest.mark.parametrize("bound", [0.1, 0.3, 0.7, 1.1, 2.2, 1e-3])
def test_a_bound_on_the_grid_is_kept_whatever_floats_make_of_it(bound: float) -> None:
    """In floats 0.7 / 0.1 and 0.3 / 0.1 lie below the whole numbers they are."""
    for size in (1, 3, 7, 1000):
        column = Aggregate("s", "sum", "x", (-bound, float(f"{bound * size:.9g}")), bound)
        assert column.grid_bounds() == (-1, size)


@pytest.mark.parametrize("grid", [2.0**-bits for bits in range(-3, 60)])
def test_floats_on_a_grid_of_a_power_of_two_are_that_many_steps(grid: float) -> None:
    """The decimal of 2^-24 has 18 digits, of which a float shows 16: a number above it."""
    for low, high in ((0, 1 << 24), (-3, 7), (-(1 << 31) + 1, 2**32 - 5)):
        assert Aggregate("s", "sum", "x", (low * grid, high * grid), grid).grid_bounds() == (
            low,
            high,
        )
        column = QueryColumn("c", "sum", low * grid, high * grid, grid=grid)
        assert grids_of(QueryPlan(1.0, 0.0, 1, None, "auto", False, columns=(column,))) == {
            "c": (grid, low, high)
        }


def test_bounds_beside_the_lines_of_a_power_of_two_snap_inward() -> None:
    for grid in (0.5, 2.0**-24):
        for low, high in ((-0.4, 0.7), (0.1, 0.30000000000000004)):
            steps = (
                math.ceil(Fraction(low) / Fraction(grid)),
                math.floor(Fraction(high) / Fraction(grid)),
            )
            assert Aggregate("s", "sum", "x", (low, high), grid).grid_bounds() == steps


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Field, '{"column": "user", "typ": "int"}'),
        (Field, '{"column": "user", "type": "float"}'),
        (Aggregate, '{"name": "n", "kind": "count", "clamps": [0, 1]}'),
        (Aggregate, '{"name": "n", "kind": "median"}'),
    ],
)
def test_a_word_that_nobody_reads_is_refused(kind: type, text: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=kind)
    assert msgspec.json.decode('{"column": "user"}', type=Field) == Field("user", "string")
