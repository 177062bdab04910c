"""Output files that are written in pieces: an interrupted command continues after the last complete piece.

A file has a temporary name until it is complete. The name depends on `key`, which must contain everything that the
output depends on: with another key, writing starts from the beginning.
"""

import hashlib
import json
import os
from io import BytesIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from flaxen.atomic import check_output, claim, commit, explain_errors, leftovers, lock_parent, open_descriptor, remove

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy


class Resumable:
    """A file under its temporary name, locked by this process; `items` complete items are in it already."""

    items: int

    def __init__(self, path: Path, key: dict[str, Any], mode: str):
        digest = hashlib.blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=6).hexdigest()
        self.path, self.target = path, check_output(path)
        with explain_errors(path):
            self.partial, descriptor = claim(self.target, digest)
            self._file: IO = open_descriptor(descriptor, mode)

    def _append(self, data: Any) -> None:
        """Append and flush to disk at once, so that a power failure loses only what was not written yet."""
        with explain_errors(self.path):
            self._file.write(data)
            self._file.flush()
            os.fsync(self._file.fileno())

    def finish(self) -> None:
        """Rename the complete file to its final name, and delete incomplete files with other keys."""
        with explain_errors(self.path):
            commit(self._file, self.partial, self.target)
            with lock_parent(self.target):
                for path in leftovers(self.target, resumable=True):
                    remove(path)
        self.close()

    def close(self) -> None:
        with explain_errors(self.path):  # closing flushes, which fails again after a failed write
            self._file.close()


class ResumableLines(Resumable):
    """A text file of JSON lines; an item is `per_item` lines."""

    def __init__(self, path: Path, key: dict[str, Any], per_item: int):
        super().__init__(path, key, "a")
        self.items = self._truncate_to_items(per_item)

    def _truncate_to_items(self, per_item: int) -> int:
        """Return the number of complete items; cut off an incomplete one at the end, and damage such as zeros."""
        size = items = lines = position = 0
        with self.partial.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n") or not _is_object(line):
                    break
                lines, position = lines + 1, position + len(line)
                if lines % per_item == 0:
                    items, size = items + 1, position
        self._file.truncate(size)
        self._file.seek(size)
        return items

    def write(self, new_lines: "Iterable[str]") -> None:
        """Append lines and flush them to disk."""
        self._append("".join(line + "\n" for line in new_lines))


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


class ResumableArray(Resumable):
    """A .npy file of float32 [n, width]; an item is a group of `per_item` rows.

    Space is reserved for the header, which is written last.
    """

    def __init__(self, path: Path, key: dict[str, Any], per_item: int, n: int, width: int):
        from numpy.lib import format

        header = BytesIO()
        format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (n, width)})
        self._header, size = header.getvalue(), 4 * width * per_item
        super().__init__(path, key, "r+b")
        with explain_errors(path):
            self.items = max(0, self._file.seek(0, os.SEEK_END) - len(self._header)) // size
            # Cuts off an incomplete item; a new file grows to the size of the header, which is zeros until `finish`.
            self._file.truncate(len(self._header) + self.items * size)
            self._file.seek(0, os.SEEK_END)

    def write(self, rows: "numpy.ndarray") -> None:
        """Append rows and flush them to disk."""
        self._append(rows.astype("<f4").tobytes())

    def finish(self) -> None:
        with explain_errors(self.path):
            self._file.seek(0)
            self._file.write(self._header)
        super().finish()
