"""Read files that may come from anywhere: only regular files, with a limit on their size."""

import os
import stat
from typing import BinaryIO

from flaxen.errors import InputError

# Larger than any real file of its kind: the index of a checkpoint, or a tokenizer.json with a million tokens.
TEXT_LIMIT = 1 << 28
SPECIAL = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFDIR: "a directory",
}


def open_input(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file, or a symbolic link to one, for reading.

    Opening a named pipe would wait for a writer, and a device may never end, so both are refused.
    """
    # O_NONBLOCK: the path could become a named pipe between a check and the call of `open`.
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    kind = stat.S_IFMT(os.fstat(file.fileno()).st_mode)
    if kind != stat.S_IFREG:
        file.close()
        raise not_regular(path, kind)
    return file


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raise unless the path is a regular file, for libraries that open files themselves."""
    kind = stat.S_IFMT(os.stat(path).st_mode)
    if kind != stat.S_IFREG:
        raise not_regular(path, kind)


def not_regular(path: str | os.PathLike[str], kind: int) -> InputError:
    """Build the error for a path that is not a regular file."""
    return InputError(f"{os.fspath(path)} is {SPECIAL.get(kind, 'a special file')}; expected a regular file")


def read_bytes(path: str | os.PathLike[str], limit: int = TEXT_LIMIT) -> bytes:
    """Read a whole file of at most `limit` bytes."""
    with open_input(path) as file:
        size = os.fstat(file.fileno()).st_size
        # Read one byte more than allowed: a file in /proc reports a size of 0, and another file may be growing.
        data = file.read(limit + 1) if size <= limit else b""
    if size > limit or len(data) > limit:
        got = max(size, len(data))
        raise InputError(f"{os.fspath(path)} is too large: expected at most {limit:,} bytes, got {got:,}")
    return data


def read_text(path: str | os.PathLike[str], limit: int = TEXT_LIMIT) -> str:
    """Read a whole UTF-8 file of at most `limit` bytes, with every line ending as \\n."""
    try:
        text = read_bytes(path, limit).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{os.fspath(path)} is not UTF-8 text: {error}") from None
    return text.replace("\r\n", "\n")
