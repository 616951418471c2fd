"""Kernels that numba compiles when they are first called, not when their module is imported.

numba takes a third of a second to load, and a program that imports the package, plans a job or
asks a question of few rows calls no kernel.  So no module but this one imports numba at its top.

Machine code is cached as numba does it: in ``__pycache__`` beside the source, in the user's cache
folder where that is not writable (a read-only installation), or in ``NUMBA_CACHE_DIR``.  Its index
holds the source's time and size and the processor's name, so no wheel can bring it.
"""

import functools
from collections.abc import Callable
from typing import Any


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
