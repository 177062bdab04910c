"""Keys and values of the past, for decoding one token at a time; beams share them and reordering moves none."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from flaxen.nn.attention import MASKED, attend_plain


class Cache(NamedTuple):
    """The past of B inputs × G sequences of each: P columns of a prompt that they share, then room for T tokens.

    Keys lie transposed. With a writer, S = P + T G and all sequences look at one past; without, each is a head of its
    own: N G for N, and S = P + T.
    """

    layers: tuple[tuple[Array, Array], ...]  # keys [B, N, H, S] and values [B, N, S, H] of each layer
    prompt: Bool[Array, "B P"]  # True for real tokens
    writer: Int[Array, "B G T"] | None  # which sequence wrote the key that sequence g reads at time t
    time: Int[Array, ""]  # tokens behind the prompt so far

    def bias(self, beams: int, by_time: Float[Array, "N T"] | None = None) -> Float[Array, "#B #K #G S"]:
        """What is added to the scores of tokens at `time`: masks, and a bias of each head for keys at each time. K is
        N, or N G without a writer."""
        length = self._length(beams)
        times = jnp.arange(length)
        here = jnp.zeros((1, length)) if by_time is None else by_time
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

    def _length(self, beams: int) -> int:
        s = self.layers[0][1].shape[2] - self.prompt.shape[1]
        return s if self.writer is None else s // beams

    def attend(
        self, layer: int, q: Float[Array, "B N G H"], k: Array, v: Array, bias: Array
    ) -> tuple[Float[Array, "B N G H"], tuple[Array, Array]]:
        """What the sequences see of the past and of themselves; and the layer's keys and values with theirs."""
        keys, values = self.layers[layer]
        heads = (*keys.shape[:2], -1, keys.shape[2])  # [B, N, G, H], or without a writer [B, N G, 1, H]
        k, v = k.reshape(heads), v.reshape(heads)
        at = self.prompt.shape[1] + self.time * k.shape[2]
        keys = lax.dynamic_update_slice_in_dim(keys, k.swapaxes(2, 3).astype(keys.dtype), at, 3)
        values = lax.dynamic_update_slice_in_dim(values, v.astype(values.dtype), at, 2)
        return attend_plain(q.reshape(heads), keys, values, bias).reshape(q.shape), (keys, values)

    def grown(self, layers: Sequence[tuple[Array, Array]]) -> "Cache":
        """One token later, with the layers that `attend` gave."""
        return self._replace(layers=tuple(layers), time=self.time + 1)

    def select(self, beams: Int[Array, "B G"]) -> "Cache":
        """Sequence g goes on from what was sequence beams[b, g]."""
        assert self.writer is not None, "room(reorder=True) makes a cache whose sequences can be selected"
        writer = jnp.take_along_axis(self.writer, beams[:, :, None], axis=1)
        ahead = jnp.arange(writer.shape[2]) >= self.time
        return self._replace(writer=jnp.where(ahead, jnp.arange(writer.shape[1])[:, None], writer))


def room(
    prompt: Sequence[tuple[Float[Array, "B N P H"], Float[Array, "B N P H"]]],
    valid: Bool[Array, "B P"],
    length: int,
    beams: int,
    reorder: bool,
) -> Cache:
    """A cache behind the keys and values of a prompt (P may be 0), with room for `length` tokens."""

    def layer(k: Array, v: Array) -> tuple[Array, Array]:
        repeats, more = (1, length * beams) if reorder else (beams, length)
        k, v = (jnp.repeat(a, repeats, axis=1) for a in (k, v))
        k, v = (jnp.pad(a, ((0, 0), (0, 0), (0, more), (0, 0))) for a in (k, v))
        return k.swapaxes(2, 3), v

    writer = jnp.broadcast_to(jnp.arange(beams)[:, None], (len(valid), beams, length)) if reorder else None
    return Cache(tuple(layer(*one) for one in prompt), valid, writer, jnp.zeros((), jnp.int32))
