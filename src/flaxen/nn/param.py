"""Declare parameters by shape and initial distribution; their values come later, from a checkpoint or from a seed.

A newly built module is abstract: its leaves are `jax.ShapeDtypeStruct`s. So loading a checkpoint never initialises
random weights only to discard them, and building an 11-billion-parameter model to look at its structure costs nothing.
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
    """Declare a parameter that is initialised with Gaussian noise."""
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32), std=std)


def constant(*shape: int, value: float) -> nnx.Param:
    """Declare a parameter that is initialised to the same number everywhere."""
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32), value_at_start=value)


def stacked(module: T, n: int) -> T:
    """Stack `n` copies of an abstract module: each leaf gets a leading layer axis."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((n, *leaf.shape), leaf.dtype), module)


def round_up(rows: int) -> int:
    """Round the rows of an embedding table up to a multiple of 128, for faster matmuls: T5 pads 32,100 to 32,128."""
    return -(-rows // 128) * 128


def initialise(model: T, seed: int) -> T:
    """Initialise an abstract model. Each leaf depends only on the seed and its path, whatever else the model holds.

    The numbers are drawn by NumPy: on a CPU JAX's threefry takes five times as long, most of it for compilation.
    """
    initial = {
        name(path): variable.get_metadata()
        for path, variable in jax.tree_util.tree_leaves_with_path(
            model, is_leaf=lambda node: isinstance(node, nnx.Variable)
        )
    }

    def fill(path: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        distribution: dict[str, Any] = initial[path]
        if "value_at_start" in distribution:
            return jnp.full(leaf.shape, distribution["value_at_start"], leaf.dtype)
        # Philox takes a key, so every leaf has its own random stream, independent of the other leaves.
        draw = np.random.Generator(np.random.Philox(key=[seed, zlib.crc32(path.encode())]))
        numbers = draw.standard_normal(math.prod(leaf.shape), np.float32).reshape(leaf.shape)
        return jnp.asarray(numbers * np.float32(distribution["std"]), leaf.dtype)

    return map_leaves(fill, model)


def with_config(model: T, config: Any) -> T:
    """Rebuild the model with the same weights and another configuration."""
    return jax.tree.unflatten(jax.tree.structure(type(model)(config)), jax.tree.leaves(model))  # type: ignore[call-arg]
