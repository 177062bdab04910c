"""The process and its memory."""

import ctypes
import os
import sys

# Of mallopt(3).
_ARENA_MAX, _MMAP_THRESHOLD, _TRIM_THRESHOLD = -8, -3, -1
_MOST = 2**29


def keep_freed_memory() -> bool:
    """Memory that is freed stays with the process, up to half a gigabyte: True if the C library does so (glibc does).

    XLA takes the buffers of a step and gives them back, at every step. Where they come from the kernel each time, it
    clears page after page at their first touch: a tenth of the time of a step on a CPU. Larger buffers still do, or the
    peak would grow by as much. Call it before threads start: one heap then serves them all. Settings of malloc in the
    environment are left alone.
    """
    chosen = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if chosen or not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    settings = ((_ARENA_MAX, 1), (_MMAP_THRESHOLD, _MOST), (_TRIM_THRESHOLD, _MOST))
    return mallopt is not None and all(mallopt(name, value) for name, value in settings)
