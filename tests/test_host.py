"""What the process does with memory that was freed."""

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, threading
from flaxen.host import keep_freed_memory
kept = keep_freed_memory()
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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left as they are")
def test_freed_memory_is_used_again_by_any_thread():
    kept, faults = run()
    assert kept == "True"
    assert faults < 1000  # of 65,536 pages


def test_settings_of_the_environment_are_left_alone():
    kept, faults = run(MALLOC_ARENA_MAX="2")
    assert kept == "False"
    assert faults > 10_000  # so the other test would notice
