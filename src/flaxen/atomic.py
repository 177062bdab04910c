"""Files that are whole or not there."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


@contextmanager
def atomic_file(path: Path) -> Iterator[TextIO]:
    """A text file that takes its name, and the place of an older one, when the block has succeeded."""
    fresh = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        with fresh.open("w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def write_bytes(path: Path, data: bytes) -> None:
    """A file of these bytes, in the place of an older one; all of it or nothing."""
    fresh = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        with fresh.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """To the disk, so that a power cut after a rename finds full files."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
