"""The matrix product of the library: operands in the compute dtype, sums in f32, a backward made for CPUs too."""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike


@jax.custom_vjp
def matmul(x: Array, w: Array) -> Array:
    """x[..., D] · w[D, F], computed and returned in x's dtype with f32 accumulation."""
    return _dot(x.reshape(-1, x.shape[-1]), w.astype(x.dtype), x.dtype).reshape(*x.shape[:-1], w.shape[-1])


def _forward(x: Array, w: Array) -> tuple[Array, tuple[Array, Array]]:
    return matmul(x, w), (x, w)


def _backward(residuals: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, w = residuals
    rows, grads = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
    dx = _dot(grads, _transposed(w.astype(x.dtype)), x.dtype)
    # dw = rowsᵀ · grads. Transpose the narrower of the two: it is the cheaper copy.
    if w.shape[0] <= w.shape[1]:
        dw = _dot(_transposed(rows), grads, jnp.float32)
    else:
        dw = _transposed(_dot(_transposed(grads), rows, jnp.float32))
    return dx.reshape(x.shape), dw.astype(w.dtype)


matmul.defvjp(_forward, _backward)


def _dot(a: Array, b: Array, dtype: DTypeLike) -> Array:
    return jnp.dot(a, b, preferred_element_type=jnp.float32).astype(dtype)


def _transposed(a: Array) -> Array:
    """aᵀ as an array of its own on a CPU, whose product kernels run at half speed on a transposed operand."""
    if jax.default_backend() != "cpu":
        return a.T
    return lax.optimization_barrier(lax.optimization_barrier(a).T)
