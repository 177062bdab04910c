"""Read prompts from a file, and write outputs so that an interrupted command can continue."""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO, TypeVar

from flaxen.data.files import decoded, ignore_progress, kind_of, lines, stamps
from flaxen.data.pairs import Template
from flaxen.data.tables import READERS, TableFiles
from flaxen.errors import InputError

if TYPE_CHECKING:
    import numpy

T = TypeVar("T")


@dataclass(frozen=True)
class PromptFile:
    """A file with one prompt per line of text or per row of a table."""

    path: Path
    column: str = "text"

    def __iter__(self) -> Iterator[tuple[str | None, str]]:
        """Yield (id, prompt) in order and in constant memory; the id is None unless the table has a column 'id'."""
        if kind_of(self.path) not in READERS:
            for number, line in enumerate(_drop_last_if_empty(lines(decoded(self.path, "error", ignore_progress))), 1):
                yield None, check_prompt(line, f"{self.path}, line {number}")
            return
        template, has_ids = Template(self.column, "--column"), False

        def choose(columns: list[str], where: str) -> list[str]:
            nonlocal has_ids
            has_ids = "id" in columns
            # The template may use the column "id" too, and a column is read only once.
            return list(dict.fromkeys([*template.columns(columns, where), *(["id"] if has_ids else [])]))

        for where, row in TableFiles((self.path,)).rows(choose, "error", ignore_progress):
            text = check_prompt(template.fill(row, None, where, "error"), where)
            yield (str(row["id"]) if has_ids else None), text


def read_prompts(texts: tuple[str, ...], file: str | None, column: str) -> tuple[Iterable[tuple[str | None, str]], int]:
    """Return the (id, prompt) pairs of --text or --file and their number.

    All prompts are read once to count them, so that an invalid one is reported now and not after hours of work.
    """
    if texts:
        return [(None, text) for text in texts], len(texts)
    if file == "-":
        rows = sys.stdin.read().splitlines()
        if not rows:
            raise InputError("standard input is empty; expected one prompt per line")
        return [(None, check_prompt(line, f"standard input, line {i}")) for i, line in enumerate(rows, 1)], len(rows)
    assert file is not None
    path = Path(file)
    if not path.is_file():
        raise InputError(f"{file} does not exist")
    file_prompts = PromptFile(path, column)
    n = sum(1 for _ in file_prompts)
    if not n:
        raise InputError(f"{file} is empty; expected one prompt per line")
    return file_prompts, n


def check_prompt(prompt: str | None, where: str) -> str:
    """Return the prompt, or raise if it is blank: a blank line is usually a mistake."""
    if not prompt or prompt.isspace():
        raise InputError(f"{where}: the prompt is empty; remove it (--text '' generates without a prompt)")
    return prompt


def _drop_last_if_empty(text_lines: Iterable[str]) -> Iterator[str]:
    """Drop the empty line after the final line break of a file."""
    previous: str | None = None
    for line in text_lines:
        if previous is not None:
            yield previous
        previous = line
    if previous:
        yield previous


def windows(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Split into lists of `size` items; the last one may be shorter."""
    rest = iter(items)
    while window := list(islice(rest, size)):
        yield window


@contextmanager
def progress(what: str, n: int, done: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on a terminal; call the result with the number of finished prompts."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    hidden = not shown or not sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), disable=hidden, transient=True) as bar:
        task = bar.add_task(what, total=n, completed=done)
        yield lambda done: bar.update(task, completed=done)


def checkpoint_stamps(name: str | None, subfolder: str | None = None) -> list[list[Any]] | None:
    """Return path, size and modification time of the files of a checkpoint and its tokenizer, to detect changes."""
    from flaxen.hf import files

    if name is None:
        return None
    directory = files.locate(name, subfolder)
    folders = [directory, files.tokenizer_folder(directory) or directory]
    paths = {path for folder in folders for kind in files.WANTED for path in folder.rglob(kind) if path.is_file()}
    return stamps(tuple(sorted(paths)))


class ResumableLines:
    """A text file that is written in pieces, under a temporary name until it is complete.

    The temporary name depends on `key`, which must contain everything the lines depend on. With the same key, writing
    resumes after `items` complete items of `per_item` lines each; with another key, it starts from the beginning.
    """

    def __init__(self, path: Path, key: dict[str, Any], per_item: int):
        self.path, self.partial = path, _partial(path, key)
        self.items = self._truncate_to_items(per_item) if self.partial.exists() else 0
        self._file: TextIO = self.partial.open("a", encoding="utf-8")

    def _truncate_to_items(self, per_item: int) -> int:
        """Return the number of complete items; an incomplete one at the end is cut off."""
        with self.partial.open("rb") as file:
            n = sum(line.endswith(b"\n") for line in file) // per_item
            file.seek(0)
            size = sum(len(file.readline()) for _ in range(n * per_item))
        os.truncate(self.partial, size)
        return n

    def write(self, new_lines: Iterable[str]) -> None:
        """Append lines and sync them to disk."""
        # Synced now, so that a power failure loses only what was not written yet.
        self._file.writelines(line + "\n" for line in new_lines)
        self._file.flush()
        os.fsync(self._file.fileno())

    def finish(self) -> None:
        self._file.close()
        _complete(self.partial, self.path)

    def close(self) -> None:
        self._file.close()


class ResumableArray:
    """A .npy file of float32 [n, width] that is written in pieces; resumes like `ResumableLines`.

    An item is a group of `per_item` rows. Space is reserved for the header, which is written last.
    """

    def __init__(self, path: Path, key: dict[str, Any], per_item: int, n: int, width: int):
        from io import BytesIO

        from numpy.lib import format

        header = BytesIO()
        format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (n, width)})
        self._header, size = header.getvalue(), 4 * width * per_item
        self.path, self.partial = path, _partial(path, key)
        self._file: BinaryIO = self.partial.open("r+b" if self.partial.exists() else "w+b")
        self.items = max(0, self._file.seek(0, os.SEEK_END) - len(self._header)) // size
        # Cuts off an incomplete item; a new file grows to the size of the header, which is zeros until `finish`.
        self._file.truncate(len(self._header) + self.items * size)
        self._file.seek(0, os.SEEK_END)

    def write(self, rows: "numpy.ndarray") -> None:
        """Append rows and sync them to disk."""
        self._file.write(rows.astype("<f4").tobytes())
        self._sync()

    def finish(self) -> None:
        self._file.seek(0)
        self._file.write(self._header)
        self._sync()
        self._file.close()
        _complete(self.partial, self.path)

    def close(self) -> None:
        self._file.close()

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())


def _partial(path: Path, key: dict[str, Any]) -> Path:
    """Return the temporary name of an incomplete file with this key."""
    digest = hashlib.blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=6).hexdigest()
    return path.with_name(f".{path.name}.{digest}.partial")


def _complete(partial: Path, path: Path) -> None:
    """Rename a complete file to its final name and delete leftovers."""
    partial.replace(path)
    for other in path.parent.glob(f".{path.name}.*.partial"):  # incomplete files with other keys
        other.unlink()
