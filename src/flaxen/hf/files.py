"""Checkpoint directories: locate or download them, read and write JSON."""

import json
import os
from pathlib import Path
from typing import Any

from flaxen.atomic_directory import recover
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
    recover(path)
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
