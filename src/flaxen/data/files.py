"""Bytes, text and lines of files, unpacked and checked as they are read."""

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
OnProgress = Callable[[int], None]  # hears how many bytes are read


def ignore_progress(position: int) -> None:
    """No report."""


def find_files(patterns: Iterable[str], any_kind: bool = False) -> tuple[Path, ...]:
    """The file of each name, or those a glob matches, sorted; of a kind that holds text, unless any will do."""
    return tuple(path for pattern in patterns for path in _find(pattern, any_kind))


def _find(pattern: str, any_kind: bool) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.is_dir():
        raise InputError(f"{pattern} is a directory; expected files, such as '{pattern.rstrip('/')}/*.txt'")
    if path.exists():
        found = [path]
    elif not glob.has_magic(pattern):
        raise InputError(f"no file {pattern!r}{did_you_mean(path.name, [p.name for p in path.parent.glob('*')])}")
    else:
        found = [Path(p) for p in sorted(glob.glob(str(path), recursive=True)) if not Path(p).is_dir()]
    if not found:
        raise InputError(f"no file matches {pattern!r}; check the directory and the extension")
    for path in [] if any_kind else found:
        if kind_of(path) not in KINDS or (packed(path) and kind_of(path) == ".parquet"):
            kinds = f"{', '.join(KINDS)}, and .gz behind all but the last"
            raise InputError(f"{path}: expected a name that ends in {kinds}; rename or convert it")
    return found


def named(paths: tuple[Path, ...]) -> str:
    """Some of the names, for messages."""
    more = f" and {len(paths) - 5} more" if len(paths) > 5 else ""
    return ", ".join(map(str, paths[:5])) + more


def stamps(paths: tuple[Path, ...]) -> list[list[Any]]:
    """What changes when a file does."""
    stats = [(path.resolve(), stat_of(path)) for path in paths]
    return [[str(path), stat.st_size, stat.st_mtime_ns] for path, stat in stats]


def packed(path: Path) -> bool:
    return path.suffix.lower() == ".gz"


def kind_of(path: Path) -> str:
    return (path.with_suffix("") if packed(path) else path).suffix.lower()


def stat_of(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise unreadable(path, error) from None


def unreadable(path: Path, error: OSError) -> InputError:
    return InputError(f"cannot read {path}: {error.strerror or error}; check the file and its permissions")


def _blocks(path: Path, on_progress: OnProgress) -> Iterator[bytes]:
    """The bytes of a text file, unpacked."""
    try:
        with path.open("rb") as raw, gzip.GzipFile(fileobj=raw) if packed(path) else raw as file:
            if packed(path) and not path.stat().st_size:
                raise EOFError("it is empty")
            while block := file.read(BLOCK):
                if b"\0" in block:
                    raise InputError(f"{path} looks like a binary file (it has NUL bytes); expected UTF-8 text")
                on_progress(raw.tell())
                yield block
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path} is no whole gzip file, perhaps cut short ({error}); fetch it again") from None
    except OSError as error:
        raise unreadable(path, error) from None


def decoded(path: Path, invalid: Invalid, on_progress: OnProgress) -> Iterator[str]:
    """Blocks of text whose only line end is \\n, without a byte order mark."""
    utf8 = codecs.getincrementaldecoder("utf-8")("strict" if invalid == "error" else "replace")
    decoder = io.IncrementalNewlineDecoder(utf8, translate=True)
    end, line, begun = 0, 1, False
    for block in chain(_blocks(path, on_progress), [b""]):
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


def lines(blocks: Iterable[str]) -> Iterator[str]:
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
