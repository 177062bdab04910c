"""Attention layers: projections around a softmax, which a plan describes. One call serves training and decoding.

`y, cache = attention(x, plan, cache)`: a plan is made once per stack and says who sees whom; a cache holds the keys and
values of one layer, and is None in training. Layout [B, N, T, H] throughout: CPU matmuls over it are 10-60 % faster
than over [B, T, N, H].
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from flaxen.nn.layers import Linear

KeysValues = tuple[Float[Array, "B N S H"], Float[Array, "B N S H"]]


@runtime_checkable
class AttentionPlan(Protocol):
    """Who sees whom, for all layers of a stack: `Plan`, `LocalPlan`, or for single tokens `TokenPlan`."""

    def attend(self, q: Array, k: Array, v: Array, cache: Any, key: Array | None) -> tuple[Array, Any]:
        """What tokens see of each other and of the cache, which then holds their keys and values too."""
        ...


@runtime_checkable
class SourcePlan(Protocol):
    """Who sees whom in another sequence: `Plan`, or for its cached keys and values `TokenPlan`."""

    def read(self, q: Array, source: Any, key: Array | None) -> Array:
        """What tokens see of the given keys and values."""
        ...


class Source(NamedTuple):
    """Another sequence to attend to."""

    encoded: Float[Array, "B S D"] | None  # None where caches hold its keys and values
    plan: SourcePlan


class LayerCache(NamedTuple):
    """What one layer of a decoder remembers, as `flaxen.nn.cache.KeyValues`."""

    own: Any  # of the tokens so far
    source: Any = None  # of the sequence that cross-attention sees: projected once


class Attention(nnx.Module):
    """The four projections of self-attention. T5's have no bias, and no scale of the scores."""

    def __init__(
        self,
        d: int,
        n_heads: int,
        d_head: int,
        factor: float = 1.0,
        *,
        std: float | None = None,
        scale: float = 1.0,
        bias: tuple[bool, bool] = (False, False),
    ):
        # T5 folds 1/sqrt(H) into q's initial scale, so the scores are unscaled. With `std`, all begin alike.
        # `bias` is of q, k and v, and of o.
        self.q = Linear((d,), (n_heads, d_head), std or factor * (d * d_head) ** -0.5, bias[0])
        self.k = Linear((d,), (n_heads, d_head), std or factor * d**-0.5, bias[0])
        self.v = Linear((d,), (n_heads, d_head), std or factor * d**-0.5, bias[0])
        self.o = Linear((n_heads, d_head), (d,), std or factor * (n_heads * d_head) ** -0.5, bias[1])
        self.scale = scale

    def __call__(
        self, x: Float[Array, "B T D"], plan: AttentionPlan, cache: Any = None, key: Array | None = None
    ) -> tuple[Float[Array, "B T D"], Any]:
        y, cache = plan.attend(self.query(x), *self.keys_values(x), cache, key)
        return self.output(y), cache

    def query(self, x: Float[Array, "B T D"]) -> Float[Array, "B N T H"]:
        return _scaled(self.q(x).swapaxes(1, 2), self.scale)

    def keys_values(self, x: Float[Array, "B S D"]) -> KeysValues:
        return self.k(x).swapaxes(1, 2), self.v(x).swapaxes(1, 2)

    def output(self, y: Float[Array, "B N T H"]) -> Float[Array, "B T D"]:
        return self.o(y.swapaxes(1, 2))


class CrossAttention(Attention):
    """The same projections, with keys and values of another sequence."""

    def __call__(  # type: ignore[override]
        self, x: Float[Array, "B T D"], source: Source, cache: Any = None, key: Array | None = None
    ) -> tuple[Float[Array, "B T D"], Any]:
        """`cache` holds the keys and values of the source; without it they are projected here."""
        seen = cache
        if seen is None:
            assert source.encoded is not None, "without a cache, the source must be there itself"
            seen = self.keys_values(source.encoded)
        return self.output(source.plan.read(self.query(x), seen, key)), cache


class JointAttention(nnx.Module):
    """Self-attention whose queries, keys and values are one matmul, as GPT-2's files hold them."""

    def __init__(self, d: int, n_heads: int, std: tuple[float, float], scale: float):
        head = (n_heads, d // n_heads)
        self.qkv = Linear((d,), (3, *head), std[0], bias=True)
        self.o = Linear(head, (d,), std[1], bias=True)
        self.scale = scale

    def __call__(
        self, x: Float[Array, "B T D"], plan: AttentionPlan, cache: Any = None, key: Array | None = None
    ) -> tuple[Float[Array, "B T D"], Any]:
        q, k, v = jnp.moveaxis(self.qkv(x), 2, 0).swapaxes(2, 3)
        y, cache = plan.attend(_scaled(q, self.scale), k, v, cache, key)
        return self.o(y.swapaxes(1, 2)), cache


class JointCrossAttention(CrossAttention):
    """Attention to another sequence, whose keys and values are one matmul."""

    def __init__(self, d: int, n_heads: int, std: tuple[float, float], scale: float):
        head = (n_heads, d // n_heads)
        self.q = Linear((d,), head, std[0], bias=True)
        self.kv = Linear((d,), (2, *head), std[0], bias=True)
        self.o = Linear(head, (d,), std[1], bias=True)
        self.scale = scale

    def keys_values(self, x: Float[Array, "B S D"]) -> KeysValues:
        k, v = jnp.moveaxis(self.kv(x), 2, 0).swapaxes(2, 3)
        return k, v


def _scaled(q: Array, scale: float) -> Array:
    return q if scale == 1.0 else q * jnp.asarray(scale, q.dtype)
