"""The flow: records -> BOUND -> AGGREGATE -> SELECT -> PERTURB -> RELEASE, columnar.

``DPStream`` joins the stages; each stage is a module with a pure function behind it (see
``flow.py``).  Names are imported when they are first used: a check of a job does not wait for Beam.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpstream.dp_transforms.flow import Bound, DPStream, Output, Release, run_in_memory
    from dpstream.dp_transforms.noise.secret_source import SecretSource
    from dpstream.dp_transforms.run import Performance, Run, begin_run

__all__ = [
    "Bound",
    "DPStream",
    "Output",
    "Performance",
    "Release",
    "Run",
    "SecretSource",
    "begin_run",
    "run_in_memory",
]
_OF_RUN = {"SecretSource", "Performance", "Run", "begin_run"}


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        home = "dpstream.dp_transforms.run" if name in _OF_RUN else "dpstream.dp_transforms.flow"
        globals()[name] = attribute = getattr(importlib.import_module(home), name)
        return attribute


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
