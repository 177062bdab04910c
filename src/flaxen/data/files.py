"""Find text files and read them as UTF-8 blocks or lines, decompressing and validating them on the way."""

import codecs
import glob
import gzip
import io
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from flaxen.errors import InputError, did_you_mean

BLOCK = 1 << 20
KINDS = (".txt", ".jsonl", ".json", ".csv", ".tsv", ".parquet")
Invalid = Literal["error", "replace"]
OnProgress = Callable[[int], None]  # called with the number of bytes read so far


def ignore_progress(position: int) -> None:
    """Do nothing: the default progress callback."""


def find_files(patterns: Iterable[str], any_kind: bool = False) -> tuple[Path, ...]:
    """Expand file names and glob patterns, sorted per pattern; only known extensions, unless `any_kind`."""
    return tuple(path for pattern in patterns for path in _expand(pattern, any_kind))


def _expand(pattern: str, any_kind: bool) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.is_dir():
        raise InputError(f"{pattern} is a directory; expected files, such as '{pattern.rstrip('/')}/*.txt'")
    if path.exists():
        paths = [path]
    elif not glob.has_magic(pattern):
        raise InputError(f"{pattern} does not exist{did_you_mean(path.name, [p.name for p in path.parent.glob('*')])}")
    else:
        paths = [Path(p) for p in sorted(glob.glob(str(path), recursive=True)) if not Path(p).is_dir()]
    if not paths:
        raise InputError(f"no file matches {pattern!r}; check the directory and the extension")
    for path in [] if any_kind else paths:
        if kind_of(path) not in KINDS or (packed(path) and kind_of(path) == ".parquet"):
            kinds = f"{', '.join(KINDS)}, or all but the last with .gz"
            raise InputError(f"{path}: expected a file name ending in {kinds}; rename or convert the file")
    return paths


def named(paths: tuple[Path, ...]) -> str:
    """List up to five of the file names, for messages."""
    more = f" and {len(paths) - 5} more" if len(paths) > 5 else ""
    return ", ".join(map(str, paths[:5])) + more


def stamps(paths: tuple[Path, ...]) -> list[list[Any]]:
    """Return the path, size and modification time of each file, to detect changes."""
    stats = [(path.resolve(), stat_of(path)) for path in paths]
    return [[str(path), stat.st_size, stat.st_mtime_ns] for path, stat in stats]


def packed(path: Path) -> bool:
    """Return whether a file is compressed with gzip, judging by its name."""
    return path.suffix.lower() == ".gz"


def kind_of(path: Path) -> str:
    """Return the extension in lower case, ignoring .gz."""
    return (path.with_suffix("") if packed(path) else path).suffix.lower()


def stat_of(path: Path) -> os.stat_result:
    """Return os.stat of a file; raise an InputError if that fails."""
    try:
        return path.stat()
    except OSError as error:
        raise unreadable(path, error) from None


def unreadable(path: Path, error: OSError) -> InputError:
    """Build the error for a file that cannot be opened or read."""
    return InputError(f"cannot read {path}: {error.strerror or error}; check the file and its permissions")


def _blocks(path: Path, on_progress: OnProgress) -> Iterator[bytes]:
    """Iterate over the decompressed bytes of a text file."""
    try:
        with path.open("rb") as raw, gzip.GzipFile(fileobj=raw) if packed(path) else raw as file:
            if packed(path) and not path.stat().st_size:
                raise EOFError("the file is empty")
            while block := file.read(BLOCK):
                if b"\0" in block:
                    raise InputError(f"{path} looks like a binary file (it contains NUL bytes); expected UTF-8 text")
                on_progress(raw.tell())
                yield block
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(
            f"{path} is not a valid gzip file: {error}; it may be truncated, so download it again"
        ) from None
    except OSError as error:
        raise unreadable(path, error) from None


def decoded(path: Path, invalid: Invalid, on_progress: OnProgress) -> Iterator[str]:
    """Iterate over blocks of decoded text, with every line ending as \\n and without a byte order mark."""
    utf8 = codecs.getincrementaldecoder("utf-8")("strict" if invalid == "error" else "replace")
    decoder = io.IncrementalNewlineDecoder(utf8, translate=True)
    end, line, begun = 0, 1, False
    for block in chain(_blocks(path, on_progress), [b""]):
        end += len(block)
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            utf8.reset()  # error.object includes the bytes that the decoder had retained from the previous block
            line += decoder.decode(error.object[: error.start], final=True).count("\n")
            start = end - len(error.object) + error.start
            raise InputError(
                f"{path}, line {line}: byte {start:,} (0x{error.object[error.start]:02x}) is not UTF-8; "
                "convert the file (iconv -t UTF-8), or replace such bytes with U+FFFD (--data.invalid replace)"
            ) from None
        line += text.count("\n")
        if text and not begun:
            text, begun = text.removeprefix("\ufeff"), True
        if text:
            yield text


def lines(blocks: Iterable[str]) -> Iterator[str]:
    """Split blocks into lines at \\n only; str.splitlines would also split at U+2028, form feeds and others."""
    parts: list[str] = []  # pieces of the current line, joined once: a line may span many blocks
    for block in blocks:
        first, *rest = block.split("\n")
        parts.append(first)
        if rest:
            yield "".join(parts)
            yield from rest[:-1]
            parts = [rest[-1]]
    yield "".join(parts)
