"""What the process does with memory that was freed."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, resource, threading
from flaxen.malloc import restart_with_tuned_malloc
restart_with_tuned_malloc()
kept = "GLIBC_TUNABLES" in os.environ
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    thread = threading.Thread(target=lambda: b"x" * 2**28)  # 256 MB; XLA's buffers are taken by threads too
    thread.start()
    thread.join()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(kept, faults())
"""


def run(**settings: str) -> tuple[str, int]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))} | settings
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, env=environment)
    kept, faults = done.stdout.split()
    return kept, int(faults)


def test_freed_memory_is_used_again_by_any_thread():
    """The program starts once more for that, unless malloc was told otherwise in the environment."""
    kept, few = run()
    left, many = run(MALLOC_ARENA_MAX="2")
    assert left == "False"
    if kept == "False":
        pytest.skip("this C library cannot be told")
    if many < 1000:
        pytest.skip("its pages are huge")
    assert few < many / 10
