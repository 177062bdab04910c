"""Run a stack of layers stored with a leading layer axis: scanned or unrolled, with gradient checkpointing."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

M = TypeVar("M")
SAVED = "saved"  # name of the values that gradient checkpointing saves instead of recomputing
# With at least this many input elements (e.g. 8,192 tokens of 512 features), layers save less for the backward pass.
LONG = 2**22


def run(
    layer: Callable[[M, Array, Array | None], Array],
    layers: M,
    x: Array,
    key: Array | None,
    *,
    scan: bool,
    remat: bool,
) -> Array:
    """Apply x = layer(layers[i], x, key_i) for every i, with gradient checkpointing.

    The backward pass reads the values that the layer marked with `save_for_backward` and recomputes the rest, which is
    cheap: norms, activations, transposes. With `remat` only the input of each layer is saved. A scan compiles one layer
    body; unrolling compiles all of them and lets XLA optimise across layers.
    """
    policy = None if remat else jax.checkpoint_policies.save_only_these_names(SAVED)
    # In a scan XLA cannot merge the recomputation with the forward pass, so no barriers against that are needed.
    layer = jax.checkpoint(layer, policy=policy, prevent_cse=not scan)
    n = depth(layers)
    keys = None if key is None else jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(n))
    if scan:
        x, _ = lax.scan(lambda x, xs: (layer(xs[0], x, xs[1]), None), x, (layers, keys))
        return x
    for i, parameters in enumerate(unstack(layers)):
        x = layer(parameters, x, None if keys is None else keys[i])
    return x


def save_for_backward(x: Array) -> Array:
    """Mark a value that gradient checkpointing saves instead of recomputing: mostly results of matmuls."""
    return checkpoint_name(x, SAVED)


def compute_together(arrays: M) -> M:
    """Return the arrays unchanged, tied together so that none is available before all of them are.

    JAX hoists values that depend on no weights, such as masks, out of the loops that use them, and then stores them for
    all iterations. Tied to an array that depends on weights, they are computed inside the loop.
    """
    return lax.optimization_barrier(arrays)


def depth(layers: Any) -> int:
    """The number of layers in a stacked module."""
    return jax.tree.leaves(layers)[0].shape[0]


@jax.custom_vjp
def unstack(layers: M) -> list[M]:
    """Split a stacked module into a list of its layers."""
    return [jax.tree.map(lambda leaf, i=i: leaf[i], layers) for i in range(depth(layers))]


# JAX's gradient of slicing is a sum of padded arrays, each as large as the whole stack; stacking the gradients of the
# layers gives the same result in one copy.
unstack.defvjp(
    lambda layers: (unstack(layers), None),
    lambda _, grads: (jax.tree.map(lambda *leaves: jnp.stack(leaves), *grads),),
)
