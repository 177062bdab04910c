"""Memory files: the state of a Transformer-VQ after reading a text, to continue from it later or repeatedly."""

import io
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile, ZipInfo

import jax
import jax.numpy as jnp
import numpy as np

from flaxen.atomic import write_bytes
from flaxen.errors import InputError
from flaxen.models import vq_lm
from flaxen.models.vq_config import Config
from flaxen.tree import leaves, map_leaves

# Array names in the file are part of its format: files of earlier versions must stay readable. Caches are stored as
# [L, B, …].
NAMES = {"documents": "seen.documents", "latest": "seen.latest"}
UNSAVED = ("key",)  # the PRNG key of dropout is used only in training


@dataclass(frozen=True)
class Memory:
    """The state of a Transformer-VQ after reading all but the last token of a text, and that last token.

    The last token is the input of the first decoding step.
    """

    state: vq_lm.VQState
    unread: tuple[int, ...]
    model: str  # digest of the weights: a memory is meaningless to any other model

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the memory to a .npz file, atomically."""
        arrays = {name: np.asarray(leaf) for name, leaf in to_file(self.state).items()}
        file = io.BytesIO()
        metadata = {"unread": np.array(self.unread, np.int32), "model": np.array(self.model)}
        with ZipFile(file, "w") as archive:
            for name, array in (metadata | arrays).items():
                # With a fixed date: a zip archive cannot hold the time of a clock before 1980.
                with archive.open(ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)
        write_bytes(Path(path), file.getvalue())

    @staticmethod
    def load(path: str | os.PathLike[str], config: Any) -> "Memory":
        """Load the memory of a model with this configuration."""
        if getattr(config, "attention", None) != "vq":
            raise InputError("memory is supported only by Transformer-VQ models with attention=vq")
        try:
            with np.load(io.BytesIO(Path(path).read_bytes())) as file:
                arrays = {name: file[name] for name in file.files}
                unread, model = tuple(arrays["unread"].tolist()), str(arrays["model"])
        except (OSError, ValueError, TypeError, EOFError, BadZipFile, zlib.error, KeyError, AttributeError) as error:
            raise InputError(f"cannot read a memory from {path}: {error}") from None
        expected = jax.eval_shape(lambda: to_file(vq_lm.initial_state(config, 1)))
        for name, leaf in expected.items():
            if name not in arrays or arrays[name].shape != leaf.shape:
                got = arrays[name].shape if name in arrays else "nothing"
                raise InputError(f"{path} belongs to another model: expected {name} of shape {leaf.shape}, got {got}")
        return Memory(from_file(arrays, config), unread, model)


def to_file(state: vq_lm.VQState) -> dict[str, jax.Array]:
    """Return the arrays of a state, with the names and axes of the file."""
    return {NAMES.get(name, name): _swap_layers(name, a) for name, a in leaves(state).items() if name not in UNSAVED}


def from_file(arrays: dict[str, np.ndarray], config: Config) -> vq_lm.VQState:
    """Build the state from the arrays of a file."""

    def read(name: str, leaf: jax.Array) -> jax.Array:
        return leaf if name in UNSAVED else _swap_layers(name, jnp.asarray(arrays[NAMES.get(name, name)]))

    return map_leaves(read, vq_lm.initial_state(config, 1))


def _swap_layers(name: str, a: jax.Array) -> jax.Array:
    """Convert caches from [B, L, …] to [L, B, …] or back; other arrays are unchanged."""
    return jnp.swapaxes(a, 0, 1) if name.startswith("caches.") else a
