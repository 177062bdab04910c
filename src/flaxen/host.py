"""The process and its memory."""

import ctypes
import os
import sys

# Of mallopt(3).
_ARENA_MAX, _MMAP_THRESHOLD, _TRIM_THRESHOLD = -8, -3, -1
_MOST = 2**29  # bytes


def keep_freed_memory() -> bool:
    """Memory that is freed stays with the process: True if the C library does so (glibc from 2.35 or so on).

    XLA takes the buffers of a step and gives them back, at every step. Where they come from the kernel each time, it
    clears page after page at their first touch: a tenth of the time of a step on a CPU. Buffers of more than half a
    gigabyte still do: kept, they leave holes of their size, and the peak of a step nearly doubles. Call it before JAX
    starts: one heap then serves all its threads.
    Settings of malloc in the environment are left alone.
    """
    chosen = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    mallopt = None if chosen or not sys.platform.startswith("linux") else getattr(ctypes.CDLL(None), "mallopt", None)
    # The first is what older ones refuse; the others are of no use without it.
    settings = ((_MMAP_THRESHOLD, _MOST), (_TRIM_THRESHOLD, _MOST), (_ARENA_MAX, 1))
    return mallopt is not None and all(mallopt(name, value) for name, value in settings)
