"""Linear maps over axis tuples, embeddings, RMS norm, the feed-forward network, dropout."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from flaxen.nn.matmul import matmul
from flaxen.nn.param import constant, normal


class Linear(nnx.Module):
    """Contracts the last axes of x with a weight of shape [*inputs, *outputs]; no bias, as everywhere in T5."""

    def __init__(self, inputs: tuple[int, ...], outputs: tuple[int, ...], std: float):
        self.weight = normal(*inputs, *outputs, std=std)
        self.n_inputs = len(inputs)

    def __call__(self, x: Array) -> Array:
        w = self.weight[...]
        inputs, outputs = w.shape[: self.n_inputs], w.shape[self.n_inputs :]
        batch = x.shape[: x.ndim - self.n_inputs]
        flat = matmul(x.reshape(*batch, math.prod(inputs)), w.reshape(math.prod(inputs), math.prod(outputs)))
        return flat.reshape(*batch, *outputs)


class Embedding(nnx.Module):
    """A table of vectors; also an output head, whose logits are x · tableᵀ."""

    def __init__(self, n: int, d: int, std: float):
        self.weight = normal(n, d, std=std)

    def __call__(self, ids: Int[Array, "*B"]) -> Float[Array, "*B D"]:
        return jnp.take(self.weight[...], ids, axis=0)

    def logits(self, x: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """In f32 whatever the compute dtype."""
        table = self.weight[...].astype(x.dtype)
        return jnp.einsum("...D,VD->...V", x, table, preferred_element_type=jnp.float32)


class RMSNorm(nnx.Module):
    """Scale to unit root mean square: no mean, no bias. Statistics in f32, result in the asked dtype."""

    def __init__(self, d: int, epsilon: float, scale: float = 1.0):
        self.weight = constant(d, value=scale)
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "*B D"], dtype: DTypeLike) -> Float[Array, "*B D"]:
        x = x.astype(jnp.float32)
        y = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.epsilon)
        return (y * self.weight[...].astype(jnp.float32)).astype(dtype)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_new": lambda x: jax.nn.gelu(x, approximate=True),
    "silu": jax.nn.silu,
}


class MLP(nnx.Module):
    """Two linear maps around an activation; with a gate, act(x·gate) ⊙ (x·wi)."""

    def __init__(self, d: int, d_ff: int, activation: str, gated: bool, factor: float = 1.0):
        self.wi = Linear((d,), (d_ff,), std=factor * d**-0.5)
        self.gate = Linear((d,), (d_ff,), std=factor * d**-0.5) if gated else None
        self.wo = Linear((d_ff,), (d,), std=factor * d_ff**-0.5)
        self.activation = activation

    def __call__(self, x: Float[Array, "*B D"], rate: float, key: Array | None) -> Float[Array, "*B D"]:
        act = ACTIVATIONS[self.activation]
        h = act(self.wi(x)) if self.gate is None else act(self.gate(x)) * self.wi(x)
        return self.wo(dropout(h, rate, key))


def dropout(x: Array, rate: float, key: Array | None) -> Array:
    """Zero a share `rate` of x and scale up the rest; `key=None` means none."""
    if key is None or rate == 0.0:
        return x
    return jnp.where(keep_mask(key, x.shape, rate), x / (1.0 - rate), jnp.zeros((), x.dtype))


def keep_mask(key: Array, shape: tuple[int, ...], rate: float) -> Array:
    """True with probability 1 - rate, from a hash of (key, index).

    Threefry would cost more than the layer it acts on; two rounds of a 32-bit mixer fuse into the consumer.
    """
    words = jax.random.key_data(key).astype(jnp.uint32).reshape(-1)
    index = jnp.arange(math.prod(shape), dtype=jnp.uint32).reshape(shape)
    bits = _mix(_mix(index ^ words[0]) + words[1])
    return bits >= jnp.uint32(min(round(rate * 2**32), 2**32 - 1))


def _mix(x: Array) -> Array:
    """The 'lowbias32' integer hash."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
