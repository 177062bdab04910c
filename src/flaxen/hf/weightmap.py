"""Weight tables: one row per tensor maps our leaf to Hugging Face's tensor, for both loading and saving."""

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
    """Our leaf path, Hugging Face's tensor name, and the einops pattern from their layout to ours.

    `{i}` in the tensor name is the layer index: our leaf stacks the tensors of all layers along its first axis.
    """

    ours: str
    theirs: str
    pattern: str = ""

    @property
    def stacked(self) -> bool:
        """Whether our leaf stacks the tensors of all layers."""
        return "{i}" in self.theirs

    def files(self, leaf: Any) -> Iterator[str]:
        """Yield the names of the tensors that make up `leaf`."""
        yield from (self.theirs.format(i=i) for i in range(leaf.shape[0])) if self.stacked else (self.theirs,)

    def sizes(self, leaf: Any) -> dict[str, int]:
        """Return the axis sizes of the pattern, from our layout, where no axes are merged."""
        ours = self.pattern.split("->")[1].split()
        return dict(zip(ours, leaf.shape[self.stacked :]))

    def their_shape(self, leaf: Any) -> tuple[int, ...]:
        """Return the shape of each tensor that makes up `leaf`."""
        if not self.pattern:
            return tuple(leaf.shape[self.stacked :])
        theirs = self.pattern.split("->")[0]
        # Rearrange a zero-stride array of our shape: no memory is allocated.
        return rearrange(np.broadcast_to(np.int8(0), leaf.shape[self.stacked :]), self._inverse(theirs)).shape

    @property
    def keeps_order(self) -> bool:
        """Whether the pattern keeps the order of axes, so that their tensor has input axes first like ours."""
        theirs, arrow, ours = self.pattern.partition("->")
        return bool(arrow) and re.sub(r"[()]", " ", theirs).split() == ours.split()

    def _inverse(self, theirs: str) -> str:
        """Return the pattern from our layout to theirs."""
        return f"{self.pattern.split('->')[1]} -> {theirs}"

    def load(self, tensor: np.ndarray, leaf: Any) -> np.ndarray:
        """Convert one of their tensors to our layout."""
        return rearrange(tensor, self.pattern, **self.sizes(leaf)) if self.pattern else tensor

    def save(self, array: np.ndarray) -> np.ndarray:
        """Convert one of our arrays to their layout."""
        return rearrange(array, self._inverse(self.pattern.split("->")[0])) if self.pattern else array


def load(model: M, rows: Sequence[Row], tensors: Tensors, dtype: Any, unneeded: Callable[[str, Tensors], bool]) -> M:
    """Fill the abstract `model` from `tensors`; missing, misshapen and unexpected tensors are all reported at once."""
    by_path = {row.ours: row for row in rows}
    expected = {theirs: row.their_shape(leaf) for path, leaf in leaves(model).items()
              for row in [by_path[path]] for theirs in row.files(leaf)}  # fmt: skip
    # Names and shapes come from the headers of the files, so problems are found before the model is filled.
    unexpected = [name for name in tensors if name not in expected and not unneeded(name, tensors)]
    problems = []
    for name, shape in expected.items():
        if name not in tensors:
            problems.append(f"missing tensor {name!r}{did_you_mean(name, unexpected)}")
        elif tensors.shape(name) != shape:
            problems.append(f"tensor {name!r} has shape {tensors.shape(name)}, expected {shape}")
    problems += [f"unexpected tensor {name!r}" for name in unexpected]
    if problems:
        raise InputError(
            f"the weights do not match config.json ({len(problems)} problems):\n  " + "\n  ".join(problems)
        )

    def fill(path: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        row = by_path[path]
        if not row.stacked:
            return jnp.asarray(row.load(tensors[row.theirs], leaf).astype(dtype))
        # Convert layer by layer into place: stacking converted layers would need twice the memory.
        array = np.empty(leaf.shape, dtype)
        for i, name in enumerate(row.files(leaf)):
            array[i] = row.load(tensors[name], leaf)
        return jnp.asarray(array)

    return map_leaves(fill, model)


def save(model: Any, rows: Sequence[Row]) -> dict[str, np.ndarray]:
    """Convert a model to tensors with Hugging Face's names and layout."""
    by_path = {row.ours: row for row in rows}
    tensors = {}
    for path, leaf in leaves(model).items():
        row, array = by_path[path], np.asarray(leaf)
        slices = array if row.stacked else [array]
        for name, layer in zip(row.files(leaf), slices):
            tensors[name] = np.asarray(row.save(layer), order="C")
    return tensors


def equal_tensors(tensors: Tensors, a: str, b: str) -> bool:
    """Whether both tensors exist and are equal."""
    return (
        a in tensors
        and b in tensors
        and tensors.shape(a) == tensors.shape(b)
        and np.array_equal(tensors[a], tensors[b])
    )
