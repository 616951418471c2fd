"""The mixing of cells' noise: what is certified of its inverse, and what is refused."""

from fractions import Fraction

import flint
import msgspec
import numpy as np
import pytest

from dpstream.accounting import mixing as module
from dpstream.accounting.arrays import Float64
from dpstream.accounting.budget.allocation import allocate
from dpstream.accounting.fields import Aggregate
from dpstream.accounting.limits import DECODE_BITS, MAX_FACTOR, MIXED_BITS
from dpstream.accounting.mixing import Cells, Mixing, cells_of, checked_mixing, inverse_norm2
from dpstream.accounting.plan.plan import Plan
from dpstream.pipelines.render.job_plan import details_text
from tests.accounting.plan.test_plan import BASE, CANONICAL_MEAN, CANONICAL_SUM, PEOPLE, of, with_
from tests.golden.refusals import Refused


def random_factor(size: int, seed: int = 1, spread: float = 0.4) -> Float64:
    rng = np.random.default_rng(seed)
    return np.asarray(np.eye(size) + spread * rng.normal(size=(size, size)))


def exact_norm2(factor: Float64) -> Fraction:
    """The longest column of the exact inverse of these floats."""
    rows = [[flint.fmpq(*v.as_integer_ratio()) for v in row] for row in factor.tolist()]
    inverse = flint.fmpq_mat(rows).inv()
    size = len(factor)
    norms = [sum((inverse[i, c] ** 2 for i in range(size)), flint.fmpq(0)) for c in range(size)]
    return max(Fraction(int(n.p), int(n.q)) for n in norms)


@pytest.mark.parametrize(("size", "seed", "spread"), [(1, 1, 0.2), (2, 5, 0.4), (9, 1, 0.4),
                                                      (9, 2, 2.0), (30, 3, 1.0)])  # fmt: skip
def test_the_bound_is_above_the_exact_inverse_and_near_it(
    size: int, seed: int, spread: float
) -> None:
    factor = random_factor(size, seed, spread)
    exact = exact_norm2(factor)
    assert exact <= Fraction(inverse_norm2(factor)) <= exact * (1 + Fraction(1, 10**6))


def test_of_a_product_the_norms_multiply() -> None:
    mixing = Mixing([random_factor(3), random_factor(4, 2)])
    matrix = np.kron(random_factor(3), random_factor(4, 2))
    assert mixing.shape == (3, 4) and mixing.size == 12 and not mixing.is_identity
    longest = float((np.linalg.inv(matrix) ** 2).sum(axis=0).max())
    assert longest <= mixing.inverse_norm2 <= longest * (1 + 1e-9)
    norms = np.sqrt((matrix**2).sum(axis=1))
    assert np.all(norms <= mixing.row_norms) and mixing.row_norms == pytest.approx(norms)
    sums = float(np.abs(matrix).sum(axis=1).max())
    assert sums <= mixing.row_sum <= sums * (1 + 1e-9)


def singular(size: int) -> Float64:
    factor = random_factor(size)
    factor[-1] = factor[:-1].sum(axis=0)
    return factor


@pytest.mark.parametrize(
    "factor",
    [
        np.zeros((2, 2)),
        np.ones((3, 3)),
        singular(6),
        np.diag([1.0, 1e-18]) + np.array([[0, 1.0], [1e-18, 0]]),
        np.array([[1.0, np.nan], [0, 1]]),
        np.array([[1.0, np.inf], [0, 1]]),
        np.ones((2, 3)),
        np.ones(3),
        np.zeros((0, 0)),
        np.eye(2) * 1e200,
    ],
    ids=range(10),
)
def test_what_is_not_certainly_invertible_is_refused(factor: Float64, refused: Refused) -> None:
    refused(lambda: Mixing([np.eye(2), factor]))


def test_a_thousandth_of_the_identity_is_enough(refused: Refused) -> None:
    """A Gram matrix of rank 2 on 6 cells, as a workload of two queries has it."""
    rows = random_factor(6)[:2]
    gram = rows.T @ rows
    mixed = 0.999 * gram / gram.diagonal().max() + 0.001 * np.eye(6)
    factor = np.linalg.inv(np.linalg.cholesky(mixed).T)
    assert 0.5 < Mixing([factor]).inverse_norm2 < 1.001
    refused(lambda: Mixing([np.asarray(np.linalg.pinv(rows.T @ rows), np.float64)]))


def test_limits(refused: Refused) -> None:
    refused(lambda: Mixing([]))
    refused(lambda: Mixing([np.eye(2048), np.eye(2049)]))
    refused(lambda: Mixing([np.broadcast_to(1.0, (MAX_FACTOR + 1, MAX_FACTOR + 1))]))


