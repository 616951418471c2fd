"""Ball arithmetic: one thread at a time has a precision, and nobody else sets it."""

import threading
from fractions import Fraction
from pathlib import Path

import flint
import pytest

from dpstream.accounting.balls import precision, series_quotient


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
