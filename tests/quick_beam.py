"""Beam without what it computes again and again in one process.

Tests run some hundred pipelines in a process.  For each, Beam builds the parsers of its options
about 270 times and takes the arguments of about 5,000 methods: a third of the CPU time of a small
job.  Both depend on nothing but the flags and the method, so they are computed once here; Beam's
own code does everything else.  Processes that tests start have Beam as it is.
"""

import copy
import functools
import types
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.transforms import core

#: Names of a function's arguments, and the values of those with a default.
Arguments = tuple[list[str], list[Any]]

_arguments: WeakKeyDictionary[Any, Arguments] = WeakKeyDictionary()
beam_arguments: Callable[[Any], Arguments] = core.get_function_args_defaults
beam_view = PipelineOptions.view_as


def install() -> None:
    """Let pipelines of this process compute arguments of methods and parse options once."""
    core.get_function_args_defaults = arguments
    PipelineOptions.view_as = view  # type: ignore[method-assign]


def arguments(func: Any) -> Arguments:
    """Arguments of a bound method, computed once for its function; of others as in Beam."""
    if type(func) is not types.MethodType:
        return beam_arguments(func)
    try:
        names, defaults = _arguments[func.__func__]
    except KeyError:
        names, defaults = _arguments[func.__func__] = beam_arguments(func)
    except TypeError:  # what is bound takes no weak reference
        return beam_arguments(func)
    return names[:], defaults[:]


def view(self: PipelineOptions, cls: Any) -> Any:
    """A view made by Beam's code, where a class parses the same flags once."""
    return beam_view(self, functools.partial(_parsed, cls))  # type: ignore[arg-type]


def _parsed(cls: Callable[..., Any], flags: Sequence[str] | None) -> Any:
    """An instance of the class as ``cls(flags)`` makes it, with values of its own."""
    if flags is None:  # those of the command line
        return cls()
    visible, values = _first(cls, tuple(flags))
    options = object.__new__(cls)  # type: ignore[arg-type]
    vars(options).update(
        _flags=flags, _visible_options=Namespace(**_own(visible)), _all_options=_own(values)
    )
    return options


def _own(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: copy.deepcopy(value) if isinstance(value, (list, dict)) else value
        for name, value in values.items()
    }


@functools.lru_cache(1024)
def _first(cls: Callable[..., Any], flags: tuple[str, ...]) -> tuple[dict[str, Any], ...]:
    made = vars(cls(list(flags)))
    assert made.keys() == {"_flags", "_visible_options", "_all_options"}
    return vars(made["_visible_options"]), made["_all_options"]
