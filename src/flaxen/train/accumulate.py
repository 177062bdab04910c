"""Gradient accumulation: compute the gradient of a batch piece by piece, using the memory of one piece."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from flaxen.nn.loss import Sums
from flaxen.tree import first_match, map_leaves

M = TypeVar("M")


# Gradients that remain sums instead of being divided by the number of labels: the codebooks' statistics.
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
    """Return (mean loss, sums, gradient of the mean loss, new carry), computed in `pieces` equal parts of the batch.

    The arrays of `batch` and `carry` have the rows on their first axis. The mean is over labels, or the sum is divided
    by `divisor` if given. Sums are accumulated and divided once at the end, so that pieces with unequal numbers of
    labels are weighted correctly. Each piece gets its own noise.
    """
    rows = {len(leaf) for leaf in jax.tree.leaves(batch)}
    if len(rows) != 1 or rows.pop() % pieces:
        raise ValueError(
            f"cannot split arrays of {sorted(len(leaf) for leaf in jax.tree.leaves(batch))} rows into {pieces} pieces; "
            "all arrays of a batch must have the same number of rows, divisible by the number of pieces"
        )

    def total(model: M, piece: Any, carry: Any, key: Array | None) -> tuple[Array, tuple[Sums, Any]]:
        sums, carry = loss(model, piece, carry, key)
        return sums.loss, (sums, carry)

    def add(accumulated: tuple[Sums, M], xs: tuple[Any, Any, Array | None]) -> tuple[tuple[Sums, M], Any]:
        (_, (sums, carry)), gradient = jax.value_and_grad(total, has_aux=True)(model, *xs)
        return jax.tree.map(jnp.add, accumulated, (sums, gradient)), carry

    keys = None if key is None else jax.random.split(key, pieces)
    # [B, ...] -> [pieces, B / pieces, ...], scanned over the first axis. The carry belongs to rows, so it is split like
    # the batch and is not passed from piece to piece.
    split, carried = jax.tree.map(lambda leaf: leaf.reshape(pieces, -1, *leaf.shape[1:]), (batch, carry))
    zero = (Sums(*(jnp.zeros(()) for _ in Sums._fields)), jax.tree.map(jnp.zeros_like, model))
    (sums, gradient), carried = lax.scan(add, zero, (split, carried, keys))
    carried = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), carried)
    # At least 1: a batch of nothing but padding has a gradient of zero, not NaN.
    weight = jnp.maximum(sums.weight if divisor is None else divisor, 1.0)

    def mean(path: str, leaf: Array) -> Array:
        return leaf if first_match(SUMMED, path) else leaf / weight.astype(leaf.dtype)

    return sums.loss / weight, sums, map_leaves(mean, gradient), carried
