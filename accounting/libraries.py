"""The libraries that compute: when each is loaded, and on how many threads.

A program that imports the package, plans a job or asks a question of few rows needs few of their
functions, and does not wait for the rest.

**numba** takes a third of a second to load.  Kernels (`njit`) are compiled when they are first
called, not when their module is imported, so no module but this one imports numba at its top.
Machine code is cached as numba does it: in ``__pycache__`` beside the source, in the user's cache
folder where that is not writable (a read-only installation), or in ``NUMBA_CACHE_DIR``.  Its index
holds the source's time and size and the processor's name, so no wheel can bring it.

**numba's own machinery** for compiling takes another fifth of a second, so a kernel that is on disk
is loaded without it (`_load`).  numba loads it itself before it compiles.

**``scipy.special``** is loaded when the first of its functions is needed (`special`), and only its
compiled functions: the rest of the package takes four times as long.  A command that needs none (a
plan of a session, `--help`) does not wait for SciPy.

**Modules that others import and seldom use** (`_DEFERRED`) are imported at once, but their code
runs when one of their attributes is first asked for (`_Deferred`).  Beam imports clients of Pub/Sub
and HTTP for connectors that few programs have.  A program sees no difference, unless a module fails
to load: then it fails where it is used.  Commands never need some libraries (`HIDDEN`); Beam and
Arrow work without them.

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
import importlib
import logging
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
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

        dispatcher = numba.njit(**self.targetoptions)(self.py_func)
        cache: Any = getattr(dispatcher, "_cache", None)
        if hasattr(cache, "_load_overload"):
            cache.load_overload = functools.partial(_load, cache)
        return dispatcher

    @property
    def _numba_type_(self) -> Any:
        return self.dispatcher._numba_type_

    def __call__(self, *arguments: Any) -> Any:
        """The compiled function's result."""
        return self.dispatcher(*arguments)


def _load(cache: Any, signature: Any, context: Any) -> Any:
    """Return a kernel of numba's cache, or None: as numba does, but without loading its compiler.

    Machine code calls functions of numba's runtime by name, so the runtime is made ready first.
    """
    from numba.core.runtime import rtsys

    rtsys.initialize(context)
    return cache._load_overload(signature, context)


def njit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return ``numba.njit`` as a decorator, but numba is loaded at the function's first call.

    Args:
        options: those of ``numba.njit``: ``cache``, ``nogil``, ``inline``.
    """
    return lambda function: Kernel(function, options)


class _Special:
    """Stands for the module ``scipy.special``: its compiled functions, by their names."""

    def __getattr__(self, name: str) -> Any:
        import scipy.special._ufuncs as compiled

        function = vars(self)[name] = getattr(compiled, name)
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


def prepare_imports() -> None:
    """Filter the warnings that Beam logs at its import, and defer modules that are seldom used."""
    for name, beginning in _DROPPED:
        logging.getLogger(name).addFilter(_Dropped(beginning))
    sys.meta_path.insert(0, _Finder)


class _Dropped(logging.Filter):
    """Drops messages of Beam's modules that begin with a text."""

    def __init__(self, beginning: str) -> None:
        super().__init__()
        self._beginning = beginning

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is shown."""
        dropped = isinstance(record.msg, str) and record.msg.startswith(self._beginning)
        return not (dropped and "apache_beam" in record.pathname)


#: Modules whose code runs late, and those of them that are imported and have not run.  A package
#: can be one of them only if its submodules can be imported before its own code has run.
_DEFERRED = {
    *("apache_beam.runners.portability.flink_uber_jar_job_server", "google.cloud.pubsub"),
    *("httplib2", "scipy.special"),
}
_LATE: dict[str, types.ModuleType] = {}
_LOCK = threading.Lock()
#: Libraries that cannot be imported, as if they were not installed: commands never need them.
HIDDEN: set[str] = set()


class _Deferred(types.ModuleType):
    """A module that runs when one of its attributes is first asked for.

    It is then imported once more, into the same object, so that Python's own locks let one thread
    run it while others wait, and remove it again if it fails.
    """

    def __getattr__(self, name: str) -> Any:
        if name != "__path__":  # Python itself asks for that at imports
            with _LOCK:
                if vars(self).pop("__late__", False):
                    del sys.modules[self.__name__]
            importlib.import_module(self.__name__)
        return types.ModuleType.__getattribute__(self, name)

    def __dir__(self) -> list[str]:
        return [*self.__getattr__("__dict__")]

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what a pickle takes for a module: its name."""
        return importlib.import_module, (self.__name__,)


class _LateLoader(SourceFileLoader):
    """Loads a module that runs late: first as a deferred one, and then into the same object."""

    def create_module(self, spec: ModuleSpec) -> types.ModuleType | None:
        """Return the module that is there already, or None for a new one."""
        return _LATE.get(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Leave the module for later, or run it."""
        if isinstance(module, _Deferred):
            super().exec_module(module)
            _LATE.pop(module.__name__).__class__ = types.ModuleType
        else:
            _LATE[module.__name__], module.__class__ = module, _Deferred
            vars(module)["__late__"] = True


class _Finder:
    """Finds modules that run late, and hides libraries."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        """Return the spec of a module that runs late; leave others to the next finder.

        Raises:
            ModuleNotFoundError: the library is hidden.
        """
        if name in HIDDEN:
            raise ModuleNotFoundError(f"{name} is not loaded in commands", name=name)
        spec = PathFinder.find_spec(name, path, target) if name in _DEFERRED else None
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _LateLoader(spec.loader.name, spec.loader.path)
        return spec
