"""Documents out of files: text, JSON, CSV and Parquet, one document at a time."""

import codecs
import csv
import glob
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

from flaxen.errors import InputError, nearest

BLOCK = 1 << 20
SURROGATE = re.compile("[\ud800-\udfff]")
Unit = Literal["line", "paragraph"]
Invalid = Literal["error", "replace"]
Report = Callable[[int], None]  # hears how many bytes are read


def silent(position: int) -> None:
    """No report."""


@dataclass(frozen=True)
class TextFiles:
    """The documents of files, one file after the other."""

    paths: tuple[Path, ...]
    column: str | None = None
    unit: Unit = "line"
    invalid: Invalid = "error"

    @property
    def name(self) -> str:
        more = f" and {len(self.paths) - 5} more" if len(self.paths) > 5 else ""
        return ", ".join(map(str, self.paths[:5])) + more

    @property
    def size(self) -> int | None:
        return sum(_stat(path).st_size for path in self.paths)

    def texts(self, report: Report = silent) -> Iterator[str]:
        before = 0

        def heard(position: int) -> None:
            report(before + position)

        for path in self.paths:
            for text in READERS[_kind(path)](path, self, heard):
                if text and not text.isspace():
                    yield text
            before += _stat(path).st_size

    def identity(self) -> dict[str, Any]:
        stats = [(path.resolve(), _stat(path)) for path in self.paths]
        files = [[str(path), stat.st_size, stat.st_mtime_ns] for path, stat in stats]
        return {"files": files, "column": self.column, "unit": self.unit, "invalid": self.invalid}


def find_files(patterns: Iterable[str]) -> tuple[Path, ...]:
    """The file of each name, or those a glob matches, sorted."""
    return tuple(path for pattern in patterns for path in _find(pattern))


def _find(pattern: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.is_dir():
        raise InputError(f"{pattern} is a directory; expected files, such as '{pattern.rstrip('/')}/*.txt'")
    if path.exists():
        found = [path]
    elif not glob.has_magic(pattern):
        raise InputError(f"no file {pattern!r}{nearest(path.name, [p.name for p in path.parent.glob('*')])}")
    else:
        found = [Path(p) for p in sorted(glob.glob(str(path), recursive=True)) if not Path(p).is_dir()]
    if not found:
        raise InputError(f"no file matches {pattern!r}; check the directory and the extension")
    for path in found:
        if _kind(path) not in READERS or (_packed(path) and _kind(path) == ".parquet"):
            kinds = f"{', '.join(READERS)}, and .gz behind all but the last"
            raise InputError(f"{path}: expected a name that ends in {kinds}; rename or convert it")
    return found


def _packed(path: Path) -> bool:
    return path.suffix.lower() == ".gz"


def _kind(path: Path) -> str:
    return (path.with_suffix("") if _packed(path) else path).suffix.lower()


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> InputError:
    return InputError(f"cannot read {path}: {error.strerror or error}; check the file and its permissions")


def _blocks(path: Path, report: Report) -> Iterator[bytes]:
    """The bytes of a text file, unpacked."""
    try:
        with path.open("rb") as raw, gzip.GzipFile(fileobj=raw) if _packed(path) else raw as file:
            if _packed(path) and not path.stat().st_size:
                raise EOFError("it is empty")
            while block := file.read(BLOCK):
                if b"\0" in block:
                    raise InputError(f"{path} looks like a binary file (it has NUL bytes); expected UTF-8 text")
                report(raw.tell())
                yield block
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path} is no whole gzip file, perhaps cut short ({error}); fetch it again") from None
    except OSError as error:
        raise _unreadable(path, error) from None


def _decoded(path: Path, source: TextFiles, report: Report) -> Iterator[str]:
    """Blocks of text whose only line end is \\n, without a byte order mark."""
    utf8 = codecs.getincrementaldecoder("utf-8")("strict" if source.invalid == "error" else "replace")
    decoder = io.IncrementalNewlineDecoder(utf8, translate=True)
    end, line, begun = 0, 1, False
    for block in chain(_blocks(path, report), [b""]):
        end += len(block)
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            utf8.reset()  # error.object has what the decoder had kept of the block before
            line += decoder.decode(error.object[: error.start], final=True).count("\n")
            start = end - len(error.object) + error.start
            raise InputError(
                f"{path}, line {line}: byte {start:,} (0x{error.object[error.start]:02x}) is not UTF-8; "
                "convert the file (iconv -t UTF-8), or read such bytes as U+FFFD with --data.invalid replace"
            ) from None
        line += text.count("\n")
        if text and not begun:
            text, begun = text.removeprefix("\ufeff"), True
        if text:
            yield text


def _lines(blocks: Iterable[str]) -> Iterator[str]:
    """Split at \\n alone; str.splitlines would also split at U+2028, form feeds and more."""
    parts: list[str] = []  # of a line longer than a block, joined once
    for block in blocks:
        first, *others = block.split("\n")
        parts.append(first)
        if others:
            yield "".join(parts)
            yield from others[:-1]
            parts = [others[-1]]
    yield "".join(parts)