def test_digest_and_identity() -> None:
    one, other = (
        Mixing([random_factor(3), random_factor(4)]),
        Mixing([random_factor(4), random_factor(3)]),
    )
    nudged = random_factor(3)
    nudged[0, 1] = np.nextafter(nudged[0, 1], 1)
    digests = {
        m.digest for m in (one, other, Mixing([nudged, random_factor(4)]), Mixing([np.eye(12)]))
    }
    assert len(digests) == 4 and Mixing([random_factor(3), random_factor(4)]).digest == one.digest
    assert Mixing([np.eye(3), np.eye(4)]).is_identity and Mixing([np.eye(3)]).inverse_norm2 >= 1
    assert not Mixing([-np.eye(3)]).is_identity
    with pytest.raises(ValueError, match="read-only"):
        one.factors[0][0, 0] = 2.0


def test_what_was_certified_before_is_taken() -> None:
    once = Mixing([random_factor(3), random_factor(4)])
    again = Mixing([random_factor(3), random_factor(4)], once.inverse_norm2)
    assert (again.inverse_norm2, again.digest) == (once.inverse_norm2, once.digest)


def test_factors_of_other_sizes_are_another_mixing_though_their_numbers_are_the_same() -> None:
    numbers = np.array([2.0, 1.0, 0.5, 3.0, 2.0])
    one = Mixing([numbers[:1].reshape(1, 1), numbers[1:].reshape(2, 2)])
    other = Mixing([numbers[:4].reshape(2, 2), numbers[4:].reshape(1, 1)])
    assert one.size == other.size and one.digest != other.digest
    assert len(one.digest) == 32 and not one.row_norms.flags.writeable


@pytest.mark.parametrize("row", [True, False])
def test_an_inverse_that_is_less_exact_gives_no_smaller_bound(
    row: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it leaves of the identity lies in one row or in one column, and shortens the longest."""
    factor, left = np.diag([0.25, 1.0, 1.0, 1.0]), np.zeros((4, 4))
    left[(0, slice(None)) if row else (slice(None), 0)] = 4e-4
    near = (np.eye(4) - left) @ np.linalg.inv(factor)
    assert (near**2).sum(axis=0).max() < 16 * (1 - 7e-4)
    monkeypatch.setattr(np.linalg, "inv", lambda _: near)
    assert 16 <= inverse_norm2(factor) <= 16 * (1 + 2e-3)


def test_what_floats_may_hide_of_the_rest_is_in_the_bound() -> None:
    """The inverse is exact, the rest found is 0: what is added are units of |Y| |F|."""
    size, far = 40, 2.0**30
    factor = np.eye(size)
    factor[0, -1] = far
    hidden = (size + 2) * 2.0**-53 * 2 * far
    assert inverse_norm2(factor) >= (1 + far**2) / (1 - hidden) ** 2


def test_edges_of_what_is_taken(monkeypatch: pytest.MonkeyPatch, refused: Refused) -> None:
    for scale in (2.0**300, 2.0**-300):
        refused(Mixing, [np.eye(2) * scale])
    assert Mixing([random_factor(3)], 7.0).inverse_norm2 == 7.0
    monkeypatch.setattr(module, "MAX_FACTOR", 3)
    assert Mixing([np.eye(3)]).is_identity
    refused(lambda: Mixing([np.eye(4)]))


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
    plan = with_(
        of(strategy=strategy), aggregates=(BASE.aggregates[0], CANONICAL_SUM, CANONICAL_MEAN)
    )
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
        ("aggregate.kind", mixed(with_(aggregates=(PEOPLE,)))),
        ("time.trigger", mixed(of({"allowed_lateness": 0, "trigger_every": 10_000_000}))),
    ],
)
def test_what_mixing_does_not_go_with(field: str, plan: Plan, refused: Refused) -> None:
    error = refused(plan.check)
    assert error.field == field


def test_wide_values_that_would_wrap_the_finer_lattice(refused: Refused) -> None:
    wide = (Aggregate("s", "sum", "x", (0.0, 2.0**26)),)
    allocate(with_(public_keys="22" * 16, aggregates=wide))
    refused(lambda: allocate(mixed(with_(aggregates=wide))))


def test_the_plan_in_words_has_a_typical_cells_error() -> None:
    plan = mixed()
    assert "noise mixed over 9 cells" in details_text(plan, allocate(plan))


def test_a_run_takes_no_other_mixing(refused: Refused) -> None:
    cells = cells_of(MIXING)
    assert cells is not None and checked_mixing(cells, MIXING, 9) is MIXING
    for other, rows in ((None, 9), (Mixing([FACTOR.T, FACTOR]), 9), (MIXING, 8)):
        refused(checked_mixing, cells, other, rows)


def test_a_plan_that_understates_the_sensitivity_is_refused(refused: Refused) -> None:
    """As of a strategy whose deficient columns were completed after it was measured."""
    cells = cells_of(MIXING)
    assert isinstance(cells, Cells)
    less = msgspec.structs.replace(cells, inverse_norm2=cells.inverse_norm2 * 0.99)
    refused(lambda: checked_mixing(less, MIXING, 9))
