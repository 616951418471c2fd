"""What a run does for the memory of its own process.

Arrays of a large shard are made and dropped all the time.  The C library gives such memory back to
the kernel at once, which clears it each time before it gives it out again: at 59 million records
that was a third of the run's CPU seconds.
"""

import contextlib
import ctypes
import gc
from collections.abc import Iterator

#: `mallopt` of glibc: what is freed at the heap's end is kept up to this many bytes, and blocks
#: from this size on are mapped by themselves (what is the larger one is what is kept in vain).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 1 << 30


@contextlib.contextmanager
def sparing_memory() -> Iterator[None]:
    """Keep freed memory for the next array, and the collector from objects that are there already.

    Beam's modules alone make half a million objects, which each full collection would walk.  How
    memory is kept stays as it is set here after the run: nobody can ask how it was before.
    """
    with contextlib.suppress(AttributeError, OSError):  # of another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