def _read_text(path: Path, source: TextFiles, report: Report) -> Iterator[str]:
    paragraph: list[str] = []
    for line in chain(_lines(_decoded(path, source, report)), [""]):
        if source.unit == "line":
            yield line
        elif line and not line.isspace():
            paragraph.append(line)
        elif paragraph:
            yield "\n".join(paragraph)
            paragraph = []


def _read_json(path: Path, source: TextFiles, report: Report) -> Iterator[str | None]:
    blocks = _decoded(path, source, report)
    head = ""
    while not head.strip() and (block := next(blocks, "")):
        head += block
    parse = _json_array if head.lstrip().startswith("[") else _json_lines
    column = None
    for where, row in parse(path, chain([head], blocks)):
        if not isinstance(row, dict):
            raise InputError(f'{where}: expected an object such as {{"text": …}}, got {row!r:.60}')
        column = choose_column(column or source.column, list(row), where)
        yield checked(row[column], column, where, source.invalid)


def _json_lines(path: Path, blocks: Iterator[str]) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(_lines(blocks), 1):
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


def _read_table(path: Path, source: TextFiles, report: Report) -> Iterator[str | None]:
    csv.field_size_limit(2**31 - 1)  # the default refuses cells over 128 kB
    separator = "\t" if _kind(path) == ".tsv" else ","
    # Strict: otherwise a cell whose quote is never closed swallows the rest of the file.
    lines = (line + "\n" for line in _lines(_decoded(path, source, report)))
    rows = csv.reader(lines, delimiter=separator, strict=True)
    header: list[str] = []
    while True:
        where = f"{path}, line {rows.line_num + 1}"
        try:
            row = next(rows, None)
        except csv.Error as error:
            raise InputError(f'{where}: {error}; quote a cell that begins with ", and double the " in it') from None
        if row is None:
            return
        if not header:
            header = row
            index = header.index(choose_column(source.column, header, str(path))) if header else 0
        elif len(row) > len(header):
            raise InputError(
                f"{where}: {len(row)} cells under a header of {len(header)}; quote cells that hold {separator!r}"
            )
        else:
            yield row[index] if index < len(row) else None


def _read_parquet(path: Path, source: TextFiles, report: Report) -> Iterator[str | None]:
    try:
        import pyarrow as pa
        import pyarrow.parquet
    except ImportError:
        raise InputError(f"{path}: reading Parquet needs pyarrow; pip install 'flaxen[parquet]'") from None
    row, errors = 0, "strict" if source.invalid == "error" else "replace"
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            column = choose_column(source.column, file.schema_arrow.names, str(path))
            for batch in file.iter_batches(256, columns=[column]):
                cells = batch.column(0)
                cells = cells.dictionary_decode() if pa.types.is_dictionary(cells.type) else cells
                if not any(kind in str(cells.type) for kind in ("string", "null")) or pa.types.is_nested(cells.type):
                    raise InputError(
                        f"{path}: expected text in column {column!r}, got {cells.type} in row {row + 1}; "
                        "choose another with --data.column"
                    )
                for cell in cells.cast(pa.large_binary()).to_pylist():
                    row += 1
                    yield cell and cell.decode("utf-8", errors)
                report(path.stat().st_size * row // file.metadata.num_rows)
    except UnicodeDecodeError as error:
        raise InputError(f"{path}, row {row}: {error}; read it as U+FFFD with --data.invalid replace") from None
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path} is no whole Parquet file ({str(error).splitlines()[0]}); fetch it again") from None


READERS: dict[str, Callable[[Path, TextFiles, Report], Iterator[str | None]]] = {
    ".txt": _read_text,
    ".jsonl": _read_json,
    ".json": _read_json,
    ".csv": _read_table,
    ".tsv": _read_table,
    ".parquet": _read_parquet,
}


def choose_column(wanted: str | None, columns: list[str], where: str) -> str:
    """The column that was asked for, or the one that probably holds the text."""
    column = wanted or ("text" if "text" in columns or not columns else columns[0])
    if column not in columns:
        there = ", ".join(columns[:20]) or "none"
        raise InputError(
            f"{where}: no column {column!r}; there are: {there}{nearest(column, columns)}; choose with --data.column"
        )
    return column


def checked(value: object, column: str, where: str, invalid: Invalid) -> str | None:
    """A cell, if it is text or empty."""
    if value is None:
        return None
    if not isinstance(value, str):
        got = f"{type(value).__name__} {value!r:.60}"
        raise InputError(f"{where}: expected text in column {column!r}, got {got}; choose another with --data.column")
    # JSON can spell halves of surrogate pairs ("\ud800"), which no tokenizer takes.
    if not value.isascii() and (half := SURROGATE.search(value)):
        if invalid == "error":
            raise InputError(
                f"{where}: half a surrogate pair, {half[0]!r}, in column {column!r} is no character; "
                "read it as U+FFFD with --data.invalid replace"
            )
        return SURROGATE.sub("\ufffd", value)
    return value
