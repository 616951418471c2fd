"""What a plan says of mixed cells, what it refuses, and what that costs."""

import msgspec
import numpy as np
import pytest

from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.errors import DpstreamError, PolicyError
from dpstream.accounting.fields import Aggregate
from dpstream.accounting.guarantee import text
from dpstream.accounting.limits import DECODE_BITS, MIXED_BITS
from dpstream.accounting.mixing import Mixing
from dpstream.accounting.plan.cells import Cells, cells_of, checked_mixing
from dpstream.accounting.plan.plan import Plan
from tests.accounting.plan.test_canonical import BASE, MEAN, PEOPLE, SUM, of, with_

FACTOR = np.array([[1.0, 0.5, 0.0], [0.25, 1.0, 0.5], [0.0, 0.25, 1.0]])
MIXING = Mixing([FACTOR, FACTOR.T])


def mixed(plan: Plan = BASE, mixing: Mixing = MIXING) -> Plan:
    return with_(plan, public_keys="22" * 16, cells=cells_of(mixing))


def test_figures_are_rounded_up_to_16_bits() -> None:
    cells = cells_of(MIXING)
    assert cells is not None and cells.size == 9 and cells.digest == MIXING.digest
    rms = float(np.sqrt((MIXING.row_norms**2).mean()))
    for figure, exact in (
        (cells.inverse_norm2, MIXING.inverse_norm2),
        (cells.rms_norm, rms),
        (cells.row_sum, MIXING.row_sum),
    ):
        assert exact <= figure <= exact * (1 + 2.0**-15)
        assert np.frexp(figure)[0] * 2**16 % 1 == 0


def test_without_mixing_the_plan_is_that_of_a_stream() -> None:
    plain = with_(public_keys="22" * 16)
    assert cells_of(None) is None and cells_of(Mixing([np.eye(9)])) is None
    assert mixed(mixing=Mixing([np.eye(3), np.eye(3)])).hash == plain.hash
    assert mixed().hash != plain.hash
    assert plain.design.decode_bits == DECODE_BITS and plain.design.inverse_norm2 == 1
    assert mixed().design.decode_bits == MIXED_BITS


@pytest.mark.parametrize("strategy", ["blt", "dense"])
def test_sensitivity_is_that_of_the_longest_column(strategy: str) -> None:
    """C L |column| sqrt(col2), and nothing else of the budget changes."""
    plan = with_(of(strategy=strategy), aggregates=(BASE.aggregates[0], SUM, MEAN))
    plain, mixed_budget = allocate(with_(plan, public_keys="22" * 16)), allocate(mixed(plan))
    inverse = np.linalg.inv(np.kron(FACTOR, FACTOR.T))
    longest = float(np.sqrt((inverse**2).sum(axis=0).max()))
    assert longest > 1.2
    for before, after in zip(plain.values, mixed_budget.values, strict=True):
        assert after.sensitivity == pytest.approx(before.sensitivity * longest, rel=1e-4)
        assert after.sensitivity >= before.sensitivity * longest
        assert after.sigma == pytest.approx(before.sigma * longest, rel=1e-4)
        assert after.share == before.share


@pytest.mark.parametrize(
    ("field", "plan"),
    [
        ("cells", with_(cells=cells_of(MIXING))),
        ("per_key_bound", mixed(of(per_key_bound=1))),
        ("mechanism.strategy", mixed(of(strategy="tree"))),
        ("mechanism.strategy", mixed(of(strategy="toeplitz"))),
        ("mechanism.mode", mixed(of(mode="rounds"))),
        ("aggregate.kind", mixed(with_(aggregates=(PEOPLE,)))),
        ("time.trigger", mixed(of({"allowed_lateness": 0, "trigger_every": 10_000_000}))),
    ],
)
def test_what_mixing_does_not_go_with(field: str, plan: Plan) -> None:
    with pytest.raises(DpstreamError) as refused:
        plan.check()
    assert refused.value.field == field


def test_wide_values_that_would_wrap_the_finer_lattice() -> None:
    wide = (Aggregate("s", "sum", "x", (0.0, 2.0**26)),)
    allocate(with_(public_keys="22" * 16, aggregates=wide))
    with pytest.raises(DpstreamError) as refused:
        allocate(mixed(with_(aggregates=wide)))
    assert refused.value.field == "aggregate.s.grid"


def test_the_plan_in_words_has_a_typical_cells_error() -> None:
    plan = mixed()
    assert "noise mixed over 9 cells" in text(plan, allocate(plan))


def test_a_run_takes_no_other_mixing() -> None:
    cells = cells_of(MIXING)
    assert cells is not None and checked_mixing(cells, MIXING, 9) is MIXING
    for other, rows in ((None, 9), (Mixing([FACTOR.T, FACTOR]), 9), (MIXING, 8)):
        with pytest.raises(PolicyError, match="not the one"):
            checked_mixing(cells, other, rows)


def test_a_plan_that_understates_the_sensitivity_is_refused() -> None:
    """As of a strategy whose deficient columns were completed after it was measured."""
    cells = cells_of(MIXING)
    assert isinstance(cells, Cells)
    less = msgspec.structs.replace(cells, inverse_norm2=cells.inverse_norm2 * 0.99)
    with pytest.raises(PolicyError, match="would add more"):
        checked_mixing(less, MIXING, 9)
