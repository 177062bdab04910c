"""The key-value cache for decoding one token at a time; beam search can reorder it without copying keys.

Reordering the cache for beam search copies no keys or values: all beams of an input share one buffer, and a small table
says which beam wrote the key that each beam reads at each time (`Cache.writer`).
"""

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
    """Cached keys and values of one attention layer: K heads and S columns, one per cached token.

    K is N if the sequences of an input share the buffer, N · G if each has its own. Keys are stored transposed if the
    hardware target has `transposed_keys`.
    """

    keys: Float[Array, "B K H S"] | Float[Array, "B K S H"]
    values: Float[Array, "B K S H"]

    @staticmethod
    def of(k: Float[Array, "B N S H"], v: Float[Array, "B N S H"]) -> "KeyValues":
        """Store the given keys and values, the keys in the target's layout."""
        return KeyValues(_to_cache_layout(k), v)

    def with_prompt(self, k: Float[Array, "B N P H"], v: Float[Array, "B N P H"]) -> "KeyValues":
        """Write the keys and values of a prompt to the first columns, for all sequences."""
        repeats = self.values.shape[1] // k.shape[1]  # 1, or G if every sequence has its own buffer
        return self._write(jnp.repeat(k, repeats, axis=1), jnp.repeat(v, repeats, axis=1), 0)

    def with_tokens(self, k: Float[Array, "B N G H"], v: Float[Array, "B N G H"], column: Array) -> "KeyValues":
        """Write the keys and values of one token per sequence, starting at `column`."""
        return self._write(self._by_head(k), self._by_head(v), column)

    def read(self, q: Float[Array, "B N T H"], bias: Float[Array, "#B #K #T S"]) -> Float[Array, "B N T H"]:
        """Attend to all columns, with a bias that includes masks."""
        y = attend_plain(self._by_head(q), self.keys, self.values, bias, target().transposed_keys)
        return y.reshape(q.shape)

    def _by_head(self, a: Array) -> Array:
        """Reshape [B, N, G, H] to [B, K, …, H]: unchanged if K is N, [B, N · G, 1, H] if K is N · G."""
        return a.reshape(*self.values.shape[:2], -1, a.shape[-1])

    def _write(self, k: Array, v: Array, column: Array | int) -> "KeyValues":
        axis = 3 if target().transposed_keys else 2
        keys = lax.dynamic_update_slice_in_dim(self.keys, _to_cache_layout(k).astype(self.keys.dtype), column, axis)
        values = lax.dynamic_update_slice_in_dim(self.values, v.astype(self.values.dtype), column, 2)
        return KeyValues(keys, values)


def _to_cache_layout(k: Array) -> Array:
    """Transpose keys [B, K, S, H] to [B, K, H, S] if the target stores them that way."""
    return k.swapaxes(2, 3) if target().transposed_keys else k


class TokenPlan(NamedTuple):
    """Attention plan of a decoding step, one token per sequence: the cache is read with a bias that includes masks."""

    bias: Float[Array, "#B #K #G S"]
    column: Int[Array, ""] | None = None  # where the keys of these tokens go
    scale: Array | None = None  # scale factor of the scores, if it differs between layers

    def attend(self, q: Array, k: Array, v: Array, cache: Any, key: Array | None = None) -> tuple[Array, Any]:
        """Write the tokens to the cache, then attend to the past and to the tokens themselves."""
        assert self.column is not None, "a plan without a column cannot write to the cache; use Cache.plan"
        cache = cache.with_tokens(k, v, self.column)
        return self.read(q, cache), cache

    def read(self, q: Array, source: Any, key: Array | None = None) -> Array:
        """Attend to the keys and values in `source`, a `KeyValues`."""
        return source.read(q if self.scale is None else q * self.scale.astype(q.dtype), self.bias)


