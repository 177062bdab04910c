"""Keys and values of the past, for decoding one token at a time; beams share them and reordering moves none."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int

from flaxen.nn.attention import LayerCache
from flaxen.nn.blockwise import MASKED, attend_plain
from flaxen.nn.hardware import target


class KeyValues(NamedTuple):
    """Keys and values of one attention, K heads and S columns. K is N, or N G where every sequence has a past of its
    own. Keys are transposed where the target asks for it."""

    keys: Float[Array, "B K H S"] | Float[Array, "B K S H"]
    values: Float[Array, "B K S H"]

    @staticmethod
    def of(k: Float[Array, "B N S H"], v: Float[Array, "B N S H"]) -> "KeyValues":
        return KeyValues(_as_cached(k), v)

    def with_prompt(self, k: Float[Array, "B N P H"], v: Float[Array, "B N P H"]) -> "KeyValues":
        """With the keys and values of a prompt in the first columns, for all sequences."""
        repeats = self.values.shape[1] // k.shape[1]
        return self._written(jnp.repeat(k, repeats, axis=1), jnp.repeat(v, repeats, axis=1), 0)

    def with_tokens(self, k: Float[Array, "B N G H"], v: Float[Array, "B N G H"], column: Array) -> "KeyValues":
        """With those of one token of every sequence, from `column` on."""
        return self._written(self._by_head(k), self._by_head(v), column)

    def read(self, q: Float[Array, "B N T H"], bias: Float[Array, "#B #K #T S"]) -> Float[Array, "B N T H"]:
        """What the queries see of it."""
        y = attend_plain(self._by_head(q), self.keys, self.values, bias, target().transposed_keys)
        return y.reshape(q.shape)

    def _by_head(self, a: Array) -> Array:
        """[B, N, G, H], or where every sequence has a past of its own [B, N G, 1, H]."""
        return a.reshape(*self.values.shape[:2], -1, a.shape[-1])

    def _written(self, k: Array, v: Array, column: Array | int) -> "KeyValues":
        axis = 3 if target().transposed_keys else 2
        keys = lax.dynamic_update_slice_in_dim(self.keys, _as_cached(k).astype(self.keys.dtype), column, axis)
        values = lax.dynamic_update_slice_in_dim(self.values, v.astype(self.values.dtype), column, 2)
        return KeyValues(keys, values)


def _as_cached(k: Array) -> Array:
    return k.swapaxes(2, 3) if target().transposed_keys else k


class TokenPlan(NamedTuple):
    """Who sees whom when every sequence has one token: all that the cache holds, under a bias with masks."""

    bias: Float[Array, "#B #K #G S"]
    column: Int[Array, ""] | None = None  # where the keys of these tokens go
    scale: Array | None = None  # of the scores, where it differs from layer to layer

    def attend(self, q: Array, k: Array, v: Array, cache: Any, key: Array | None = None) -> tuple[Array, Any]:
        """What the tokens see of the past and of themselves; and the cache with them in it."""
        assert self.column is not None, "Cache.plan makes a plan for tokens that join the cache"
        cache = cache.with_tokens(k, v, self.column)
        return self.read(q, cache), cache

    def read(self, q: Array, source: Any, key: Array | None = None) -> Array:
        """What the tokens see of the given keys and values."""
        return source.read(q if self.scale is None else q * self.scale.astype(q.dtype), self.bias)


class Cache(NamedTuple):
    """The past of B inputs × G sequences of each: P columns of a prompt that they share, then room for T tokens.

    With a writer, S = P + T G and all sequences look at one past; without, each is a head of its own: N G for N, and
    S = P + T.
    """

    layers: tuple[LayerCache, ...]
    prompt: Bool[Array, "B P"]  # True for real tokens
    writer: Int[Array, "B G T"] | None  # which sequence wrote the key that sequence g reads at time t
    time: Int[Array, ""]  # tokens behind the prompt so far

    def plan(self, beams: int, by_time: Float[Array, "N T"] | None = None) -> TokenPlan:
        """The plan of tokens at `time`: masks, a bias of each head for keys at each time, and where their keys go."""
        column = self.prompt.shape[1] + self.time * (1 if self.writer is None else beams)
        return TokenPlan(self._bias(beams, by_time), column)

    def _bias(self, beams: int, by_time: Float[Array, "N T"] | None) -> Float[Array, "#B #K #G S"]:
        times = self.times(beams)
        here = jnp.zeros((1, len(times))) if by_time is None else by_time
        if self.writer is None:
            own = jnp.repeat(here + jnp.where(times <= self.time, 0.0, MASKED), 1 if by_time is None else beams, axis=0)
            own = own[None, :, None]
        else:
            # A sequence reads a key if the one that wrote it is its ancestor.
            mine = (self.writer[..., None] == jnp.arange(beams)) & (times <= self.time)[:, None]  # [B, G, T, G]
            own = here[None, :, None, :, None] + jnp.where(mine, 0.0, MASKED)[:, None]
            own = own.reshape(*own.shape[:3], -1)
        if not self.prompt.shape[1]:
            return own
        before = jnp.where(self.prompt, 0.0, MASKED)[:, None, None]
        rows = (len(self.prompt), *own.shape[1:3])
        parts = [jnp.broadcast_to(part, (*rows, part.shape[-1])) for part in (before, own)]
        return jnp.concatenate(parts, axis=-1)

    def times(self, beams: int) -> Int[Array, "T"]:
        """0, 1, … for the tokens that there is room for."""
        columns = self.layers[0].own.values.shape[2] - self.prompt.shape[1]
        return jnp.arange(columns if self.writer is None else columns // beams)

    def grown(self, layers: Sequence[LayerCache]) -> "Cache":
        """One token later, with the caches that the layers returned."""
        return self._replace(layers=tuple(layers), time=self.time + 1)

    def select(self, beams: Int[Array, "B G"]) -> "Cache":
        """Reorder by beam index: sequence g continues what was sequence beams[b, g]."""
        assert self.writer is not None, "allocate_cache(reorder=True) makes a cache whose sequences can be selected"
        writer = jnp.take_along_axis(self.writer, beams[:, :, None], axis=1)
        ahead = jnp.arange(writer.shape[2]) >= self.time
        return self._replace(writer=jnp.where(ahead, jnp.arange(writer.shape[1])[:, None], writer))


def allocate_cache(
    source: Sequence[KeyValues | None],
    heads: tuple[int, int],
    dtype: DTypeLike,
    prompt: Bool[Array, "B P"],
    length: int,
    beams: int,
    reorder: bool,
) -> Cache:
    """An empty cache with room for a prompt and `length` tokens, for layers of `heads` (N, H). `source` holds the keys
    and values that each layer's cross-attention sees, None without one."""
    (rows, before), (n_heads, d_head) = prompt.shape, heads
    shape = (n_heads, before + length * beams) if reorder else (n_heads * beams, before + length)

    empty = jnp.zeros((rows, *shape, d_head), dtype)
    writer = jnp.broadcast_to(jnp.arange(beams)[:, None], (rows, beams, length)) if reorder else None
    layers = tuple(LayerCache(KeyValues.of(empty, empty), one) for one in source)
    return Cache(layers, prompt, writer, jnp.zeros((), jnp.int32))


def plan_source(valid: Bool[Array, "B S"] | None = None) -> TokenPlan:
    """The plan of tokens that see a cached sequence, all of it or where `valid`."""
    return TokenPlan(jnp.zeros((1, 1, 1, 1)) if valid is None else jnp.where(valid, 0.0, MASKED)[:, None, None])
