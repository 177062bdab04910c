"""What a Transformer-VQ has read, as a file: to continue from another day, or from the same point many times."""

import io
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import jax
import jax.numpy as jnp
import numpy as np

from flaxen.atomic import write_bytes
from flaxen.errors import InputError
from flaxen.models import vq_lm
from flaxen.models.vq_config import Config
from flaxen.tree import leaves, map_leaves

# The names of a file are its format: files written by earlier versions must stay readable. Caches are [L, B, …] there.
NAMES = {"documents": "seen.documents", "latest": "seen.latest"}
UNSAVED = ("key",)  # of dropout, which is training's


@dataclass(frozen=True)
class Memory:
    """What a Transformer-VQ has read: a state, and the last token, which is not in it yet."""

    state: vq_lm.VQState
    unread: tuple[int, ...]
    model: str  # the digest of its weights: to another one this says nothing

    def save(self, path: str | os.PathLike[str]) -> None:
        """To one .npz file; all of it, or nothing."""
        arrays = {name: np.asarray(leaf) for name, leaf in to_file(self.state).items()}
        file = io.BytesIO()
        about = {"unread": np.array(self.unread, np.int32), "model": np.array(self.model)}
        np.savez(file, allow_pickle=False, **about, **arrays)
        write_bytes(Path(path), file.getvalue())

    @staticmethod
    def load(path: str | os.PathLike[str], config: Any) -> "Memory":
        """Of a model with this configuration."""
        if getattr(config, "attention", None) != "vq":
            raise InputError("only a Transformer-VQ with attention vq keeps a memory")
        try:
            with np.load(io.BytesIO(Path(path).read_bytes())) as file:
                found = {name: file[name] for name in file.files}
                unread, model = tuple(found["unread"].tolist()), str(found["model"])
        except (OSError, ValueError, TypeError, EOFError, BadZipFile, zlib.error, KeyError, AttributeError) as error:
            raise InputError(f"{path} holds no memory of a Transformer-VQ ({error})") from None
        expected = jax.eval_shape(lambda: to_file(vq_lm.initial_state(config, 1)))
        for name, leaf in expected.items():
            if name not in found or found[name].shape != leaf.shape:
                got = found[name].shape if name in found else "nothing"
                raise InputError(f"{path} is the memory of another model: {name} should be {leaf.shape}, is {got}")
        return Memory(from_file(found, config), unread, model)


def to_file(state: vq_lm.VQState) -> dict[str, jax.Array]:
    """A state by the names of a file."""
    return {NAMES.get(name, name): _layers_first(name, a) for name, a in leaves(state).items() if name not in UNSAVED}


def from_file(found: dict[str, np.ndarray], config: Config) -> vq_lm.VQState:
    def read(name: str, leaf: jax.Array) -> jax.Array:
        return leaf if name in UNSAVED else _layers_first(name, jnp.asarray(found[NAMES.get(name, name)]))

    return map_leaves(read, vq_lm.initial_state(config, 1))


def _layers_first(name: str, a: jax.Array) -> jax.Array:
    """[B, L, …] to [L, B, …], and back."""
    return jnp.swapaxes(a, 0, 1) if name.startswith("caches.") else a
