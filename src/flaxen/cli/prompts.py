"""Prompts out of a file, a window at a time; and outputs into a file that a kill does not cost."""

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
    """One prompt on each line of a text, or in each row of a table."""

    path: Path
    column: str = "text"

    def __iter__(self) -> Iterator[tuple[str | None, str]]:
        """(id, prompt), in order and in constant memory; the id is None unless the table has a column of them."""
        if kind_of(self.path) not in READERS:
            for number, line in enumerate(_without_last_end(lines(decoded(self.path, "error", ignore_progress))), 1):
                yield None, filled(line, f"{self.path}, line {number}")
            return
        template, named = Template(self.column, "--column"), False

        def choose(columns: list[str], where: str) -> list[str]:
            nonlocal named
            named = "id" in columns
            return list(dict.fromkeys([*template.columns(columns, where), *(["id"] if named else [])]))

        for where, row in TableFiles((self.path,)).rows(choose, "error", ignore_progress):
            text = filled(template.fill(row, None, where, "error"), where)
            yield (str(row["id"]) if named else None), text


def read_prompts(texts: tuple[str, ...], file: str | None, column: str) -> tuple[Iterable[tuple[str | None, str]], int]:
    """(id, prompt) of each of --text or --file, and how many there are: a wrong one fails now, not after an hour."""
    if texts:
        return [(None, text) for text in texts], len(texts)
    if file == "-":
        typed = sys.stdin.read().splitlines()
        if not typed:
            raise InputError("standard input is empty; expected a prompt on each line")
        return [(None, filled(line, f"standard input, line {i}")) for i, line in enumerate(typed, 1)], len(typed)
    assert file is not None
    path = Path(file)
    if not path.is_file():
        raise InputError(f"no file {file!r}")
    found = PromptFile(path, column)
    n = sum(1 for _ in found)
    if not n:
        raise InputError(f"{file} is empty; expected a prompt on each line")
    return found, n


def filled(prompt: str | None, where: str) -> str:
    """A prompt that is one: an empty line among others is a mistake more often than a wish."""
    if not prompt or prompt.isspace():
        raise InputError(f"{where}: the prompt is empty; remove it (--text '' generates from nothing)")
    return prompt


def _without_last_end(found: Iterable[str]) -> Iterator[str]:
    """A text that ends with a line end has no line behind it."""
    held: str | None = None
    for line in found:
        if held is not None:
            yield held
        held = line
    if held:
        yield held


def windows(items: Iterable[T], size: int) -> Iterator[list[T]]:
    rest = iter(items)
    while window := list(islice(rest, size)):
        yield window


@contextmanager
def progress(what: str, n: int, done: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal; it hears how many prompts are done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    hidden = not shown or not sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), disable=hidden, transient=True) as bar:
        task = bar.add_task(what, total=n, completed=done)
        yield lambda done: bar.update(task, completed=done)


def checkpoint_stamps(name: str | None, subfolder: str | None = None) -> list[list[Any]] | None:
    """What changes when a file of a checkpoint, or of the tokenizer beside it, does."""
    from flaxen.hf import files

    if name is None:
        return None
    directory = files.locate(name, subfolder)
    folders = [directory, files.tokenizer_folder(directory) or directory]
    found = {path for folder in folders for kind in files.WANTED for path in folder.rglob(kind) if path.is_file()}
    return stamps(tuple(sorted(found)))


class ResumableLines:
    """A file of lines that is written in pieces and takes its name when it is complete.

    What was written before a kill is found again by `key`, which says all that the lines depend on; `items` is how many
    there are, of `per_item` lines each. With another key it begins anew.
    """

    def __init__(self, path: Path, key: dict[str, Any], per_item: int):
        self.path, self.partial = path, _partial(path, key)
        self.items = self._kept(per_item) if self.partial.exists() else 0
        self._file: TextIO = self.partial.open("a", encoding="utf-8")

    def _kept(self, per_item: int) -> int:
        """How many whole items there are; what a kill left of another is dropped."""
        with self.partial.open("rb") as file:
            n = sum(line.endswith(b"\n") for line in file) // per_item
            file.seek(0)
            size = sum(len(file.readline()) for _ in range(n * per_item))
        os.truncate(self.partial, size)
        return n

    def write(self, written: Iterable[str]) -> None:
        """These lines, to the disk."""
        self._file.writelines(line + "\n" for line in written)
        self._file.flush()
        os.fsync(self._file.fileno())

    def finish(self) -> None:
        self._file.close()
        _complete(self.partial, self.path)

    def close(self) -> None:
        self._file.close()


class ResumableArray:
    """As `ResumableLines`, but a .npy file of `n` rows of `width` float32 numbers, which are kept in whole groups of
    `per_item` rows. Its header is written last."""

    def __init__(self, path: Path, key: dict[str, Any], per_item: int, n: int, width: int):
        from io import BytesIO

        from numpy.lib import format

        header = BytesIO()
        format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (n, width)})
        self._header, size = header.getvalue(), 4 * width * per_item
        self.path, self.partial = path, _partial(path, key)
        self._file: BinaryIO = self.partial.open("r+b" if self.partial.exists() else "w+b")
        self.items = max(0, self._file.seek(0, os.SEEK_END) - len(self._header)) // size
        self._file.truncate(len(self._header) + self.items * size)
        self._file.seek(0, os.SEEK_END)

    def write(self, rows: "numpy.ndarray") -> None:
        """These rows, to the disk."""
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
    """The file that holds what is written so far, with these settings."""
    digest = hashlib.blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=6).hexdigest()
    return path.with_name(f".{path.name}.{digest}.partial")


def _complete(partial: Path, path: Path) -> None:
    partial.replace(path)
    for other in path.parent.glob(f".{path.name}.*.partial"):  # of other settings
        other.unlink()
