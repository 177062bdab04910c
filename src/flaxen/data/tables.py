"""Read rows of tables, one at a time: JSON (lines or one array), CSV, TSV and Parquet."""

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
Row = tuple[str, dict[str, Any]]  # (location of the row for messages, cells by column)
Choose = Callable[[list[str], str], list[str]]  # (available columns, where) -> columns to read


@runtime_checkable
class Table(Protocol):
    """A table whose rows are read in order."""

    @property
    def name(self) -> str:
        """Name of the table in messages."""

    @property
    def size(self) -> int | None:
        """Bytes on disk, the final value that `on_progress` receives; None if unknown."""

    def rows(self, choose: Choose, invalid: Invalid, on_progress: OnProgress) -> Iterator[Row]:
        """Iterate over the chosen columns of each row, in constant memory."""

    def identity(self) -> dict[str, Any]:
        """Return what the rows depend on, as JSON."""


@dataclass(frozen=True)
class TableFiles:
    """The rows of several files, one file after the other."""

    paths: tuple[Path, ...]

    @property
    def name(self) -> str:
        return named(self.paths)

    @property
    def size(self) -> int | None:
        return sum(stat_of(path).st_size for path in self.paths)

    def rows(self, choose: Choose, invalid: Invalid, on_progress: OnProgress) -> Iterator[Row]:
        """Iterate over the chosen columns of each row."""
        offset = 0  # bytes of the files read so far

        def report(position: int) -> None:
            on_progress(offset + position)

        for path in self.paths:
            yield from rows(path, choose, invalid, report)
            offset += stat_of(path).st_size

    def identity(self) -> dict[str, Any]:
        """Return what the rows depend on, as JSON."""
        return {"files": stamps(self.paths)}


def rows(path: Path, choose: Choose, invalid: Invalid, on_progress: OnProgress) -> Iterator[Row]:
    """Iterate over the chosen columns of each row of a file.

    `choose` is called once, with the columns of the file or of its first row.
    """
    return READERS[kind_of(path)](path, choose, invalid, on_progress)


def _json_rows(path: Path, choose: Choose, invalid: Invalid, on_progress: OnProgress) -> Iterator[Row]:
    """Read JSON lines, or one array of objects: the first character tells which."""
    blocks = decoded(path, invalid, on_progress)
    head = ""
    while not head.strip() and (block := next(blocks, "")):
        head += block
    parse = _json_array if head.lstrip().startswith("[") else _json_lines
    columns: list[str] = []
    for where, row in parse(path, chain([head], blocks)):
        if not isinstance(row, dict):
            raise InputError(f'{where}: expected an object such as {{"text": …}}, got {row!r:.60}')
        columns = columns or choose(list(row), where)
        for name in columns:
            if name not in row:
                raise no_column(name, list(row), where)
        yield where, row


def _json_lines(path: Path, blocks: Iterator[str]) -> Iterator[tuple[str, Any]]:
    """Parse one value per line, skipping blank lines."""
    for number, line in enumerate(lines(blocks), 1):
        if not line or line.isspace():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{path}, line {number}: expected a JSON object on each line, or one array of them, "
                f"got {line[:60]!r} ({error}); fix or remove the line"
            ) from None
        yield f"{path}, line {number}", row


