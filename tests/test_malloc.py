"""malloc settings: the process reuses memory that was freed."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, resource, threading
from flaxen.malloc import restart_with_tuned_malloc
restart_with_tuned_malloc()
tuned = "GLIBC_TUNABLES" in os.environ
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    thread = threading.Thread(target=lambda: b"x" * 2**28)  # 256 MB; XLA also allocates in threads
    thread.start()
    thread.join()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(tuned, faults())
"""


def run(**settings: str) -> tuple[str, int]:
    """Run PROGRAM with these environment variables; return whether malloc was tuned, and the number of page faults."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))} | settings
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, env=environment)
    tuned, faults = done.stdout.split()
    return tuned, int(faults)


def test_freed_memory_is_reused_by_any_thread():
    """The program restarts itself with tuned settings, unless the environment already has settings of malloc."""
    tuned, few = run()
    untouched, many = run(MALLOC_ARENA_MAX="2")
    assert untouched == "False"
    if tuned == "False":
        pytest.skip("this C library has no such settings")
    if many < 1000:
        pytest.skip("huge pages are always on, so there are few page faults")
    assert few < many / 10
