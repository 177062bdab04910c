"""The gradient of a batch, a piece at a time: the memory of one piece, the numbers of the whole."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from flaxen.nn.loss import Sums

M = TypeVar("M")


def value_and_grad(
    loss: Callable[[M, Any, Array | None], Sums], model: M, batch: Any, pieces: int, key: Array | None = None
) -> tuple[Array, Sums, M]:
    """(mean loss, its sums, gradient of the mean) of `batch`, whose arrays have the rows first.

    Sums add, so pieces with unequal numbers of labels weigh as they should. Each piece draws noise of its own.
    """
    rows = {len(leaf) for leaf in jax.tree.leaves(batch)}
    if len(rows) != 1 or rows.pop() % pieces:
        raise ValueError(f"a batch of {sorted(len(leaf) for leaf in jax.tree.leaves(batch))} rows, {pieces} pieces")

    def total(model: M, piece: Any, key: Array | None) -> tuple[Array, Sums]:
        sums = loss(model, piece, key)
        return sums.loss, sums

    def add(carry: tuple[Sums, M], xs: tuple[Any, Array | None]) -> tuple[tuple[Sums, M], None]:
        (_, sums), gradient = jax.value_and_grad(total, has_aux=True)(model, *xs)
        return jax.tree.map(jnp.add, carry, (sums, gradient)), None

    keys = None if key is None else jax.random.split(key, pieces)
    split = jax.tree.map(lambda leaf: leaf.reshape(pieces, -1, *leaf.shape[1:]), batch)
    zero = (Sums(*(jnp.zeros(()) for _ in Sums._fields)), jax.tree.map(jnp.zeros_like, model))
    (sums, gradient), _ = lax.scan(add, zero, (split, keys))
    weight = jnp.maximum(sums.weight, 1.0)
    return sums.loss / weight, sums, jax.tree.map(lambda leaf: leaf / weight.astype(leaf.dtype), gradient)
