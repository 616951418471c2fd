"""The flow: records -> BOUND -> AGGREGATE -> SELECT -> PERTURB -> RELEASE, columnar.

``DPStream`` joins the stages; each stage is a module with a pure twin (see ``flow.py``).
"""

from dp_transforms.flow import Bound, DPStream, Output, Release, run_in_memory
from dp_transforms.run import KeySource, Performance, Run, begin_run

__all__ = [
    "Bound",
    "DPStream",
    "KeySource",
    "Output",
    "Performance",
    "Release",
    "Run",
    "begin_run",
    "run_in_memory",
]
