"""When the libraries are loaded: at the first call; and strategies use one thread."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.special

from dpstream.accounting.libraries import Kernel, blas_libraries, njit, one_thread, special


@njit(inline="always")
def twice(value: int) -> int:
    return 2 * value


@njit(nogil=True)
def plus_one(value: int) -> int:
    return value + 1


@njit(nogil=True)
def total(values: np.ndarray) -> int:  # type: ignore[type-arg]
    """Sum of 2 v + 1."""
    running_total = 0
    for value in values:
        running_total += plus_one(twice(value))
    return running_total


def test_kernels_call_each_other_compiled() -> None:
    values = np.arange(10)
    assert total(values) == 100 == sum(2 * v + 1 for v in range(10))
    assert isinstance(total, Kernel) and total.dispatcher.signatures
    assert vars(total)["__name__"] == "total" and total.py_func.__doc__ == total.__doc__


def test_numba_is_loaded_by_the_first_call() -> None:
    """And by nothing before it, in every module with kernels but the one that calls SciPy's."""
    code = """
import sys
from pathlib import Path
import dpstream.dp_transforms.flow, dpstream.accounting.strategies.kernels
import dpstream.dp_transforms.tuning, dpstream.pipelines.stream.run
import numpy as np
from dpstream.state.idtable import IdTable
assert not {"numba", "llvmlite", "scipy"} & set(sys.modules)
IdTable().intern(np.ones((1, 2), np.uint64))
assert "numba" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_second_process_takes_machine_code_from_the_cache(tmp_path: Path) -> None:
    """The first process of a new installation compiles and stores, the next compiles nothing."""
    code = """
import gc
import numpy as np
from dpstream.accounting.libraries import Kernel
from dpstream.state.idtable import IdTable
table = IdTable()
table.intern(np.arange(8, dtype=np.uint64).reshape(4, 2))
called = [k for k in gc.get_objects() if isinstance(k, Kernel) and "dispatcher" in vars(k)]
stats = [kernel.dispatcher.stats for kernel in called if kernel.targetoptions.get("cache")]
print(*(sum(len(part) for part in parts) for parts in (
    [each.cache_hits for each in stats], [each.cache_misses for each in stats])))
"""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", code]
    first, second = (
        subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        for _ in range(2)
    )
    first_hits, first_misses = first.stdout.split()
    second_hits, second_misses = second.stdout.split()
    assert first_hits == second_misses == "0"
    assert first_misses == second_hits != "0"


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


def test_one_thread_and_then_as_before() -> None:
    reads = [get for get, _ in blas_libraries()]
    # Wheels of numpy and scipy bring an OpenBLAS each; another library is left alone.
    assert len(reads) == 2
    before = [get() for get in reads]
    with one_thread():
        assert [get() for get in reads] == [1, 1]
    assert [get() for get in reads] == before
