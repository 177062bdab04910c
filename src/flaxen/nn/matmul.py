"""Matrix products in mixed precision: operands in the compute dtype, f32 accumulation, CPU-friendly gradients."""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from flaxen.nn.hardware import transposed_copy, transposed_right


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def contract(x: Array, w: Array, n: int) -> Array:
    """Contract the last n axes of x with the first n of w, in x's dtype with f32 accumulation.

    w is passed in its own shape and reshaped inside, so that the backward pass saves w and not a reshaped copy of it.
    """
    rows, matrix = _flatten(x, w, n)
    return _dot(rows, matrix, x.dtype).reshape(*x.shape[: x.ndim - n], *w.shape[n:])


def _forward(x: Array, w: Array, n: int) -> tuple[Array, tuple[Array, Array]]:
    return contract(x, w, n), (x, w)


def _backward(n: int, residuals: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, w = residuals
    rows, matrix = _flatten(x, w, n)
    grads = g.reshape(len(rows), -1)
    dx = _dot(grads, transposed_right(matrix), x.dtype)
    # dw = rowsᵀ · grads, or the transpose of gradsᵀ · rows. Transpose the narrower operand: the copy is cheaper.
    if matrix.shape[0] <= matrix.shape[1]:
        dw = _dot(transposed_copy(rows), grads, jnp.float32)
    else:
        dw = transposed_copy(_dot(transposed_copy(grads), rows, jnp.float32))
    return dx.reshape(x.shape), dw.reshape(w.shape).astype(w.dtype)


contract.defvjp(_forward, _backward)


def dots(a: Array, b: Array, axis: int = -1) -> Array:
    """Dot products over the first or the last axis, in f32.

    Written as an einsum, which XLA compiles to a matmul: a multiplication followed by a sum takes 5 to 15 times as long
    on a CPU.
    """
    rule = {0: "D...,D...->...", -1: "...D,...D->..."}[axis]
    return jnp.einsum(rule, a, b, precision="highest", preferred_element_type=jnp.float32)


def _flatten(x: Array, w: Array, n: int) -> tuple[Array, Array]:
    """x and w as matrices, with the n contracted axes merged into one; w in x's dtype."""
    inner = math.prod(w.shape[:n])
    return x.reshape(-1, inner), w.reshape(inner, -1).astype(x.dtype)


def _dot(a: Array, b: Array, dtype: DTypeLike) -> Array:
    return jnp.dot(a, b, preferred_element_type=jnp.float32).astype(dtype)
