"""Beam without what it computes again and again in one process.

Tests run some hundred pipelines in a process.  For each, Beam builds the parsers of its options
about 270 times and takes the signatures of about 5,000 methods: a third of the CPU time of a small
job.  Both depend on nothing but the flags and the method, so they are computed once here; Beam's
own code does everything else.  Processes that tests start have Beam as it is.
"""

import copy
import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.transforms import core
from apache_beam.typehints import decorators

_signatures: WeakKeyDictionary[Any, inspect.Signature] = WeakKeyDictionary()
beam_signature: Callable[[Any], inspect.Signature] = decorators.get_signature
beam_view = PipelineOptions.view_as


def install() -> None:
    """Let pipelines of this process compute signatures and parse options once."""
    decorators.get_signature = core.get_signature = signature
    PipelineOptions.view_as = view  # type: ignore[method-assign]


def signature(func: Any) -> inspect.Signature:
    """The signature of a bound method, computed once for its function; of others as in Beam."""
    if type(func) is not types.MethodType:
        return beam_signature(func)
    try:
        return _signatures[func.__func__]
    except KeyError:
        return _signatures.setdefault(func.__func__, beam_signature(func))
    except TypeError:  # what is bound takes no weak reference
        return beam_signature(func)


def view(self: PipelineOptions, cls: Any) -> Any:
    """A view made by Beam's code, where a class parses the same flags once."""
    return beam_view(self, functools.partial(_parsed, cls))  # type: ignore[arg-type]


def _parsed(cls: Callable[..., Any], flags: Sequence[str] | None) -> Any:
    """An instance of the class as ``cls(flags)`` makes it, with values of its own."""
    if flags is None:  # those of the command line
        return cls()
    options = object.__new__(cls)  # type: ignore[arg-type]
    vars(options).update(copy.deepcopy(_first(cls, tuple(flags))), _flags=flags)
    return options


@functools.lru_cache(1024)
def _first(cls: Callable[..., Any], flags: tuple[str, ...]) -> dict[str, Any]:
    made: dict[str, Any] = vars(cls(list(flags)))
    return made
