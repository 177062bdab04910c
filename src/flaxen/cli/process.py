"""What the `flaxen` command does to its own process. Used as a library, Flaxen does none of it.

malloc   restarts the process once, with a malloc that suits XLA (flaxen.malloc.settle_memory)
cache    keeps compiled programs on disk, in flaxen/xla of $XDG_CACHE_HOME or ~/.cache
logs     silences the loggers `absl` and `asyncio`, through which orbax reports every file and repeats every error
images   ignores Pillow's warnings, which name no file; an image that cannot be read is reported by name
hook     drops the tracebacks of writes that end after one has failed; the first error is raised
signals  lets the current step end and be saved on SIGTERM and SIGINT

Each can be turned off by name: FLAXEN_OFF=cache,logs flaxen train …
"""

import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def enabled(effect: str) -> bool:
    return effect not in os.environ.get("FLAXEN_OFF", "").replace(" ", "").split(",")


def cache_compilations() -> None:
    """Keep compiled programs on disk between runs, unless the environment says where. Call it before importing JAX."""
    if not enabled("cache"):
        return
    base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(base / "flaxen" / "xla"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")


def quiet_images() -> None:
    if enabled("images"):
        warnings.filterwarnings("ignore", module=r"PIL\.")


def quiet_checkpoints() -> None:
    """Errors of reading and writing checkpoints are raised; nothing else is said of them. Call it after orbax is
    imported, which sets up the loggers."""
    if enabled("logs"):
        for name in ("absl", "asyncio"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    if enabled("hook") and not isinstance(sys.unraisablehook, _QuietHook):
        sys.unraisablehook = _QuietHook(sys.unraisablehook)


class _QuietHook:
    """When one write fails, tensorstore prints a traceback for each that ends later. The first error is raised."""

    def __init__(self, show: Any):
        self._show = show

    def __call__(self, lost: Any) -> None:
        if not (lost.exc_type is RuntimeError and str(lost.exc_value) == "Event loop is closed"):
            self._show(lost)


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collects SIGTERM and SIGINT, so that the current step can end and be saved. The second one interrupts."""
    received: list[int] = []

    def note(number: int, _: object) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    if not enabled("signals") or threading.current_thread() is not threading.main_thread():
        yield received
        return
    old = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
