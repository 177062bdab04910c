"""Rows of tables: JSON (lines or one array), CSV, TSV and Parquet, one row at a time."""

import csv
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from flaxen.data.files import BLOCK, Invalid, OnProgress, decoded, kind_of, lines, named, stamps, stat_of
from flaxen.errors import InputError, did_you_mean

SURROGATE = re.compile("[\ud800-\udfff]")
Row = tuple[str, dict[str, Any]]  # where it stands, and its cells by column
Choose = Callable[[list[str], str], list[str]]  # from the columns that there are, and where, the wanted ones


@runtime_checkable
class Table(Protocol):
    """Rows in order."""

    @property
    def name(self) -> str:
        """For messages."""

    @property
    def size(self) -> int | None:
        """Bytes on disk, which `on_progress` counts up to; None if that is not known."""

    def rows(self, choose: Choose, invalid: Invalid, on_progress: OnProgress) -> Iterator[Row]:
        """The chosen columns of each row, in constant memory."""

    def identity(self) -> dict[str, Any]:
        """What the rows depend on, as JSON."""


@dataclass(frozen=True)
class TableFiles:
    """The rows of files, one file after the other."""

    paths: tuple[Path, ...]

    @property
    def name(self) -> str:
        return named(self.paths)

    @property
    def size(self) -> int | None:
        return sum(stat_of(path).st_size for path in self.paths)

    def rows(self, choose: Choose, invalid: Invalid, on_progress: OnProgress) -> Iterator[Row]:
        before = 0

        def heard(position: int) -> None:
            on_progress(before + position)

        for path in self.paths:
            yield from rows(path, choose, invalid, heard)
            before += stat_of(path).st_size

    def identity(self) -> dict[str, Any]:
        return {"files": stamps(self.paths)}


def rows(path: Path, choose: Choose, invalid: Invalid, on_progress: OnProgress) -> Iterator[Row]:
    """The chosen columns of each row. `choose` is asked once, with the columns of the file or of its first row."""
    return READERS[kind_of(path)](path, choose, invalid, on_progress)


def _json_rows(path: Path, choose: Choose, invalid: Invalid, on_progress: OnProgress) -> Iterator[Row]:
    blocks = decoded(path, invalid, on_progress)
    head = ""
    while not head.strip() and (block := next(blocks, "")):
        head += block
    parse = _json_array if head.lstrip().startswith("[") else _json_lines
    wanted: list[str] = []
    for where, row in parse(path, chain([head], blocks)):
        if not isinstance(row, dict):
            raise InputError(f'{where}: expected an object such as {{"text": …}}, got {row!r:.60}')
        wanted = wanted or choose(list(row), where)
        for name in wanted:
            if name not in row:
                raise no_column(name, list(row), where)
        yield where, row


def _json_lines(path: Path, blocks: Iterator[str]) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(lines(blocks), 1):
        if not line or line.isspace():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{path}, line {number}: expected a JSON object on each line, or one array of them, "
                f"got {line[:60]!r} ({error}); mend or remove the line"
            ) from None
        yield f"{path}, line {number}", row