def _json_array(path: Path, blocks: Iterator[str]) -> Iterator[tuple[str, Any]]:
    """Parse the elements of one array incrementally: the whole array may not fit in memory."""
    decode = json.JSONDecoder().raw_decode
    between = re.compile(r"[\s,]*")
    buffer, at, number = next(blocks).lstrip()[1:], 0, 1
    while True:
        at = between.match(buffer, at).end()  # type: ignore[union-attr]  # also matches the empty string
        if buffer.startswith("]", at):
            rest = buffer[at + 1 :].strip() or next((block for block in blocks if not block.isspace()), "")
            if rest:
                raise InputError(f"{path}: expected nothing after the array, got {rest[:60]!r}; use JSON lines")
            return
        try:
            row, at = decode(buffer, at)
        except (ValueError, RecursionError) as error:
            # An element may continue in the next block. Doubling the buffer keeps the total time linear.
            message, position = getattr(error, "msg", ""), getattr(error, "pos", 0)
            incomplete = message.startswith("Unterminated string") or position >= len(buffer) - 16
            more = "".join(islice(blocks, 1 + (len(buffer) - at) // BLOCK)) if incomplete else ""
            if not more:
                got = repr(buffer[at : at + 60]) if buffer[at:] else "the end of the file"
                raise InputError(
                    f"{path}, element {number} of the array: expected a JSON object, got {got} ({error}); "
                    "fix it, or download the file again if it is truncated"
                ) from None
            buffer, at = buffer[at:] + more, 0
            continue
        yield f"{path}, element {number}", row
        number += 1


def _csv_rows(path: Path, choose: Choose, invalid: Invalid, on_progress: OnProgress) -> Iterator[Row]:
    """Read CSV or TSV with a header line."""
    csv.field_size_limit(2**31 - 1)  # the default limit is 128 kB per cell
    separator = "\t" if kind_of(path) == ".tsv" else ","
    # strict=True: otherwise a quote that is never closed swallows the rest of the file.
    terminated = (line + "\n" for line in lines(decoded(path, invalid, on_progress)))
    cells = csv.reader(terminated, delimiter=separator, strict=True)
    header: list[str] = []
    while True:
        where = f"{path}, line {cells.line_num + 1}"
        try:
            row = next(cells, None)
        except csv.Error as error:
            raise InputError(f'{where}: {error}; quote a cell that begins with ", and double each " in it') from None
        if row is None:
            return
        if not header:
            header = row
            if header:
                choose(header, str(path))
        elif len(row) > len(header):
            raise InputError(
                f"{where}: expected at most {len(header)} cells, as in the header, got {len(row)}; "
                f"quote cells that contain {separator!r}"
            )
        elif row:  # skip empty lines
            yield where, dict.fromkeys(header) | dict(zip(header, row))


def _parquet_rows(path: Path, choose: Choose, invalid: Invalid, on_progress: OnProgress) -> Iterator[Row]:
    """Read Parquet in small batches of rows."""
    try:
        import pyarrow as pa
        import pyarrow.parquet
    except ImportError:
        raise InputError(
            f"{path}: reading Parquet requires pyarrow; install it with: pip install 'flaxen[parquet]'"
        ) from None
    row, errors = 0, "strict" if invalid == "error" else "replace"

    def python(cells: Any) -> tuple[list[Any], bool]:
        """Convert a column to Python values, and return whether it is text.

        Text is returned as bytes and decoded later, so that invalid UTF-8 can be reported by row.
        """
        cells = cells.dictionary_decode() if pa.types.is_dictionary(cells.type) else cells
        text = "string" in str(cells.type) and not pa.types.is_nested(cells.type)
        return (cells.cast(pa.large_binary()) if text else cells).to_pylist(), text

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            chosen = choose(file.schema_arrow.names, str(path))
            for batch in file.iter_batches(256, columns=chosen):
                columns, texts = zip(*(python(batch.column(name)) for name in chosen))
                for cells in zip(*columns):
                    row += 1
                    decoded_cells = (
                        cell.decode("utf-8", errors) if text and cell is not None else cell
                        for cell, text in zip(cells, texts)
                    )
                    yield f"{path}, row {row}", dict(zip(chosen, decoded_cells))
                on_progress(path.stat().st_size * row // file.metadata.num_rows)
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}, row {row}: {error}; replace such bytes with U+FFFD (--data.invalid replace)"
        ) from None
    except (pa.ArrowException, OSError) as error:
        raise InputError(
            f"{path} is not a valid Parquet file: {str(error).splitlines()[0]}; download it again"
        ) from None


READERS: dict[str, Callable[[Path, Choose, Invalid, OnProgress], Iterator[Row]]] = {
    ".jsonl": _json_rows,
    ".json": _json_rows,
    ".csv": _csv_rows,
    ".tsv": _csv_rows,
    ".parquet": _parquet_rows,
}


def no_column(name: str, columns: list[str], where: str, flag: str = "--data.column") -> InputError:
    """Build the error for a column that does not exist. `flag` is the option that chooses the column."""
    available = ", ".join(columns[:20]) or "none"  # a table may have hundreds of columns
    return InputError(
        f"{where}: unknown column {name!r}{did_you_mean(name, columns)}; available: {available}; choose one with {flag}"
    )


def text_cell(value: object, column: str, where: str, invalid: Invalid, flag: str = "--data.column") -> str | None:
    """Return the text of a cell, or None if it is empty; raise if it holds anything else."""
    if value is None:
        return None
    if not isinstance(value, str):
        got = f"{type(value).__name__} {value!r:.60}"
        raise InputError(f"{where}: expected text in column {column!r}, got {got}; choose another column with {flag}")
    # JSON can encode unpaired surrogates ("\ud800"), which no tokenizer accepts.
    if not value.isascii() and (half := SURROGATE.search(value)):
        if invalid == "error":
            raise InputError(
                f"{where}: column {column!r} contains the unpaired surrogate {half[0]!r}, which is not a character; "
                "replace such surrogates with U+FFFD (--data.invalid replace)"
            )
        return SURROGATE.sub("\ufffd", value)
    return value
