"""The matrix product of the library: operands in the compute dtype, sums in f32, a backward made for CPUs too."""

import math
import os
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

PANEL = 16  # rows of a matrix that are transposed at a time
SMALL = 2**15  # numbers up to which that is not worth a loop
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def contract(x: Array, w: Array, n: int) -> Array:
    """The last n axes of x with the first n of w, computed and returned in x's dtype with f32 accumulation.

    It takes w in its own shape: a reshaped copy would be saved for the backward, once per layer.
    """
    rows, matrix = _flat(x, w, n)
    return _dot(rows, matrix, x.dtype).reshape(*x.shape[: x.ndim - n], *w.shape[n:])


def _forward(x: Array, w: Array, n: int) -> tuple[Array, tuple[Array, Array]]:
    return contract(x, w, n), (x, w)


def _backward(n: int, residuals: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, w = residuals
    rows, matrix = _flat(x, w, n)
    grads = g.reshape(len(rows), -1)
    dx = _dot(grads, turned_right(matrix), x.dtype)
    # dw = rowsᵀ · grads. Transpose the narrower of the two: it is the cheaper copy.
    if matrix.shape[0] <= matrix.shape[1]:
        dw = _dot(turned(rows), grads, jnp.float32)
    else:
        dw = turned(_dot(turned(grads), rows, jnp.float32))
    return dx.reshape(x.shape), dw.reshape(w.shape).astype(w.dtype)


contract.defvjp(_forward, _backward)


def contract_few(x: Array, wt: Array) -> Array:
    """x[R, D] · wtᵀ for few rows R and wt[F, D], as (wt · xᵀ)ᵀ: on a CPU up to twice as fast, because what the product
    kernel repacks is then x and not the weights. The barrier keeps XLA from turning it round again."""
    return lax.optimization_barrier(_dot(wt.astype(x.dtype), x.T, jnp.float32)).T


def dots(a: Array, b: Array, axis: int = -1) -> Array:
    """Sums of products over the first or the last axis, in f32: to XLA a product too. What it makes of a multiplication
    and a sum takes 5 to 15 times as long on a CPU."""
    rule = {0: "D...,D...->...", -1: "...D,...D->..."}[axis]
    return jnp.einsum(rule, a, b, precision="highest", preferred_element_type=jnp.float32)


def _flat(x: Array, w: Array, n: int) -> tuple[Array, Array]:
    inner = math.prod(w.shape[:n])
    return x.reshape(-1, inner), w.reshape(inner, -1).astype(x.dtype)


def _dot(a: Array, b: Array, dtype: DTypeLike) -> Array:
    return jnp.dot(a, b, preferred_element_type=jnp.float32).astype(dtype)


def turned(a: Array) -> Array:
    """aᵀ as an array of its own on a CPU, whose product kernels run at half speed on a transposed left operand.

    Where cores are few, a loop takes some rows at a time, as many as stay in the nearest cache whatever their stride:
    up to three times as fast as XLA's transpose, which many cores share.
    """
    if jax.default_backend() != "cpu":
        return a.T
    rows, columns = a.shape
    if a.size < SMALL or rows < PANEL or CORES > 4:
        return lax.optimization_barrier(lax.optimization_barrier(a).T)
    if a.dtype == jnp.bfloat16:  # as integers: XLA would widen the whole of it, and round it again, at every turn
        return lax.bitcast_convert_type(turned(lax.bitcast_convert_type(a, jnp.uint16)), a.dtype)

    def body(i: Array, out: Array) -> Array:
        at = jnp.minimum(i * PANEL, rows - PANEL)
        return lax.dynamic_update_slice_in_dim(out, lax.dynamic_slice_in_dim(a, at, PANEL).T, at, 1)

    return lax.fori_loop(0, -(-rows // PANEL), body, jnp.zeros((columns, rows), a.dtype))


def turned_right(a: Array) -> Array:
    """aᵀ as the right operand of a product. In f32 kernels pack it from either side as fast; the fast ones of bf16 take
    arrays only as they stand, and without them bf16 has the speed of f32."""
    return turned(a) if a.dtype == jnp.bfloat16 else a.T
