"""The gradient of a batch, a piece at a time: the memory of one piece, the numbers of the whole."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from flaxen.nn.loss import Sums
from flaxen.tree import first_match, map_leaves

M = TypeVar("M")


# Gradients that are sums whatever the number of labels: what codebooks learn from.
SUMMED = (("*codebook.*", True), ("*", False))


def value_and_grad(
    loss: Callable[[M, Any, Any, Array | None], tuple[Sums, Any]],
    model: M,
    batch: Any,
    pieces: int,
    key: Array | None = None,
    carry: Any = None,
    divisor: int | None = None,
) -> tuple[Array, Sums, M, Any]:
    """(mean loss, its sums, gradient of the mean, what is carried on) of `batch`, whose arrays have the rows first, as
    those of `carry` have. The mean is over labels, or the sum is divided by `divisor`.

    Sums add, so pieces with unequal numbers of labels weigh as they should. Each piece draws noise of its own.
    """
    rows = {len(leaf) for leaf in jax.tree.leaves(batch)}
    if len(rows) != 1 or rows.pop() % pieces:
        raise ValueError(f"a batch of {sorted(len(leaf) for leaf in jax.tree.leaves(batch))} rows, {pieces} pieces")

    def total(model: M, piece: Any, carry: Any, key: Array | None) -> tuple[Array, tuple[Sums, Any]]:
        sums, carry = loss(model, piece, carry, key)
        return sums.loss, (sums, carry)

    def add(so_far: tuple[Sums, M], xs: tuple[Any, Any, Array | None]) -> tuple[tuple[Sums, M], Any]:
        (_, (sums, carry)), gradient = jax.value_and_grad(total, has_aux=True)(model, *xs)
        return jax.tree.map(jnp.add, so_far, (sums, gradient)), carry

    keys = None if key is None else jax.random.split(key, pieces)
    split, carried = jax.tree.map(lambda leaf: leaf.reshape(pieces, -1, *leaf.shape[1:]), (batch, carry))
    zero = (Sums(*(jnp.zeros(()) for _ in Sums._fields)), jax.tree.map(jnp.zeros_like, model))
    (sums, gradient), carried = lax.scan(add, zero, (split, carried, keys))
    carried = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), carried)
    weight = jnp.maximum(sums.weight if divisor is None else divisor, 1.0)

    def mean(path: str, leaf: Array) -> Array:
        return leaf if first_match(SUMMED, path) else leaf / weight.astype(leaf.dtype)

    return sums.loss / weight, sums, map_leaves(mean, gradient), carried
