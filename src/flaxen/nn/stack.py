"""Run a stack of layers whose parameters carry a leading layer axis: scanned or unrolled, with or without remat."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

M = TypeVar("M")
KEPT = "kept"
LONG = 2**22  # numbers that enter a layer, such as 8,192 tokens of 512 features
CACHED = 2**18  # numbers that enter a layer, such as 512 tokens of 512 features: megabytes with all made of them


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

    The backward finds what the layer marked as `kept` and makes the rest again, which is cheap: norms, activations,
    transposes. With `remat` it finds only x.
    """
    policy = None if remat else jax.checkpoint_policies.save_only_these_names(KEPT)
    layer = jax.checkpoint(layer, policy=policy, prevent_cse=not scan)
    n = depth(layers)
    keys = None if key is None else jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(n))
    if scan:
        x, _ = lax.scan(lambda x, xs: (layer(xs[0], x, xs[1]), None), x, (layers, keys))
        return x
    for i, one in enumerate(unstack(layers)):
        x = layer(one, x, None if keys is None else keys[i])
    return x


def kept(x: Array) -> Array:
    """Marks what the backward needs and should not compute twice: mostly results of products."""
    return checkpoint_name(x, KEPT)


def by_rows(function: Callable[..., Array], x: Array, key: Array | None, *more: Any) -> Array:
    """function(x, *more, key), on a CPU for a few rows of the batch at a time: their activations stay in its cache.

    `x` and the arrays of `more` have the batch first; rows must not depend on each other.
    """
    batch = len(x)
    n = max(1, min(batch, CACHED // (x.size // batch)))
    while batch % n:
        n -= 1
    if jax.default_backend() != "cpu" or n == batch:
        return function(x, *more, key)
    chunks = jax.tree.map(lambda a: a.reshape(batch // n, n, *a.shape[1:]), (x, *more))
    keys = None if key is None else jax.random.split(key, batch // n)
    return lax.map(lambda xs: function(*xs[0], xs[1]), (chunks, keys)).reshape(x.shape)


def by_tokens(function: Callable[[Array, Array | None], Array], x: Array, key: Array | None) -> Array:
    """function(x, key) of x [B, T, D], on a CPU for some tokens at a time, which must not depend on each other."""
    tokens = x.reshape(-1, x.shape[-1])
    pieces = -(-x.size // CACHED)
    if jax.default_backend() != "cpu" or pieces < 2:
        return function(x, key)
    if x.size >= LONG:  # the backward holds what is inside for one piece, not for all
        function = jax.checkpoint(function)
    size = -(-len(tokens) // pieces)
    chunks = jnp.pad(tokens, ((0, pieces * size - len(tokens)), (0, 0))).reshape(pieces, 1, size, -1)
    keys = None if key is None else jax.random.split(key, pieces)
    out = lax.map(lambda xs: function(*xs), (chunks, keys))
    return out.reshape(pieces * size, -1)[: len(tokens)].reshape(x.shape)


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
