"""Freed memory is used again, and the collector looks at a run's own objects only."""

import gc
import os
import subprocess
import sys

import pytest

from dpstream.pipelines.runners.memory import sparing_memory

pytestmark = pytest.mark.usefixtures("unfrozen")

ARRAYS = """
import resource
import numpy as np
from dpstream.pipelines.runners.memory import sparing_memory
with sparing_memory():
    for turn in range(11):
        if turn == 1:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        array = None
        array = np.ones(1 << 24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

FAULTS = 10 * 128 * 2**20 // 2**21
OF_THE_C_LIBRARY = {
    "MALLOC_MMAP_THRESHOLD_": "131072",
    "MALLOC_TRIM_THRESHOLD_": "131072",
    "GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072",
}


def test_objects_that_are_there_are_collected_again_after_a_run() -> None:
    assert gc.get_freeze_count() == 0
    with pytest.raises(ZeroDivisionError), sparing_memory():
        assert gc.get_freeze_count() > 1000
        raise ZeroDivisionError
    assert gc.get_freeze_count() == 0


def new_memory(variable: str | None) -> int:
    """Page faults of ten arrays of 128 MiB, one after the other, with a variable for the C
    library: 64 each where the kernel gives 2 MiB at once, 32768 of 4 KiB."""
    others = {name: value for name, value in os.environ.items() if name not in OF_THE_C_LIBRARY}
    more = {} if variable is None else {variable: OF_THE_C_LIBRARY[variable]}
    out = subprocess.run(
        [sys.executable, "-c", ARRAYS],
        env=others | more,
        capture_output=True,
        text=True,
        check=True,
    )
    return int(out.stdout)


def test_large_arrays_take_memory_that_is_there() -> None:
    assert new_memory(None) < FAULTS // 2


@pytest.mark.parametrize("variable", OF_THE_C_LIBRARY)
def test_who_has_set_the_c_library_has_decided(variable: str) -> None:
    assert new_memory(variable) >= FAULTS


def test_objects_frozen_by_others_stay_so() -> None:
    gc.freeze()
    try:
        with sparing_memory():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
