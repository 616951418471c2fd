"""Ball arithmetic (``flint.arb``): its settings are those of the whole process, so they are locked.

A ball contains the exact number, whatever the precision; another thread that changed the
precision could only make it too wide to be of use.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import flint

_LOCK = threading.RLock()


@contextlib.contextmanager
def precision(bits: int) -> Iterator[None]:
    """Compute with this many bits; one thread at a time, may be nested."""
    with _LOCK, flint.ctx.workprec(bits):
        yield


def bits_in_force() -> int:
    """Bits that are computed with just now."""
    return int(flint.ctx.prec)


def series_quotient(top: Sequence[Any], bottom: Sequence[Any], terms: int) -> list[Any]:
    """First coefficients of top(x) / bottom(x) as balls; bottom[0] must not be 0."""
    with _LOCK:
        before, flint.ctx.cap = flint.ctx.cap, terms
        try:
            quotient = flint.arb_series(list(top), terms) / flint.arb_series(list(bottom), terms)
            if terms > 1 and quotient.prec < terms:
                raise ArithmeticError("a power series was cut short")
            return [quotient[k] for k in range(terms)]
        finally:
            flint.ctx.cap = before
