"""The functions of ``scipy.special``, which is loaded when the first of them is needed.

A command that needs none (a plan of a session, `--help`) does not wait for SciPy.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    import scipy.special

    function = globals()[name] = getattr(scipy.special, name)
    return function
