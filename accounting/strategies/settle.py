"""What floats leave open is decided in ball arithmetic of growing precision.

A number is rounded by floor(2^D x + ROUND_UP): decoded integers are dyadic and would often lie on
the boundary of 1/2, and no dyadic number lies on this one (``convolution.ROUND_UP``).
"""

from collections.abc import Callable
from typing import Any

import flint

from dpstream.accounting.balls import precision

_FIRST_PRECISION = 256
_LAST_PRECISION = 1 << 20


def settled(number: Callable[[int], Any], lattice_bits: int) -> int:
    """A real number rounded to a multiple of 2^-lattice_bits, in these units.

    Args:
        number: bits of precision -> a ball that holds it; called at that precision.

    Raises:
        ArithmeticError: no precision up to a million bits settles it.
    """
    bits = _FIRST_PRECISION
    while bits <= _LAST_PRECISION:
        with precision(bits):
            up = flint.arb(1) / 2 + flint.arb(1) / (3 << 12)
            integer = (number(bits) * (1 << lattice_bits) + up).floor().unique_fmpz()
        if integer is not None:
            return int(integer)
        bits *= 4
    raise ArithmeticError("a prefix lies on a rounding boundary")
