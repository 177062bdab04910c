"""Atomic output directories: the complete new directory takes the place of the old one in a single step."""

import ctypes
import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from flaxen import manifest
from flaxen.atomic import (
    explain_errors,
    is_locked,
    leftovers,
    lock,
    lock_parent,
    new_token,
    partial_path,
    refuse_second_writer,
    remove,
    sync,
)
from flaxen.errors import InputError

AT_FDCWD, RENAME_EXCHANGE = -100, 2  # from linux/fcntl.h and linux/fs.h
UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)
ADVICE = "choose another path, or replace the whole directory with --overwrite (in Python: overwrite=True)"
SHOWN = 5  # number of file names that a message lists


@contextmanager
def atomic_directory(path: Path, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary directory that takes the place of `path` if the block succeeds, and is deleted if it fails.

    An existing directory is replaced only if Flaxen wrote everything in it, or if `overwrite` is set.
    """
    target = check_directory(path, overwrite)
    created = [parent for parent in target.parents if not parent.exists()]
    with explain_errors(path):
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh, descriptor = _claim(target)
        try:
            yield fresh
            _complete(fresh)
            check_directory(path, overwrite)  # again: the block may have taken hours
            _replace(fresh, target)
            created = []
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
            os.close(descriptor)
            for parent in created:
                parent.rmdir()


def check_directory(
    path: Path, overwrite: bool = False, inputs: Iterable[str | os.PathLike[str]] = (), advice: str = ADVICE
) -> Path:
    """Return the directory that writing to `path` creates or replaces; raise if it must not be replaced.

    `inputs` are files and directories that the command reads: the output must not contain them, nor be inside them.
    """
    target = Path(os.path.realpath(Path(path).expanduser()))
    if target.is_symlink():
        raise InputError(f"cannot write {path}: it is a symbolic link that leads to itself")
    if target.exists() and not target.is_dir():
        raise InputError(f"{path} already exists and is a file; expected a directory")
    ancestor = next(parent for parent in target.parents if parent.exists())
    if not ancestor.is_dir():
        raise InputError(f"cannot write {path}: {ancestor} is not a directory")
    for name in inputs:
        source = Path(os.path.realpath(name))
        if source.exists() and (source == target or target in source.parents or source in target.parents):
            raise InputError(f"cannot write {path}: it overlaps with the input {name}; choose another output")
    here = Path.cwd()
    if target == here or target in here.parents:
        raise InputError(f"cannot write {path}: it contains the current directory; choose another path")
    found = manifest.foreign(target) if target.is_dir() else []
    if found and not overwrite:
        more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        raise InputError(
            f"{path} already exists and contains files that Flaxen did not write: {', '.join(found[:SHOWN])}{more}; "
            f"{advice}"
        )
    return target


def recover(path: Path) -> None:
    """Complete a replacement that a killed process left half done (see `_replace_in_two_steps`)."""
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir() or not any(item.suffix == ".ready" for item in leftovers(target)):
        return
    with lock_parent(target):
        _complete_replacement(target)


def _claim(target: Path) -> tuple[Path, int]:
    """Create and lock the temporary directory of `target`; delete what dead processes left behind."""
    with lock_parent(target):
        refuse_second_writer(target)
        _complete_replacement(target)
        for leftover in leftovers(target):
            remove(leftover)
        fresh = partial_path(target, new_token())
        fresh.mkdir()
        descriptor = os.open(fresh, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        lock(descriptor)
    return fresh, descriptor


def _complete(fresh: Path) -> None:
    """Write the manifest, set the file modes and flush everything to disk."""
    manifest.write(fresh)
    # Some libraries create files that only their owner can read. The mode of the directory shows the umask.
    mode = fresh.stat().st_mode & 0o666
    for path in [*fresh.rglob("*"), fresh]:
        if path.is_file():
            path.chmod(mode)
        # Before the rename: a power failure must not leave a complete-looking directory with empty files.
        sync(path)


def _replace(fresh: Path, target: Path) -> None:
    """Move a complete directory to its final name. What was there before ends up under the name `fresh`."""
    if not target.exists():
        fresh.rename(target)
    elif not exchange(fresh, target):
        _replace_in_two_steps(fresh, target)
    sync(target.parent)


def exchange(a: Path, b: Path) -> bool:
    """Swap two names in one atomic step; return False where the operating or file system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if not rename(AT_FDCWD, os.fsencode(a), AT_FDCWD, os.fsencode(b), RENAME_EXCHANGE):
        return True
    code = ctypes.get_errno()
    if code in UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(b))


def _replace_in_two_steps(fresh: Path, target: Path) -> None:
    """Replace a directory without an atomic exchange.

    Once the name ends in .ready, the new directory is complete. A process killed after that leaves the old directory,
    or no directory and the new one under this name, which `_complete_replacement` renames.
    """
    ready, old = fresh.with_suffix(".ready"), fresh.with_suffix(".old")
    fresh.rename(ready)
    try:
        target.rename(old)
        ready.rename(target)
    except OSError:
        if not target.exists():
            old.rename(target)
        ready.rename(fresh)
        raise
    shutil.rmtree(old)


def _complete_replacement(target: Path) -> None:
    """Move a complete directory that has lost its writer to its final name, if nothing has that name."""
    for ready in leftovers(target):
        if ready.suffix == ".ready" and not target.exists() and not is_locked(ready):
            ready.rename(target)
