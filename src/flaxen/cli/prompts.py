"""Prompts out of a file, a window at a time; and outputs into a file that a kill does not cost."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TextIO, TypeVar

from flaxen.data.files import decoded, kind_of, lines, silent
from flaxen.data.pairs import Template
from flaxen.data.tables import READERS, TableFiles
from flaxen.errors import InputError

T = TypeVar("T")


@dataclass(frozen=True)
class PromptFile:
    """One prompt on each line of a text, or in each row of a table."""

    path: Path
    column: str = "text"

    def __iter__(self) -> Iterator[tuple[str | None, str]]:
        """(id, prompt), in order and in constant memory; the id is None unless the table has a column of them."""
        if kind_of(self.path) not in READERS:
            for number, line in enumerate(_without_last_end(lines(decoded(self.path, "error", silent))), 1):
                yield None, filled(line, f"{self.path}, line {number}")
            return
        template, named = Template(self.column, "--column"), False

        def choose(columns: list[str], where: str) -> list[str]:
            nonlocal named
            named = "id" in columns
            return list(dict.fromkeys([*template.columns(columns, where), *(["id"] if named else [])]))

        for where, row in TableFiles((self.path,)).rows(choose, "error", silent):
            text = filled(template.fill(row, None, where, "error"), where)
            yield (str(row["id"]) if named else None), text


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


class Resumable:
    """A file of lines that is written in pieces and takes its name when it is complete.

    What was written before a kill is found again by `key`, which says all that the lines depend on; `items` is how many
    there are, of `per_item` lines each. With another key it begins anew.
    """

    def __init__(self, path: Path, key: dict[str, Any], per_item: int):
        digest = hashlib.blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=6).hexdigest()
        self.path, self.partial = path, path.with_name(f".{path.name}.{digest}.partial")
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
        self.partial.replace(self.path)
        for other in self.path.parent.glob(f".{self.path.name}.*.partial"):  # of other settings
            other.unlink()

    def close(self) -> None:
        self._file.close()
