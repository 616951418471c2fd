"""The number of threads of the matrix library: one, so that a strategy costs what it costs.

Two threads of OpenBLAS that wait for each other on a busy machine took five times the CPU of one.
"""

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from typing import Any

_PREFIXES, _SUFFIXES = ("scipy_openblas", "openblas"), ("64_", "")


@functools.cache
def blas_libraries() -> list[tuple[Callable[[], int], Callable[[int], Any]]]:
    """Return (get, set) of each OpenBLAS that numpy and scipy have loaded; of no other library."""
    from numpy.linalg import _umath_linalg
    from scipy.linalg import _fblas

    libraries = []
    for module in (_umath_linalg, _fblas):
        library = ctypes.CDLL(module.__file__)
        for prefix in _PREFIXES:
            for suffix in _SUFFIXES:
                with contextlib.suppress(AttributeError):
                    libraries.append(
                        (
                            getattr(library, f"{prefix}_get_num_threads{suffix}"),
                            getattr(library, f"{prefix}_set_num_threads{suffix}"),
                        )
                    )
    return libraries


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Run matrix products and decompositions on the calling thread alone, in the whole process."""
    before = [(set_count, get()) for get, set_count in blas_libraries()]
    try:
        for set_count, _ in before:
            set_count(1)
        yield
    finally:
        for set_count, threads in before:
            set_count(threads)
