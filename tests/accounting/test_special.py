"""SciPy's special functions, loaded when one is needed."""

import subprocess
import sys

import pytest
import scipy.special

from dpstream.accounting import special

MODULES = (
    "gaussian", "budget.thresholds", "tuning.question", "query.calibration", "sessions.calibration"
)  # fmt: skip


def test_functions_are_those_of_scipy() -> None:
    assert special.ndtr is special.ndtr is scipy.special.ndtr
    with pytest.raises(AttributeError):
        _ = special.no_such_function


def test_importing_the_accounting_of_a_session_loads_no_scipy() -> None:
    names = ", ".join(f"dpstream.accounting.{name}" for name in MODULES)
    code = f"import sys, {names}; assert 'scipy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
