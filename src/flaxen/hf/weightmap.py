"""One row per tensor, read left to right to load a checkpoint and right to left to save it."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange

from flaxen.errors import InputError, did_you_mean
from flaxen.hf.tensors import Tensors
from flaxen.tree import leaves, map_leaves

M = TypeVar("M")


@dataclass(frozen=True)
class Row:
    """Our leaf, Hugging Face's tensor, and the einops pattern from theirs to ours; `{i}` is our stacked layer axis."""

    ours: str
    theirs: str
    pattern: str = ""

    @property
    def stacked(self) -> bool:
        return "{i}" in self.theirs

    def files(self, leaf: Any) -> Iterator[str]:
        """The names of the tensors that make up `leaf`."""
        yield from (self.theirs.format(i=i) for i in range(leaf.shape[0])) if self.stacked else (self.theirs,)

    def sizes(self, leaf: Any) -> dict[str, int]:
        """The axis sizes of the pattern, taken from our side, where every axis stands alone."""
        ours = self.pattern.split("->")[1].split()
        return dict(zip(ours, leaf.shape[self.stacked :]))

    def their_shape(self, leaf: Any) -> tuple[int, ...]:
        if not self.pattern:
            return tuple(leaf.shape[self.stacked :])
        theirs = self.pattern.split("->")[0]
        return rearrange(np.broadcast_to(np.int8(0), leaf.shape[self.stacked :]), self._back(theirs)).shape

    @property
    def keeps_order(self) -> bool:
        """Whether a pattern says that their tensor has our axes in our order: inputs first."""
        theirs, arrow, ours = self.pattern.partition("->")
        return bool(arrow) and re.sub(r"[()]", " ", theirs).split() == ours.split()

    def _back(self, theirs: str) -> str:
        return f"{self.pattern.split('->')[1]} -> {theirs}"

    def load(self, tensor: np.ndarray, leaf: Any) -> np.ndarray:
        return rearrange(tensor, self.pattern, **self.sizes(leaf)) if self.pattern else tensor

    def save(self, array: np.ndarray) -> np.ndarray:
        return rearrange(array, self._back(self.pattern.split("->")[0])) if self.pattern else array


def load(model: M, rows: Sequence[Row], tensors: Tensors, dtype: Any, unneeded: Callable[[str, Tensors], bool]) -> M:
    """The abstract `model` filled from `tensors`; every problem of the checkpoint is reported at once."""
    by_path = {row.ours: row for row in rows}
    wanted = {theirs: row.their_shape(leaf) for path, leaf in leaves(model).items()
              for row in [by_path[path]] for theirs in row.files(leaf)}  # fmt: skip
    unexpected = [name for name in tensors if name not in wanted and not unneeded(name, tensors)]
    problems = []
    for name, shape in wanted.items():
        if name not in tensors:
            problems.append(f"missing tensor {name!r}{did_you_mean(name, unexpected)}")
        elif tensors.shape(name) != shape:
            problems.append(f"tensor {name!r} has shape {tensors.shape(name)}, config.json asks for {shape}")
    problems += [f"unexpected tensor {name!r}" for name in unexpected]
    if problems:
        raise InputError(f"the weights do not fit the config, {len(problems)} problems:\n  " + "\n  ".join(problems))

    def fill(path: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        row = by_path[path]
        if not row.stacked:
            return jnp.asarray(row.load(tensors[row.theirs], leaf).astype(dtype))
        array = np.empty(leaf.shape, dtype)
        for i, name in enumerate(row.files(leaf)):
            array[i] = row.load(tensors[name], leaf)
        return jnp.asarray(array)

    return map_leaves(fill, model)


def save(model: Any, rows: Sequence[Row]) -> dict[str, np.ndarray]:
    """Every tensor of the checkpoint, in Hugging Face's names and layout."""
    by_path = {row.ours: row for row in rows}
    tensors = {}
    for path, leaf in leaves(model).items():
        row, array = by_path[path], np.asarray(leaf)
        slices = array if row.stacked else [array]
        for name, one in zip(row.files(leaf), slices):
            tensors[name] = np.asarray(row.save(one), order="C")
    return tensors


def equal_tensors(tensors: Tensors, a: str, b: str) -> bool:
    """Whether both tensors are there and hold the same numbers."""
    return (
        a in tensors
        and b in tensors
        and tensors.shape(a) == tensors.shape(b)
        and np.array_equal(tensors[a], tensors[b])
    )
