"""The manifest of a directory that Flaxen wrote: its files with their sizes and SHA-256 digests.

It tells files that we wrote from files that somebody else put there, and it reveals damage.
"""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flaxen import strict_json
from flaxen.errors import InputError
from flaxen.inputs import open_input

NAME = "flaxen_manifest.json"
FORMAT = 1
BLOCK = 1 << 22


def write(directory: Path) -> None:
    """Write the manifest of all files in a directory."""
    entries = {
        name: {"bytes": (directory / name).stat().st_size, "sha256": digest(directory / name)}
        for name in sorted(files(directory))
        if name != NAME
    }
    text = strict_json.dumps({"format": FORMAT, "files": entries}, indent=2)
    (directory / NAME).write_text(text + "\n", encoding="utf-8")


def read(directory: Path) -> dict[str, dict[str, Any]] | None:
    """Return the entries of the manifest by file name, or None if the directory has no manifest."""
    path = directory / NAME
    if not path.exists():
        return None
    value = strict_json.read(path)
    entries = value.get("files") if isinstance(value, dict) else None
    if not isinstance(entries, dict) or not all(
        isinstance(entry, dict) and isinstance(entry.get("bytes"), int) and isinstance(entry.get("sha256"), str)
        for entry in entries.values()
    ):
        raise InputError(f"{path} is damaged: expected the size and SHA-256 digest of each file; save the model again")
    return entries


def foreign(directory: Path) -> list[str]:
    """Return the names in a directory that Flaxen did not write: all of them without a valid manifest."""
    try:
        entries = read(directory)
    except (InputError, OSError):  # a damaged manifest proves nothing
        entries = None
    if entries is None:
        return sorted(path.name for path in directory.iterdir())
    expected = {*entries, NAME}
    folders = {str(parent) for name in expected for parent in Path(name).parents}
    return sorted(name for name in _everything(directory) if name not in expected and name not in folders)


def damage(directory: Path, on_progress: Callable[[int], None] = lambda size: None) -> Iterator[str]:
    """Compare the files of a directory with its manifest and yield what is wrong; report the bytes read."""
    for name, entry in (read(directory) or {}).items():
        path = directory / name
        if not path.is_file():
            yield f"{name} is missing"
        elif (size := path.stat().st_size) != entry["bytes"]:
            yield f"{name} has {size:,} bytes, expected {entry['bytes']:,}"
        elif digest(path, on_progress) != entry["sha256"]:
            yield f"{name} has changed since it was written: its SHA-256 digest differs"


def files(directory: Path) -> list[str]:
    """Return the names of all files in a directory, relative to it."""
    return [name for name in _everything(directory) if not (directory / name).is_dir()]


def _everything(directory: Path) -> list[str]:
    return [path.relative_to(directory).as_posix() for path in directory.rglob("*")]


def digest(path: Path, on_progress: Callable[[int], None] = lambda size: None) -> str:
    """Return the SHA-256 digest of a file, as `sha256sum` prints it."""
    result = hashlib.sha256()
    with open_input(path) as file:
        while block := file.read(BLOCK):
            result.update(block)
            on_progress(len(block))
    return result.hexdigest()
