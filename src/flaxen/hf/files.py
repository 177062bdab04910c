"""Checkpoint directories: finding them, reading JSON and safetensors, writing all of a directory or nothing."""

import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from flaxen.atomic import sync
from flaxen.errors import InputError

DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
WANTED = ["*.json", "*.safetensors", "spiece.model", "*.txt"]


def locate(source: str | os.PathLike[str]) -> Path:
    """A local directory as it is; a hub id ('google/flan-t5-small') by download, or from the cache when offline."""
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
        return Path(snapshot_download(text, allow_patterns=WANTED))
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


class Tensors:
    """The tensors of a checkpoint by name, memory-mapped: a tensor costs memory only when it is read.

    The header is read here and not by the safetensors package because its NumPy side knows no bfloat16.
    """

    def __init__(self, directory: Path, name: str = "model.safetensors"):
        self._entries: dict[str, tuple[Path, dict[str, Any], int]] = {}
        for path in _weight_files(directory, name):
            header, start = _header(path)
            self._entries.update({name: (path, entry, start) for name, entry in header.items()})

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._entries[name][1]["shape"])

    def dtype(self, name: str) -> str:
        return self._entries[name][1]["dtype"]

    def __getitem__(self, name: str) -> np.ndarray:
        path, entry, start = self._entries[name]
        if entry["dtype"] not in DTYPES:
            raise InputError(f"{path.name}: tensor {name!r} has dtype {entry['dtype']}; known: {', '.join(DTYPES)}")
        shape = self.shape(name)
        if 0 in shape:
            return np.zeros(shape, DTYPES[entry["dtype"]])
        return np.memmap(path, DTYPES[entry["dtype"]], "r", start + entry["data_offsets"][0], shape)


def _weight_files(directory: Path, name: str) -> list[Path]:
    index = directory / f"{name}.index.json"
    if index.exists():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        missing = [name for name in names if not (directory / name).exists()]
        if missing or not names:
            raise InputError(f"{index} names shards that are not there: {', '.join(missing) or 'none at all'}")
        return [directory / name for name in names]
    if (directory / name).exists():
        return [directory / name]
    others = sorted(p.name for p in directory.iterdir() if p.suffix in (".bin", ".msgpack", ".h5", ".pt"))
    hint = f"; it holds {', '.join(others)}: save those weights as safetensors first" if others else ""
    raise InputError(f"{directory} has neither {name} nor {name}.index.json{hint}")


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """The table of tensors of a safetensors file, and where its data begins."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise ValueError("its header does not fit in it")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        needed = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is not a safetensors file, or cut short ({error}); fetch or save it again") from None
    if needed != size:
        raise InputError(f"{path} should have {needed:,} bytes and has {size:,}: it is cut short; fetch it again")
    return header, 8 + length


def write_tensors(directory: Path, tensors: dict[str, np.ndarray], shard_bytes: int) -> None:
    """model.safetensors, or shards of at most `shard_bytes` with their index."""
    from safetensors.numpy import save_file

    shards: list[dict[str, np.ndarray]] = [{}]
    for name, tensor in tensors.items():
        if shards[-1] and sum(t.nbytes for t in shards[-1].values()) + tensor.nbytes > shard_bytes:
            shards.append({})
        shards[-1][name] = tensor
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = ["model.safetensors"]
    for name, shard in zip(names, shards):
        save_file(shard, directory / name, metadata={"format": "pt"})
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(t.nbytes for t in tensors.values())},
            "weight_map": {key: name for name, shard in zip(names, shards) for key in shard},
        }
        write_json(directory / "model.safetensors.index.json", index)


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@contextmanager
def whole_directory(target: Path, mark: str = "config.json") -> Iterator[Path]:
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
        for path in [*fresh.iterdir(), fresh]:
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
