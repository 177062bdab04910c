"""Checkpoint directories: locate or download them, read and write JSON, write a directory atomically."""

import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flaxen.atomic import sync
from flaxen.errors import InputError, did_you_mean

# Files that make up a checkpoint; others are not downloaded from the hub.
WANTED = ["*.json", "*.safetensors", "spiece.model", "*.txt"]


def locate(source: str | os.PathLike[str], subfolder: str | None = None) -> Path:
    """Return the path of a local directory, or of a hub id ('google/flan-t5-small') after downloading it.

    Offline, a hub id is looked up in the cache. With a subfolder, such as 'text_encoder_2' of a diffusion model, only
    that folder and that of its tokenizer, 'tokenizer_2', are downloaded.
    """
    if subfolder is None:
        return _locate(source, WANTED)
    folders = (subfolder, str(tokenizer_folder(Path(subfolder)) or subfolder))
    top = _locate(source, [f"{folder}/{pattern}" for folder in folders for pattern in WANTED])
    if not (top / subfolder).is_dir():
        available = [path.name for path in sorted(top.iterdir()) if path.is_dir()]
        raise InputError(
            f"{source} has no subfolder {subfolder!r}{did_you_mean(subfolder, available)}; "
            f"available: {', '.join(available)}"
        )
    return top / subfolder


def tokenizer_folder(directory: Path) -> Path | None:
    """Return the tokenizer folder of a diffusion model's text encoder: 'tokenizer_2' for 'text_encoder_2'."""
    name = directory.name
    return directory.with_name(name.replace("text_encoder", "tokenizer")) if name.startswith("text_encoder") else None


def _locate(source: str | os.PathLike[str], patterns: list[str]) -> Path:
    """Return a local directory, or download the files of a hub id that match the patterns."""
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    text = str(source)
    if path.exists():
        raise InputError(f"{text} is a file; expected a directory with config.json and model.safetensors")
    # A hub id has at most one slash and is not a path; a mistyped path should not lead to a network error.
    if text.startswith((".", "/", "~")) or text.count("/") > 1 or not text:
        raise InputError(f"{text!r} does not exist; expected a directory or a hub id such as google/flan-t5-small")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(text, allow_patterns=patterns))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise InputError(
            f"{text!r} is not a local directory and cannot be downloaded from the hub ({type(error).__name__}: "
            f"{str(error).splitlines()[0]}); check the name and the network, or set HF_TOKEN for a private model"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        names = ", ".join(sorted(p.name for p in path.parent.iterdir())[:8]) or "nothing"
        model = path.parent / "model"
        hint = f" (did you mean {model}?)" if (model / path.name).exists() else ""
        raise InputError(f"{path.parent} has no {path.name}; it contains {names}{hint}") from None
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InputError(f"{path} must contain a JSON object, got {type(value).__name__}")
    return value


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON object with sorted keys."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@contextmanager
def atomic_directory(target: Path, mark: str = "config.json") -> Iterator[Path]:
    """Yield a temporary directory that is renamed to `target` if the block succeeds, and deleted if it fails.

    An existing `target` is replaced only once the new directory is complete, and only if it is empty or contains the
    file `mark`; anything else raises an error.
    """
    target = target.expanduser()
    if target.is_dir():
        foreign = not (target / mark).exists() and any(target.iterdir())
    else:
        foreign = target.exists()
    if foreign:
        kind = "checkpoint" if mark.endswith(".json") else f"directory with {mark}"
        raise InputError(f"{target} already exists and is not a {kind}; choose another path or delete it")
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    old = fresh.with_suffix(".old")
    fresh.mkdir()
    try:
        yield fresh
        # Flush before renaming: a power failure must not leave a complete-looking directory with empty files.
        for path in [*fresh.rglob("*"), fresh]:
            sync(path)
        # A directory that is not empty cannot be replaced by a rename, so the old one moves away first.
        if target.exists():
            target.rename(old)
        fresh.rename(target)
    except BaseException:
        # The old directory was moved away, but moving the new one into place failed: move the old one back.
        if old.exists() and not target.exists():
            old.rename(target)
        raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
