"""Freed memory is used again, and the collector looks at a run's own objects only."""

import gc
import resource
import subprocess
import sys

import pytest

from dpstream.pipelines.runners.bounded import sparing_memory

ARRAYS = """
import resource
import numpy as np
from dpstream.pipelines.runners.bounded import sparing_memory
with sparing_memory():
    for turn in range(11):
        if turn == 1:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        some = None
        some = np.ones(1 << 24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.usefixtures("unfrozen")
def test_objects_that_are_there_are_collected_again_after_a_run() -> None:
    assert gc.get_freeze_count() == 0
    with pytest.raises(ZeroDivisionError), sparing_memory():
        assert gc.get_freeze_count() > 1000
        raise ZeroDivisionError
    assert gc.get_freeze_count() == 0


def test_large_arrays_take_memory_that_is_there() -> None:
    out = subprocess.run([sys.executable, "-c", ARRAYS], capture_output=True, text=True, check=True)
    # Ten arrays of 128 MiB: 64 faults each where the kernel gives 2 MiB at once, 32768 of 4 KiB.
    assert int(out.stdout) < 10 * 128 * 2**20 // max(2**21, resource.getpagesize()) // 2
