"""Memory of a process that runs jobs: what is freed is kept for the next array.

Arrays of a large shard are made and dropped all the time.  The C library gives such memory back to
the kernel at once, which clears it each time before it gives it out again: at 59 million records
that was a third of the run's CPU seconds.  Settings of the C library and of Arrow keep it:

* `sparing_memory` keeps what is freed at the end of the heap, and takes large blocks from there.
* `share_one_heap` lets all threads use the heap of the first, because those of other threads end
  at 64 MiB, and Arrow too, because its own allocator gives memory back.  Both decide once: the C
  library when a second thread first allocates, Arrow when it is loaded.  So the command calls this
  before it imports either.  A program that calls dpstream sets ``MALLOC_ARENA_MAX=1`` and
  ``ARROW_DEFAULT_MEMORY_POOL=system`` in its environment.
"""

import contextlib
import ctypes
import gc
import os
from collections.abc import Iterator

#: `mallopt` of glibc: what is freed at the heap's end is kept up to this many bytes, and blocks
#: from this size on are mapped by themselves.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
#: Older versions of it take no more than the second.
_KEPT_BYTES = (1 << 30, 1 << 25)
#: Who has set one of these has decided otherwise.
_SET = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
_SET_HEAPS = ("MALLOC_ARENA_MAX", "MALLOC_ARENA_TEST", "GLIBC_TUNABLES")


def share_one_heap() -> None:
    """Let all threads and Arrow use one heap; call it before Arrow or a second thread is there."""
    if not any(name in os.environ for name in _SET_HEAPS):
        with contextlib.suppress(AttributeError, OSError):  # of another C library
            ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
            os.environ["MALLOC_ARENA_MAX"] = "1"  # of workers, which are further processes
            os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")


@contextlib.contextmanager
def sparing_memory() -> Iterator[None]:
    """Keep freed memory for the next array, and the collector from objects that are there already.

    Beam's modules alone make half a million objects, which each full collection would walk.  Those
    that nothing needs any more stay until the run's end: to find them first takes a tenth of a
    second.  How memory is kept stays as it is set here after the run: nobody can ask how it was.
    """
    if not any(name in os.environ for name in _SET):
        with contextlib.suppress(AttributeError, OSError):  # of another C library
            libc = ctypes.CDLL(None)
            # Without the first the second would only stop the library from adapting.
            if any(libc.mallopt(_M_MMAP_THRESHOLD, size) for size in _KEPT_BYTES):
                libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES[0])
    if gc.get_freeze_count():  # the program around the run has its own way
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
