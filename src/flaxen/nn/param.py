"""Parameters are declared by shape and initial law; numbers come later, from a file or from a seed.

A freshly built module is abstract: its leaves are `jax.ShapeDtypeStruct`s. So loading a checkpoint never throws
random weights away, and the structure of an 11-billion-parameter model costs nothing to look at.
"""

import math
import zlib
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flaxen.tree import map_leaves, name

T = TypeVar("T")


def normal(*shape: int, std: float) -> nnx.Param:
    """A parameter that starts as Gaussian noise."""
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32), std=std)


def constant(*shape: int, value: float) -> nnx.Param:
    """A parameter that starts as one number everywhere."""
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32), value_at_start=value)


def stacked(module: T, n: int) -> T:
    """`n` copies of an abstract module as one, each leaf with a leading layer axis."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((n, *leaf.shape), leaf.dtype), module)


def round_up(rows: int) -> int:
    """Rows of an embedding table come in multiples of 128, as T5's 32,128 for 32,100 ids do: matmuls run faster."""
    return -(-rows // 128) * 128


def initialise(model: T, seed: int) -> T:
    """Numbers for an abstract model. Each leaf depends only on (seed, its path), whatever else the model holds.

    NumPy draws them: threefry under XLA takes five times as long on a CPU, most of it to compile.
    """
    laws = {
        name(path): variable.get_metadata()
        for path, variable in jax.tree_util.tree_leaves_with_path(
            model, is_leaf=lambda node: isinstance(node, nnx.Variable)
        )
    }

    def fill(path: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        law: dict[str, Any] = laws[path]
        if "value_at_start" in law:
            return jnp.full(leaf.shape, law["value_at_start"], leaf.dtype)
        draw = np.random.Generator(np.random.Philox(key=[seed, zlib.crc32(path.encode())]))
        numbers = draw.standard_normal(math.prod(leaf.shape), np.float32).reshape(leaf.shape)
        return jnp.asarray(numbers * np.float32(law["std"]), leaf.dtype)

    return map_leaves(fill, model)


def with_config(model: T, config: Any) -> T:
    """The same weights, computed as another configuration says."""
    return jax.tree.unflatten(jax.tree.structure(type(model)(config)), jax.tree.leaves(model))  # type: ignore[call-arg]
