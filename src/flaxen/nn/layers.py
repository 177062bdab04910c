"""Linear maps over several axes, embeddings, norms, the feed-forward network, dropout."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from flaxen.nn.hardware import materialise, matmul_few_rows, matmul_transposed, target
from flaxen.nn.matmul import contract, dots
from flaxen.nn.param import constant, normal
from flaxen.nn.stack import save_for_backward, unstack

M = TypeVar("M")


class Linear(nnx.Module):
    """A linear map: contracts the last axes of x with a weight of shape [*inputs, *outputs]; optional bias."""

    def __init__(self, inputs: tuple[int, ...], outputs: tuple[int, ...], std: float, bias: bool = False):
        self.weight = normal(*inputs, *outputs, std=std)
        self.bias = constant(*outputs, value=0.0) if bias else None
        self.n_inputs = len(inputs)

    def __call__(self, x: Array) -> Array:
        y = contract(x, self.weight[...], self.n_inputs)
        return y if self.bias is None else y + self.bias[...].astype(y.dtype)


class LoRALinear(NamedTuple):
    """A Linear with a low-rank update (LoRA): x · W + (x · down) · up."""

    linear: Linear
    down: Array  # [*inputs, r]
    up: Array  # [r, *outputs]

    def __call__(self, x: Array) -> Array:
        low = contract(x, self.down, self.linear.n_inputs)
        return self.linear(x) + contract(low, self.up, 1)


@jax.tree_util.register_pytree_node_class
class FewRows:
    """A Linear laid out for inputs of few rows, as in decoding: its weight is a matrix [outputs, inputs]."""

    def __init__(self, matrix: Any, bias: Any, n_inputs: int, outputs: tuple[int, ...]):
        self.matrix, self.bias, self.n_inputs, self.outputs = matrix, bias, n_inputs, outputs

    def __call__(self, x: Array) -> Array:
        batch = x.shape[: x.ndim - self.n_inputs]
        y = matmul_few_rows(x.reshape(math.prod(batch), -1), self.matrix)
        y = y if self.bias is None else y + self.bias.reshape(-1)
        return y.astype(x.dtype).reshape(*batch, *self.outputs)

    def tree_flatten(self) -> tuple[tuple[Any, Any], tuple[int, tuple[int, ...]]]:
        return (self.matrix, self.bias), (self.n_inputs, self.outputs)

    @classmethod
    def tree_unflatten(cls, sizes: tuple[int, tuple[int, ...]], arrays: tuple[Any, Any]) -> "FewRows":
        return cls(*arrays, *sizes)


def for_few_rows(module: M) -> M:
    """Replace every Linear in `module` by a FewRows, if the target has `weights_first`.

    It copies the weights, which pays off when many calls on few rows follow.
    """
    if not target().weights_first:
        return module

    def convert(node: Linear | Array) -> FewRows | Array:
        if not isinstance(node, Linear):
            return node
        w, n = node.weight[...], node.n_inputs
        matrix = materialise(w.reshape(math.prod(w.shape[:n]), -1).T)
        return FewRows(matrix, None if node.bias is None else node.bias[...], n, w.shape[n:])

    return jax.tree.map(convert, module, is_leaf=lambda node: isinstance(node, Linear))


def lay_out(layers: M) -> tuple[M, ...] | None:
    """Split a stack into layers laid out for decoding with `for_few_rows`, once for all tokens.

    Returns None if the target does not have `weights_first`: then the caller slices the stack where it uses a layer.
    """
    return _lay_out(layers) if target().weights_first else None


@jax.jit
def _lay_out(layers: M) -> tuple[M, ...]:
    return tuple(for_few_rows(layer) for layer in unstack(layers))


class Embedding(nnx.Module):
    """An embedding table; also an output head, whose logits are x · tableᵀ."""

    def __init__(self, n: int, d: int, std: float):
        self.weight = normal(n, d, std=std)

    def __call__(self, ids: Int[Array, "*B"]) -> Float[Array, "*B D"]:
        return jnp.take(self.weight[...], ids, axis=0)

    def logits(self, x: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """Logits of every row of the table, in f32 whatever the compute dtype."""
        return matmul_transposed(x, self.weight[...])


class RMSNorm(nnx.Module):
    """RMS norm with a weight and an optional bias. Statistics are computed in f32, the result has the given dtype."""

    def __init__(self, d: int, epsilon: float, scale: float = 1.0, bias: bool = False):
        self.weight = constant(d, value=scale)
        self.bias = constant(d, value=0.0) if bias else None
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "*B D"], dtype: DTypeLike) -> Float[Array, "*B D"]:
        y = _multiply(unit_rms(x, self.epsilon), self.weight[...].astype(jnp.float32))
        return (y if self.bias is None else y + self.bias[...].astype(jnp.float32)).astype(dtype)


class LayerNorm(nnx.Module):
    """Layer norm with a weight and a bias. Statistics are computed in f32, the result has the given dtype."""

    def __init__(self, d: int, epsilon: float):
        self.weight = constant(d, value=1.0)
        self.bias = constant(d, value=0.0)
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "*B D"], dtype: DTypeLike) -> Float[Array, "*B D"]:
        x = x.astype(jnp.float32)
        # The root mean square of a centred vector is its standard deviation.
        y = unit_rms(x - jnp.mean(x, axis=-1, keepdims=True), self.epsilon)
        return (_multiply(y, self.weight[...].astype(jnp.float32)) + self.bias[...].astype(jnp.float32)).astype(dtype)


# `unit_rms` and `_multiply` have custom gradients that compute their reductions as dot products, which XLA runs much
# faster on CPUs than a multiplication and a sum: see `dots`.


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def unit_rms(x: Float[Array, "*B D"], epsilon: float) -> Float[Array, "*B D"]:
    """Scale the last axis to root mean square 1, in f32."""
    return _unit_rms(x, epsilon)[0]


def _unit_rms(x: Array, epsilon: float) -> tuple[Array, tuple[Array, Array]]:
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)
    return wide * inverse, (x, inverse)


def _unit_rms_backward(epsilon: float, residuals: tuple[Array, Array], g: Array) -> tuple[Array]:
    # With r = rsqrt(mean(x²) + epsilon): dx = r · (g - x · r² · (g · x) / D).
    x, inverse = residuals
    wide = x.astype(jnp.float32)
    shared = dots(g, wide)[..., None] * jnp.square(inverse) / x.shape[-1]
    return ((inverse * (g - shared * wide)).astype(x.dtype),)


unit_rms.defvjp(_unit_rms, _unit_rms_backward)


@jax.custom_vjp
def _multiply(x: Float[Array, "*B D"], weight: Float[Array, "D"]) -> Float[Array, "*B D"]:
    return x * weight


_multiply.defvjp(
    lambda x, weight: (x * weight, (x, weight)),
    lambda xs, g: (g * xs[1], dots(g.reshape(-1, g.shape[-1]), xs[0].reshape(-1, g.shape[-1]), axis=0)),
)


# Activations by the names that Hugging Face configurations use; several names mean the same function.
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_new": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_fast": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    # The sigmoid approximation of GELU.
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "tanh": jnp.tanh,
}


class MLP(nnx.Module):
    """Feed-forward network: act(x·wi)·wo, or with a gate (act(x·gate) ⊙ (x·wi))·wo.

    `std` holds the initial standard deviations of wi and wo; by default they are T5's, multiplied by `factor`.
    """

    def __init__(
        self,
        d: int,
        d_ff: int,
        activation: str,
        gated: bool = False,
        factor: float = 1.0,
        bias: bool = False,
        std: tuple[float, float] | None = None,
    ):
        first, last = std or (factor * d**-0.5, factor * d_ff**-0.5)
        self.wi = Linear((d,), (d_ff,), first, bias)
        self.gate = Linear((d,), (d_ff,), first, bias) if gated else None
        self.wo = Linear((d_ff,), (d,), last, bias)
        self.activation = activation

    def __call__(
        self, x: Float[Array, "*B D"], rate: float, key: Array | None, keep: bool = True
    ) -> Float[Array, "*B D"]:
        """With `keep`, the results of wi and gate are saved for the backward pass; otherwise it recomputes them."""
        act, mark = ACTIVATIONS[self.activation], save_for_backward if keep else (lambda y: y)
        h = mark(self.wi(x))
        h = act(h) if self.gate is None else act(mark(self.gate(x))) * h
        return self.wo(dropout(h, rate, key))


def dropout(x: Array, rate: float, key: Array | None) -> Array:
    """Zero a fraction `rate` of x and scale up the rest; `key=None` means no dropout."""
    if key is None or rate == 0.0:
        return x
    index = jnp.arange(x.size, dtype=jnp.uint32).reshape(x.shape)
    return jnp.where(keep_mask(key, index, rate), x / (1.0 - rate), jnp.zeros((), x.dtype))


def keep_mask(key: Array, index: Array, rate: float) -> Array:
    """Dropout mask: True with probability 1 - rate, from a hash of (key, index).

    JAX's own generator, threefry, would cost more than the layer that dropout acts on. Two rounds of a 32-bit integer
    hash fuse into the operation that uses the mask.
    """
    # A threefry key is two 32-bit words; each of the two rounds mixes in one of them.
    words = jax.random.key_data(key).astype(jnp.uint32).reshape(-1)
    bits = _mix(_mix(index ^ words[0]) + words[1])
    # A rate close to 1 would round to 2^32, which does not fit in 32 bits.
    return bits >= jnp.uint32(min(round(rate * 2**32), 2**32 - 1))


def _mix(x: Array) -> Array:
    """The integer hash 'lowbias32'."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
