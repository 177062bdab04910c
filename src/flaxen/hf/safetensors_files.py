"""Read safetensors files by memory mapping, and write them; one file or several shards with an index."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from flaxen.errors import InputError
from flaxen.hf import files

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


class Safetensors:
    """The tensors of a checkpoint by name, memory-mapped: a tensor takes memory only when it is read.

    We parse the header ourselves because the NumPy interface of the safetensors package does not support bfloat16.
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
            raise InputError(f"{path.name}: tensor {name!r} has dtype {entry['dtype']}; supported: {', '.join(DTYPES)}")
        shape = self.shape(name)
        if 0 in shape:  # an empty file region cannot be memory-mapped
            return np.zeros(shape, DTYPES[entry["dtype"]])
        return np.memmap(path, DTYPES[entry["dtype"]], "r", start + entry["data_offsets"][0], shape)


def _weight_files(directory: Path, name: str) -> list[Path]:
    """Return the safetensors files of a checkpoint: the shards of its index, or a single file."""
    index = directory / f"{name}.index.json"
    if index.exists():
        names = sorted(set(files.read_json(index).get("weight_map", {}).values()))
        missing = [name for name in names if not (directory / name).exists()]
        if missing or not names:
            raise InputError(
                f"{index} lists {'shards that do not exist: ' + ', '.join(missing) if missing else 'no shards'}"
            )
        return [directory / name for name in names]
    if (directory / name).exists():
        return [directory / name]
    others = sorted(p.name for p in directory.iterdir() if p.suffix in (".bin", ".msgpack", ".h5", ".pt"))
    hint = f"; it contains {', '.join(others)}: convert to safetensors first" if others else ""
    raise InputError(f"{directory} has neither {name} nor {name}.index.json{hint}")


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """Read the header of a safetensors file; return its entry for each tensor, and the offset of the data."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            # A file is the length of the header in 8 bytes, the header as JSON, then the data.
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise ValueError("the header is longer than the file")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        needed = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is not a valid safetensors file: {error}; download or save it again") from None
    if needed != size:
        raise InputError(
            f"{path} is not a valid safetensors file: expected {needed:,} bytes, got {size:,}; "
            "download or save it again"
        )
    return header, 8 + length


def write_tensors(directory: Path, tensors: dict[str, np.ndarray], shard_bytes: int) -> None:
    """Write model.safetensors, or shards of at most `shard_bytes` and their index."""
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
        # transformers 4 refuses a file without this field.
        save_file(shard, directory / name, metadata={"format": "pt"})
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(t.nbytes for t in tensors.values())},
            "weight_map": {key: name for name, shard in zip(names, shards) for key in shard},
        }
        files.write_json(directory / "model.safetensors.index.json", index)