def _json_array(path: Path, blocks: Iterator[str]) -> Iterator[tuple[str, Any]]:
    """The elements of one array, parsed as they come: the whole may not fit in memory."""
    decode = json.JSONDecoder().raw_decode
    between = re.compile(r"[\s,]*")
    buffer, at, number = next(blocks).lstrip()[1:], 0, 1
    while True:
        at = between.match(buffer, at).end()  # type: ignore[union-attr]  # it matches nothing too
        if buffer.startswith("]", at):
            rest = buffer[at + 1 :].strip() or next((block for block in blocks if not block.isspace()), "")
            if rest:
                raise InputError(f"{path}: expected nothing after the array, got {rest[:60]!r}; use JSON lines")
            return
        try:
            row, at = decode(buffer, at)
        except (ValueError, RecursionError) as error:
            # An element may go on in the next block. Reading as much again as there is keeps that linear.
            message, position = getattr(error, "msg", ""), getattr(error, "pos", 0)
            cut = message.startswith("Unterminated string") or position >= len(buffer) - 16
            more = "".join(islice(blocks, 1 + (len(buffer) - at) // BLOCK)) if cut else ""
            if not more:
                got = repr(buffer[at : at + 60]) if buffer[at:] else "the end of the file"
                raise InputError(
                    f"{path}, element {number} of the array: expected a JSON object, got {got} ({error}); "
                    "mend it, or fetch the file again if it is cut short"
                ) from None
            buffer, at = buffer[at:] + more, 0
            continue
        yield f"{path}, element {number}", row
        number += 1


def _csv_rows(path: Path, choose: Choose, invalid: Invalid, on_progress: OnProgress) -> Iterator[Row]:
    csv.field_size_limit(2**31 - 1)  # the default refuses cells over 128 kB
    separator = "\t" if kind_of(path) == ".tsv" else ","
    # Strict: otherwise a cell whose quote is never closed swallows the rest of the file.
    ended = (line + "\n" for line in lines(decoded(path, invalid, on_progress)))
    cells = csv.reader(ended, delimiter=separator, strict=True)
    header: list[str] = []
    while True:
        where = f"{path}, line {cells.line_num + 1}"
        try:
            row = next(cells, None)
        except csv.Error as error:
            raise InputError(f'{where}: {error}; quote a cell that begins with ", and double the " in it') from None
        if row is None:
            return
        if not header:
            header = row
            if header:
                choose(header, str(path))
        elif len(row) > len(header):
            raise InputError(
                f"{where}: {len(row)} cells under a header of {len(header)}; quote cells that hold {separator!r}"
            )
        elif row:  # an empty line is no row
            yield where, dict.fromkeys(header) | dict(zip(header, row))


def _parquet_rows(path: Path, choose: Choose, invalid: Invalid, on_progress: OnProgress) -> Iterator[Row]:
    try:
        import pyarrow as pa
        import pyarrow.parquet
    except ImportError:
        raise InputError(f"{path}: reading Parquet needs pyarrow; pip install 'flaxen[parquet]'") from None
    row, errors = 0, "strict" if invalid == "error" else "replace"

    def python(cells: Any) -> tuple[list[Any], bool]:
        """Its values, and whether they are text: as bytes then, so that what is not UTF-8 can be told by row."""
        cells = cells.dictionary_decode() if pa.types.is_dictionary(cells.type) else cells
        text = "string" in str(cells.type) and not pa.types.is_nested(cells.type)
        return (cells.cast(pa.large_binary()) if text else cells).to_pylist(), text

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            wanted = choose(file.schema_arrow.names, str(path))
            for batch in file.iter_batches(256, columns=wanted):
                columns, texts = zip(*(python(batch.column(name)) for name in wanted))
                for cells in zip(*columns):
                    row += 1
                    decoded_cells = (
                        cell.decode("utf-8", errors) if text and cell is not None else cell
                        for cell, text in zip(cells, texts)
                    )
                    yield f"{path}, row {row}", dict(zip(wanted, decoded_cells))
                on_progress(path.stat().st_size * row // file.metadata.num_rows)
    except UnicodeDecodeError as error:
        raise InputError(f"{path}, row {row}: {error}; read it as U+FFFD with --data.invalid replace") from None
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path} is no whole Parquet file ({str(error).splitlines()[0]}); fetch it again") from None


READERS: dict[str, Callable[[Path, Choose, Invalid, OnProgress], Iterator[Row]]] = {
    ".jsonl": _json_rows,
    ".json": _json_rows,
    ".csv": _csv_rows,
    ".tsv": _csv_rows,
    ".parquet": _parquet_rows,
}


def no_column(name: str, columns: list[str], where: str, flag: str = "--data.column") -> InputError:
    there = ", ".join(columns[:20]) or "none"
    return InputError(
        f"{where}: no column {name!r}; there are: {there}{did_you_mean(name, columns)}; choose with {flag}"
    )


def text_cell(value: object, column: str, where: str, invalid: Invalid, flag: str = "--data.column") -> str | None:
    """A cell, if it is text or empty."""
    if value is None:
        return None
    if not isinstance(value, str):
        got = f"{type(value).__name__} {value!r:.60}"
        raise InputError(f"{where}: expected text in column {column!r}, got {got}; choose another with {flag}")
    # JSON can spell halves of surrogate pairs ("\ud800"), which no tokenizer takes.
    if not value.isascii() and (half := SURROGATE.search(value)):
        if invalid == "error":
            raise InputError(
                f"{where}: half a surrogate pair, {half[0]!r}, in column {column!r} is no character; "
                "read it as U+FFFD with --data.invalid replace"
            )
        return SURROGATE.sub("\ufffd", value)
    return value