class Cache(NamedTuple):
    """The cache of B inputs × G sequences: P columns for the prompt, then room for T generated tokens.

    With `writer` (beam search) the sequences of an input share one buffer of S = P + T · G columns and can be
    reordered. Without it each sequence has its own buffer, stored as additional heads: K = N · G and S = P + T.
    """

    layers: tuple[LayerCache, ...]
    prompt: Bool[Array, "B P"]  # True for real tokens
    writer: Int[Array, "B G T"] | None  # which sequence wrote the key that sequence g reads at time t
    time: Int[Array, ""]  # number of tokens cached after the prompt so far

    def plan(self, beams: int, by_time: Float[Array, "N T"] | None = None) -> TokenPlan:
        """The plan for tokens at `time`: masks, each head's bias for keys at each time, and the column to write to."""
        column = self.prompt.shape[1] + self.time * (1 if self.writer is None else beams)
        return TokenPlan(self._bias(beams, by_time), column)

    def _bias(self, beams: int, by_time: Float[Array, "N T"] | None) -> Float[Array, "#B #K #G S"]:
        times = self.times(beams)
        # A token is written to the cache before the cache is read, so a query at `time` also sees the key at `time`.
        bias = jnp.zeros((1, len(times))) if by_time is None else by_time
        if self.writer is None:
            # The heads of a cache are ordered by attention head, then by sequence, as `_by_head` lays them out.
            own = jnp.repeat(bias + jnp.where(times <= self.time, 0.0, MASKED), 1 if by_time is None else beams, axis=0)
            own = own[None, :, None]
        else:
            # At each time the shared buffer has one column per sequence; a sequence sees only its ancestor's.
            seen = (self.writer[..., None] == jnp.arange(beams)) & (times <= self.time)[:, None]  # [B, G, T, G]
            # [B, N, G, T, G] to [B, N, G, T · G]: columns are ordered by time, then by the sequence that wrote them.
            own = bias[None, :, None, :, None] + jnp.where(seen, 0.0, MASKED)[:, None]
            own = own.reshape(*own.shape[:3], -1)
        if not self.prompt.shape[1]:
            return own
        prompt = jnp.where(self.prompt, 0.0, MASKED)[:, None, None]
        rows = (len(self.prompt), *own.shape[1:3])
        parts = [jnp.broadcast_to(part, (*rows, part.shape[-1])) for part in (prompt, own)]
        return jnp.concatenate(parts, axis=-1)

    def times(self, beams: int) -> Int[Array, "T"]:
        """The times 0, 1, … of all generated tokens that the cache has room for."""
        columns = self.layers[0].own.values.shape[2] - self.prompt.shape[1]
        return jnp.arange(columns if self.writer is None else columns // beams)

    def grown(self, layers: Sequence[LayerCache]) -> "Cache":
        """Advance by one token, with the caches that the layers returned."""
        return self._replace(layers=tuple(layers), time=self.time + 1)

    def select(self, beams: Int[Array, "B G"]) -> "Cache":
        """Reorder the cache for beam search: sequence g of input b continues the former sequence beams[b, g]."""
        assert self.writer is not None, "this cache cannot be reordered; allocate it with reorder=True"
        writer = jnp.take_along_axis(self.writer, beams[:, :, None], axis=1)
        # From now on every sequence writes, and so reads, its own column.
        # Beams are reordered after a step, when `time` is already that of the next token.
        future = jnp.arange(writer.shape[2]) >= self.time
        return self._replace(writer=jnp.where(future, jnp.arange(writer.shape[1])[:, None], writer))


def allocate_cache(
    source: Sequence[KeyValues | None],
    heads: tuple[int, int],
    dtype: DTypeLike,
    prompt: Bool[Array, "B P"],
    length: int,
    beams: int,
    reorder: bool,
) -> Cache:
    """Allocate an empty cache with room for the prompt and `length` tokens, for layers of `heads` = (N, H).

    `source` holds each layer's cross-attention keys and values, or None for layers without cross-attention. With
    `reorder`, sequences share a buffer and can be reordered for beam search.
    """
    (rows, n_prompt), (n_heads, d_head) = prompt.shape, heads
    shape = (n_heads, n_prompt + length * beams) if reorder else (n_heads * beams, n_prompt + length)

    empty = jnp.zeros((rows, *shape, d_head), dtype)
    writer = jnp.broadcast_to(jnp.arange(beams)[:, None], (rows, beams, length)) if reorder else None
    layers = tuple(LayerCache(KeyValues.of(empty, empty), layer_source) for layer_source in source)
    return Cache(layers, prompt, writer, jnp.zeros((), jnp.int32))


def plan_source(valid: Bool[Array, "B S"] | None = None) -> TokenPlan:
    """The plan for cross-attention to a cached source: all of it, or the tokens where `valid` is True."""
    return TokenPlan(jnp.zeros((1, 1, 1, 1)) if valid is None else jnp.where(valid, 0.0, MASKED)[:, None, None])
