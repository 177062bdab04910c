"""Process-wide settings of the `flaxen` command. Flaxen used as a library changes none of them.

malloc   restart the process once with malloc tuned for XLA (flaxen.malloc.restart_with_tuned_malloc)
cache    keep compiled programs on disk, in $XDG_CACHE_HOME/flaxen/xla or ~/.cache/flaxen/xla
logs     silence the loggers `absl` and `asyncio`, through which orbax reports every file and repeats every error
images   ignore Pillow's warnings, which do not name the file; unreadable images are reported by Flaxen
hook     hide the tracebacks of writes that are cancelled after another write failed; the first error is raised
signals  on SIGTERM and SIGINT, finish and save the current step

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
    """Whether one of these settings is on, that is, not listed in FLAXEN_OFF."""
    return effect not in os.environ.get("FLAXEN_OFF", "").replace(" ", "").split(",")


def cache_compilations() -> None:
    """Cache compiled programs on disk, unless the environment configures a cache. Call it before importing JAX."""
    if not enabled("cache"):
        return
    base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(base / "flaxen" / "xla"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")


def quiet_images() -> None:
    """Ignore Pillow's warnings."""
    if enabled("images"):
        warnings.filterwarnings("ignore", module=r"PIL\.")


def quiet_checkpoints() -> None:
    """Silence log messages about reading and writing checkpoints; errors are still raised.

    Call it after importing orbax, which sets up the loggers.
    """
    if enabled("logs"):
        for name in ("absl", "asyncio"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    if enabled("hook") and not isinstance(sys.unraisablehook, _QuietHook):
        sys.unraisablehook = _QuietHook(sys.unraisablehook)


class _QuietHook:
    """Hide the tracebacks that tensorstore prints for each write that is cancelled after another one failed."""

    def __init__(self, show: Any):
        self._show = show

    def __call__(self, unraisable: Any) -> None:
        if not (unraisable.exc_type is RuntimeError and str(unraisable.exc_value) == "Event loop is closed"):
            self._show(unraisable)


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Record SIGTERM and SIGINT in a list, so that the current step can be finished and saved.

    A second signal raises KeyboardInterrupt.
    """
    received: list[int] = []

    def record(number: int, _: object) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    if not enabled("signals") or threading.current_thread() is not threading.main_thread():
        yield received
        return
    old = {number: signal.signal(number, record) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
