"""Read documents from files, one at a time: lines or paragraphs of text, or a column of a table."""

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
    """The documents of several files, one file after the other."""

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
        """Iterate over the documents that are not blank."""
        offset = 0  # bytes of the files read so far

        def report(position: int) -> None:
            on_progress(offset + position)

        for path in self.paths:
            for text in self._read_file(path, report):
                if text and not text.isspace():
                    yield text
            offset += stat_of(path).st_size

    def _read_file(self, path: Path, on_progress: OnProgress) -> Iterator[str | None]:
        """Iterate over the documents of one file, blank ones included."""
        if kind_of(path) == ".txt":
            yield from _read_text(path, self, on_progress)
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
        """Return what the texts depend on, as JSON."""
        return {"files": stamps(self.paths), "column": self.column, "unit": self.unit, "invalid": self.invalid}


def _read_text(path: Path, source: TextFiles, on_progress: OnProgress) -> Iterator[str]:
    """Split a .txt file into lines or paragraphs, or return it as one document."""
    if source.unit == "file":
        yield "\n".join(lines(decoded(path, source.invalid, on_progress)))
        return
    paragraph: list[str] = []
    for line in chain(
        lines(decoded(path, source.invalid, on_progress)), [""]
    ):  # the empty line ends the last paragraph
        if source.unit == "line":
            yield line
        elif line and not line.isspace():
            paragraph.append(line)
        elif paragraph:
            yield "\n".join(paragraph)
            paragraph = []


def choose_column(requested: str | None, columns: list[str], where: str) -> str:
    """Return the requested column; by default `text` if it exists, else the first one."""
    column = requested or ("text" if "text" in columns or not columns else columns[0])
    if column not in columns:
        raise no_column(column, columns, where)
    return column
