"""Read prompts from the command line, from a file or from standard input."""

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from flaxen.data.files import decoded, ignore_progress, kind_of, lines, stamps
from flaxen.data.pairs import Template
from flaxen.data.tables import READERS, TableFiles
from flaxen.errors import InputError

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


def file_stamps(file: str | None, prompts: Iterable[tuple[str | None, str]]) -> list[Any] | None:
    """Identify the prompts of --file by its size and modification time, or those of standard input by a digest."""
    if file != "-":
        return None if file is None else stamps((Path(file),))
    digest = hashlib.blake2b(digest_size=16)
    for _, prompt in prompts:
        digest.update(prompt.encode("utf-8", "surrogatepass") + b"\n")
    return [digest.hexdigest()]
