"""What floats leave open: growing precision, the boundary that no dyadic number has, an end."""

from fractions import Fraction
from typing import Any

import flint
import pytest

from dpstream.accounting.strategies.settle import settled


def of(number: Fraction) -> Any:
    return lambda bits: flint.arb(flint.fmpq(number.numerator, number.denominator))


@pytest.mark.parametrize("bits", [0, 8, 16])
@pytest.mark.parametrize("beside", [Fraction(-1, 1 << 60), Fraction(0), Fraction(1, 1 << 60)])
def test_rounded_at_the_announced_boundary(bits: int, beside: Fraction) -> None:
    up = Fraction(1, 2) + Fraction(1, 3 << 12)
    for number in (Fraction(5, 7) + beside, -up / (1 << bits) + Fraction(1, 1 << 70), Fraction(-9)):
        assert settled(of(number), bits) == (number * (1 << bits) + up).__floor__()


def test_precision_grows_until_it_is_enough() -> None:
    precisions = []

    def number(bits: int) -> Any:
        precisions.append(bits)
        boundary = flint.arb(-1) / 2 - flint.arb(1) / (3 << 12)
        return boundary + flint.arb(2) ** -900

    assert settled(number, 0) == 0
    assert precisions == [256, 1024]


def test_a_number_on_the_boundary_is_not_settled() -> None:
    with pytest.raises(ArithmeticError, match="boundary"):
        settled(lambda bits: flint.arb(-1) / 2 - flint.arb(1) / (3 << 12), 0)
