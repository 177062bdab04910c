"""Documents out of files, one at a time: lines or paragraphs of text, a column of a table."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from flaxen.data.files import Invalid, OnProgress, decoded, ignore_progress, kind_of, lines, named, stamps, stat_of
from flaxen.data.tables import no_column, rows, text_cell

Unit = Literal["line", "paragraph", "file"]


@dataclass(frozen=True)
class TextFiles:
    """The documents of files, one file after the other."""

    paths: tuple[Path, ...]
    column: str | None = None
    unit: Unit = "line"
    invalid: Invalid = "error"

    @property
    def name(self) -> str:
        return named(self.paths)

    @property
    def size(self) -> int | None:
        return sum(stat_of(path).st_size for path in self.paths)

    def texts(self, on_progress: OnProgress = ignore_progress) -> Iterator[str]:
        before = 0

        def heard(position: int) -> None:
            on_progress(before + position)

        for path in self.paths:
            for text in self._of_file(path, heard):
                if text and not text.isspace():
                    yield text
            before += stat_of(path).st_size

    def _of_file(self, path: Path, on_progress: OnProgress) -> Iterator[str | None]:
        if kind_of(path) == ".txt":
            yield from _paragraphs(path, self, on_progress)
            return
        column = self.column

        def choose(columns: list[str], where: str) -> list[str]:
            nonlocal column
            column = choose_column(column, columns, where)
            return [column]

        for where, row in rows(path, choose, self.invalid, on_progress):
            assert column is not None
            yield text_cell(row[column], column, where, self.invalid)

    def identity(self) -> dict[str, Any]:
        return {"files": stamps(self.paths), "column": self.column, "unit": self.unit, "invalid": self.invalid}


def _paragraphs(path: Path, source: TextFiles, on_progress: OnProgress) -> Iterator[str]:
    if source.unit == "file":
        yield "\n".join(lines(decoded(path, source.invalid, on_progress)))
        return
    paragraph: list[str] = []
    for line in chain(lines(decoded(path, source.invalid, on_progress)), [""]):
        if source.unit == "line":
            yield line
        elif line and not line.isspace():
            paragraph.append(line)
        elif paragraph:
            yield "\n".join(paragraph)
            paragraph = []


def choose_column(wanted: str | None, columns: list[str], where: str) -> str:
    """The column that was asked for, or the one that probably holds the text."""
    column = wanted or ("text" if "text" in columns or not columns else columns[0])
    if column not in columns:
        raise no_column(column, columns, where)
    return column
