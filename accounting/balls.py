"""Ball arithmetic (``flint.arb``): its settings are those of the whole process, so they are locked.

A ball contains the exact number, whatever the precision; another thread that changed the
precision could only make it too wide to be of use.

What floats leave open is decided by balls of growing precision (`settled`).  A number is rounded by
floor(2^D x + ROUND_UP): decoded integers are dyadic and would often lie on the boundary of 1/2, and
no dyadic number lies on this one (`ROUND_UP`).
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flint

_LOCK = threading.RLock()


@contextlib.contextmanager
def precision(bits: int) -> Iterator[None]:
    """Compute with this many bits; one thread at a time, may be nested."""
    with _LOCK, flint.ctx.workprec(bits):
        yield


def bits_in_force() -> int:
    """Return the precision in force, in bits."""
    return int(flint.ctx.prec)


def series_quotient(top: Sequence[Any], bottom: Sequence[Any], terms: int) -> list[Any]:
    """Return the first coefficients of top(x) / bottom(x) as balls; bottom[0] must not be 0."""
    with _LOCK:
        before, flint.ctx.cap = flint.ctx.cap, terms
        try:
            quotient = flint.arb_series(list(top), terms) / flint.arb_series(list(bottom), terms)
            if terms > 1 and quotient.prec < terms:
                raise ArithmeticError("a power series was cut short")
            return [quotient[k] for k in range(terms)]
        finally:
            flint.ctx.cap = before


#: Prefixes are rounded by floor(2^D x + ROUND_UP).
ROUND_UP = 0.5 + 2.0**-12 / 3
FIRST_PRECISION = 256
_LAST_PRECISION = 1 << 20


def settled(number: Callable[[int], Any], lattice_bits: int) -> int:
    """Return a real number rounded to a multiple of 2^-lattice_bits, in these units.

    Args:
        number: bits of precision -> a ball that holds it; called at that precision.

    Raises:
        ArithmeticError: no precision up to a million bits settles it.
    """
    bits = FIRST_PRECISION
    while bits <= _LAST_PRECISION:
        with precision(bits):
            up = flint.arb(1) / 2 + flint.arb(1) / (3 << 12)
            integer = (number(bits) * (1 << lattice_bits) + up).floor().unique_fmpz()
        if integer is not None:
            return int(integer)
        bits *= 4
    raise ArithmeticError("a prefix lies on a rounding boundary")
