"""Checkpoint directories: finding them, reading JSON, writing all of a directory or nothing."""

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

WANTED = ["*.json", "*.safetensors", "spiece.model", "*.txt"]


def locate(source: str | os.PathLike[str], subfolder: str | None = None) -> Path:
    """A local directory as it is; a hub id ('google/flan-t5-small') by download, or from the cache when offline. Or a
    folder in it: of a diffusion model's 'text_encoder_2', only that and 'tokenizer_2' are downloaded."""
    if subfolder is None:
        return _locate(source, WANTED)
    folders = (subfolder, str(tokenizer_folder(Path(subfolder)) or subfolder))
    top = _locate(source, [f"{folder}/{pattern}" for folder in folders for pattern in WANTED])
    if not (top / subfolder).is_dir():
        here = [path.name for path in sorted(top.iterdir()) if path.is_dir()]
        raise InputError(
            f"{source} has no subfolder {subfolder!r}{did_you_mean(subfolder, here)}; it has {', '.join(here)}"
        )
    return top / subfolder


def tokenizer_folder(directory: Path) -> Path | None:
    """Where a diffusion model keeps the tokenizer of a text encoder: 'tokenizer_2' for 'text_encoder_2'."""
    name = directory.name
    return directory.with_name(name.replace("text_encoder", "tokenizer")) if name.startswith("text_encoder") else None


def _locate(source: str | os.PathLike[str], wanted: list[str]) -> Path:
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    text = str(source)
    if path.exists():
        raise InputError(f"{text} is a file; expected a directory with config.json and model.safetensors")
    if text.startswith((".", "/", "~")) or text.count("/") > 1 or not text:
        raise InputError(f"no directory {text!r}; give a checkpoint directory or a hub id such as google/flan-t5-small")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(text, allow_patterns=wanted))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise InputError(
            f"{text!r} is no directory here, and the hub did not give it ({type(error).__name__}: "
            f"{str(error).splitlines()[0]}); check the name, the network, or HF_TOKEN for a private model"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or an error that names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        here = ", ".join(sorted(p.name for p in path.parent.iterdir())[:8]) or "nothing"
        model = path.parent / "model"
        hint = f"; do you mean {model}?" if (model / path.name).exists() else ""
        raise InputError(f"{path.parent} has no {path.name}; it holds {here}{hint}") from None
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InputError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@contextmanager
def atomic_directory(target: Path, mark: str = "config.json") -> Iterator[Path]:
    """Yields a fresh directory that becomes `target` if the block succeeds and vanishes if it does not.

    What stood at `target` stays until the new one is complete, if it is of the same kind: it has the file `mark`.
    Anything else is refused.
    """
    target = target.expanduser()
    if target.is_dir():
        strange = not (target / mark).exists() and any(target.iterdir())
    else:
        strange = target.exists()
    if strange:
        kind = "checkpoint" if mark.endswith(".json") else f"directory with {mark}"
        raise InputError(f"{target} exists and is no {kind}; choose another directory, or empty this one")
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    old = fresh.with_suffix(".old")
    fresh.mkdir()
    try:
        yield fresh
        for path in [*fresh.rglob("*"), fresh]:
            sync(path)
        if target.exists():
            target.rename(old)
        fresh.rename(target)
    except BaseException:
        if old.exists() and not target.exists():
            old.rename(target)
        raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
