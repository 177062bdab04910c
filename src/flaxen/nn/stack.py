"""Run a stack of layers whose parameters carry a leading layer axis: scanned or unrolled, with or without remat."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

M = TypeVar("M")
SAVED = "kept"
LONG = 2**22  # numbers that enter a layer, such as 8,192 tokens of 512 features


def run(
    layer: Callable[[M, Array, Array | None], Array],
    layers: M,
    x: Array,
    key: Array | None,
    *,
    scan: bool,
    remat: bool,
) -> Array:
    """x = layer(layers[i], x, key_i) for every i. A scan compiles one body; unrolling lets XLA see them all.

    The backward pass reads what the layer marked with `save_for_backward` and recomputes the rest, which is cheap:
    norms, activations, transposes. With `remat` only x is saved.
    """
    policy = None if remat else jax.checkpoint_policies.save_only_these_names(SAVED)
    layer = jax.checkpoint(layer, policy=policy, prevent_cse=not scan)
    n = depth(layers)
    keys = None if key is None else jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(n))
    if scan:
        x, _ = lax.scan(lambda x, xs: (layer(xs[0], x, xs[1]), None), x, (layers, keys))
        return x
    for i, one in enumerate(unstack(layers)):
        x = layer(one, x, None if keys is None else keys[i])
    return x


def save_for_backward(x: Array) -> Array:
    """Marks what the backward needs and should not compute twice: mostly results of matmuls."""
    return checkpoint_name(x, SAVED)


def compute_together(arrays: M) -> M:
    """The same arrays, none of which exists before all of them. JAX computes what depends on no weight, such as masks,
    once before the loops that it is used in, and keeps it all; tied to what depends on weights, it stays inside."""
    return lax.optimization_barrier(arrays)


def depth(layers: Any) -> int:
    return jax.tree.leaves(layers)[0].shape[0]


@jax.custom_vjp
def unstack(layers: M) -> list[M]:
    """A stacked module as a list of its layers."""
    return [jax.tree.map(lambda leaf, i=i: leaf[i], layers) for i in range(depth(layers))]


# The gradient of slicing would be a sum of padded arrays, each as large as the stack; one concatenation does.
unstack.defvjp(
    lambda layers: (unstack(layers), None),
    lambda _, grads: (jax.tree.map(lambda *leaves: jnp.stack(leaves), *grads),),
)
