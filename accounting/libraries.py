"""The libraries that compute: when each is loaded, and on how many threads.

A program that imports the package, plans a job or asks a question of few rows needs few of their
functions, and does not wait for the rest.

**numba** takes a third of a second to load.  Kernels (`njit`) are compiled when they are first
called, not when their module is imported, so no module but this one imports numba at its top.
Machine code is cached as numba does it: in ``__pycache__`` beside the source, in the user's cache
folder where that is not writable (a read-only installation), or in ``NUMBA_CACHE_DIR``.  Its index
holds the source's time and size and the processor's name, so no wheel can bring it.

**``scipy.special``** is loaded when the first of its functions is needed (`special`).  A command
that needs none (a plan of a session, `--help`) does not wait for SciPy.

**OpenBLAS** runs on one thread while a strategy is solved (`one_thread`), so that a strategy costs
what it costs: two threads that waited for each other on a busy machine took five times the CPU of
one.

**Warnings of Beam.** A filter drops those that Beam logs while it is imported, and no others.  Beam
warns of each missing library of its file systems and of its BigQuery client.  A reader cannot act
on these warnings: a library that a job needs is named when it is needed (`accounting.extras`).
Every import of the package runs this module before any of its modules imports Beam.
"""

import contextlib
import ctypes
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

_PREFIXES, _SUFFIXES = ("scipy_openblas", "openblas"), ("64_", "")


class Kernel:
    """A function that is compiled at its first call.

    It stands for numba's dispatcher wherever numba looks at it: kernels call each other by name,
    and numba then reads the attributes of a dispatcher.

    Args:
        function: the Python function; its arguments and result are of types that numba knows.
        options: arguments of ``numba.njit``.
    """

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        functools.update_wrapper(self, function)
        self.py_func, self.targetoptions = function, options

    @functools.cached_property
    def dispatcher(self) -> Any:
        """numba's dispatcher of the function."""
        import numba

        return numba.njit(**self.targetoptions)(self.py_func)

    @property
    def _numba_type_(self) -> Any:
        return self.dispatcher._numba_type_

    def __call__(self, *arguments: Any) -> Any:
        """The compiled function's result."""
        return self.dispatcher(*arguments)


def njit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return ``numba.njit`` as a decorator, but numba is loaded at the function's first call.

    Args:
        options: those of ``numba.njit``: ``cache``, ``nogil``, ``inline``.
    """
    return lambda function: Kernel(function, options)


class _Special:
    """Stands for the module ``scipy.special``: its functions, by their names."""

    def __getattr__(self, name: str) -> Any:
        import scipy.special

        function = vars(self)[name] = getattr(scipy.special, name)
        return function


special: Any = _Special()


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


#: The loggers' names, and how the messages begin.
_DROPPED = (("apache_beam.io.filesystems", "Failed to import"), (None, "apitools not found"))


def drop_import_warnings() -> None:
    """Drop the warnings that Beam logs at its import, before they reach any handler."""
    for name, beginning in _DROPPED:
        logging.getLogger(name).addFilter(_Dropped(beginning))


class _Dropped(logging.Filter):
    """Drops messages of Beam's modules that begin with a text."""

    def __init__(self, beginning: str) -> None:
        super().__init__()
        self._beginning = beginning

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is shown."""
        dropped = isinstance(record.msg, str) and record.msg.startswith(self._beginning)
        return not (dropped and "apache_beam" in record.pathname)
