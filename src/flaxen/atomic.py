"""Atomic output files: they appear under their name complete or not at all, and replace only regular files.

A file is written under a temporary name, `.NAME.TOKEN.partial`, next to its target. The writer holds a lock on it,
which the system releases when the process ends, however it ends. So another process that writes to the same target is
refused while the first one lives, and deletes what it left behind once it is dead.
"""

import errno
import fcntl
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TextIO, cast

from flaxen.errors import InputError
from flaxen.inputs import not_regular

# A full disk, an exceeded quota, and a limit on the size of a file.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def atomic_file(path: Path) -> Iterator[TextIO]:
    """Open a temporary text file that is renamed to `path` when the block succeeds, and deleted when it fails."""
    with _replacing(path, "w") as file:
        yield cast(TextIO, file)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file atomically, replacing an existing one."""
    with _replacing(path, "wb") as file:
        file.write(data)


@contextmanager
def _replacing(path: Path, mode: str) -> Iterator[IO]:
    target = check_output(path)
    with explain_errors(path):
        partial, descriptor = claim(target, new_token())
        try:
            with open_descriptor(descriptor, mode) as file:
                yield file
                commit(file, partial, target)
        finally:
            partial.unlink(missing_ok=True)


def check_output(path: Path, inputs: Iterable[str | os.PathLike[str]] = ()) -> Path:
    """Return the regular file that writing to `path` creates or replaces; raise if there cannot be one.

    Writing goes through symbolic links: the file they lead to is replaced. `inputs` are files that the command reads,
    which must not be overwritten.
    """
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise InputError(f"cannot write {path}: it is a symbolic link that leads to itself")
    try:
        kind = stat.S_IFMT(target.stat().st_mode)
    except FileNotFoundError:
        kind = stat.S_IFREG
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None
    if kind != stat.S_IFREG:
        raise InputError(f"cannot write: {not_regular(path, kind)}")
    if not target.parent.is_dir():
        raise InputError(f"cannot write {path}: the directory {target.parent} does not exist; create it first")
    for name in inputs:
        if os.path.realpath(name) == str(target) or (target.exists() and _same_file(name, target)):
            raise InputError(f"{path} is also an input of this command; choose another output")
    return target


def _same_file(a: str | os.PathLike[str], b: Path) -> bool:
    """Return whether both names lead to one file, which may have several names (hard links)."""
    return os.path.exists(a) and os.path.samefile(a, b)


def new_token() -> str:
    """Return a random token for a temporary name that no later command resumes."""
    return uuid.uuid4().hex[:8]


def partial_path(target: Path, token: str) -> Path:
    """Return the temporary name of a file or directory that is being written."""
    return target.with_name(f".{target.name}.{token}.partial")


def claim(target: Path, token: str) -> tuple[Path, int]:
    """Create or reopen the temporary file of `target` and lock it; return its path and descriptor.

    Temporary files of dead processes are deleted, unless a rerun could resume them (see `leftovers`).
    """
    partial = partial_path(target, token)
    with lock_parent(target):
        refuse_second_writer(target)
        for path in leftovers(target):
            remove(path)
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        lock(descriptor)
    return partial, descriptor


def leftovers(target: Path, resumable: bool = False) -> list[Path]:
    """Return what writers of `target` left behind. Tokens of 12 digits mark files that a rerun could resume."""
    token = "(?:[0-9a-f]{8}|[0-9a-f]{12})" if resumable else "[0-9a-f]{8}"
    pattern = re.compile(rf"\.{re.escape(target.name)}\.{token}\.(?:partial|ready|old)")
    return sorted(path for path in target.parent.iterdir() if pattern.fullmatch(path.name))


def remove(path: Path) -> None:
    """Delete a file or a directory with everything in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def refuse_second_writer(target: Path) -> None:
    """Raise if a living process is writing `target`."""
    for path in leftovers(target, resumable=True):
        if is_locked(path):
            raise InputError(f"another process is writing {target}; wait for it to finish or choose another output")


def is_locked(path: Path) -> bool:
    """Return whether a living process holds the lock of a file or directory."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # it has been renamed or deleted in the meantime, or is not ours
        return False
    try:
        return not lock(descriptor)
    finally:
        os.close(descriptor)


def lock(descriptor: int) -> bool:
    """Lock a file or directory until it is closed; return whether that was possible."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        # Some network file systems have no locks; writing is still atomic there.
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL):
            raise
    return True


@contextmanager
def lock_parent(target: Path) -> Iterator[None]:
    """Lock the directory of `target` for a moment, while its temporary files are listed, deleted and created."""
    descriptor = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a network file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def open_descriptor(descriptor: int, mode: str) -> IO:
    """Open a file object. An unpaired surrogate, which only JSON can hold, is written as JSON's escape sequence."""
    if "b" in mode:
        return os.fdopen(descriptor, mode)
    return os.fdopen(descriptor, mode, encoding="utf-8", errors="backslashreplace")


def commit(file: IO, partial: Path, target: Path) -> None:
    """Flush a complete file to disk and rename it to its final name; an existing file passes on its permissions."""
    file.flush()
    if target.exists():
        os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
    os.fsync(file.fileno())
    partial.replace(target)
    sync(target.parent)


def sync(path: Path) -> None:
    """Flush a file or directory to disk, so that a power failure after a rename cannot leave empty files."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def explain_errors(path: Path) -> Iterator[None]:
    """Turn a failed write into an InputError that names the output rather than its temporary file."""
    try:
        yield
    except OSError as error:
        partial = re.search(r"\.[0-9a-f]{8,12}\.(partial|ready|old)\b", str(error.filename or ""))
        # Other errors come from something else that the block did, such as reading an image.
        if error.errno not in FULL and not partial:
            raise
        advice = "; free some space and rerun the command" if error.errno in FULL else ""
        raise InputError(f"cannot write {path}: {error.strerror}{advice}") from error
