"""The process and its memory."""

import os
import re
import sys

KEPT = 2**29  # bytes
# glibc's malloc: huge pages where the kernel gives them to who asks; and memory that is freed stays with the process.
TUNABLES = ":".join(
    f"glibc.malloc.{name}={value}"
    for name, value in (("hugetlb", 1), ("mmap_threshold", KEPT), ("trim_threshold", KEPT), ("arena_max", 1))
)


def restart_with_tuned_malloc() -> None:
    """Start this program once more, with a malloc that suits XLA. Call it first: what was done before is done twice.

    XLA takes the buffers of a step and gives them back, at every step. Where they come from the kernel each time, it
    clears page after page at their first touch: a tenth of the time of a step on a CPU. So buffers of up to half a
    gigabyte are kept. Larger ones would leave holes of their size, and go back; their pages are huge, and so fewer.
    glibc takes such settings from the environment, when a process starts, and from nowhere else. Where it is older than
    they are, or another library, and where the environment has settings of malloc, nothing happens.
    """
    told = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if told or not sys.platform.startswith("linux") or _glibc() < (2, 35):
        return
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "GLIBC_TUNABLES": TUNABLES})


def _glibc() -> tuple[int, ...]:
    try:
        found = re.fullmatch(r"glibc (\d+)\.(\d+)", os.confstr("CS_GNU_LIBC_VERSION") or "")
    except ValueError:  # another library does not know the name
        found = None
    return tuple(map(int, found.groups())) if found else ()
