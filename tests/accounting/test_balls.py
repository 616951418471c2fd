"""Ball arithmetic: one thread at a time has a precision, and nobody else sets it."""

import threading
from fractions import Fraction
from pathlib import Path
from typing import Any

import flint
import pytest

from dpstream.accounting.balls import precision, series_quotient, settled


def test_a_precision_waits_for_another_threads() -> None:
    inside, before = threading.Event(), flint.ctx.prec

    def other() -> None:
        with precision(300):
            inside.set()

    with precision(100):
        thread = threading.Thread(target=other)
        thread.start()
        assert not inside.wait(0.1) and flint.ctx.prec == 100
        with precision(200):  # the same thread may go on
            assert flint.arb(2).sqrt().rad() < flint.arb(2) ** -195
        assert flint.ctx.prec == 100
    assert inside.wait(10)
    thread.join()
    assert flint.ctx.prec == before


def test_an_error_gives_the_precision_back() -> None:
    before = flint.ctx.prec
    with pytest.raises(ZeroDivisionError), precision(77):
        raise ZeroDivisionError
    assert flint.ctx.prec == before


@pytest.mark.parametrize("terms", [1, 2, 50])
def test_quotients_of_series(terms: int) -> None:
    """(1 + x) / (4 - 2x): 1/4, then 3/8 halved each time; also beyond the usual ten terms."""
    before = flint.ctx.cap
    with precision(100):
        quotient = series_quotient([1, 1], [4, -2], terms)
    expected = [Fraction(1, 4), *(Fraction(3, 8) / 2**k for k in range(terms - 1))]
    assert [Fraction(float(ball)) for ball in quotient] == expected
    assert flint.ctx.cap == before
    with precision(100), pytest.raises((ArithmeticError, ValueError)):
        series_quotient([1], [0, 1], max(terms, 2))


def test_settings_are_those_of_this_module_alone() -> None:
    root = Path(__file__).parents[2]
    product = [root / name for name in ("accounting", "state", "dp_transforms", "pipelines")]
    files = [path for folder in product for path in folder.rglob("*.py")]
    users = {path.name for path in files if "flint.ctx" in path.read_text(encoding="utf-8")}
    assert users == {"balls.py"}


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
