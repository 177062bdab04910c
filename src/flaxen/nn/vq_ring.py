"""Attention of one token to all those before it, which lie in a ring buffer: the decoding form of nn/vq.py, nn/full.py.

Axes as in nn/vq_plan.py; R rows are B inputs × the sequences of each.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from flaxen.nn.hardware import write_after_read
from flaxen.nn.vq_plan import NEVER, HeadInputs, VQSpec


class Ring(NamedTuple):
    """What one attention remembers while decoding: the last E = C + 1 tokens, each in the slot of the one that has just
    left the window, and the means of those that have left. Of a key only its code is kept: its score is the code's.

    With full attention it never turns: there is a slot for every token, and the keys are kept as they are.
    """

    keys: Int[Array, "B N E"] | Float[Array, "B N E H"]
    counts: Float[Array, "B N M"]  # of keys that have left the window
    values: Float[Array, "B N _ U"]  # by slot, then the means by code: one array, read by one matmul


@dataclass(frozen=True)
class TokenStep:
    """The plan of one token for every row."""

    spec: VQSpec
    time: Int[Array, ""]  # the token's slot is time % slots
    documents: Int[Array, "B E"]  # by slot, the token's own included; 0: nothing is there
    latest: Int[Array, "B"]  # the document that the means are of
    weights: None = None  # nothing is learnt

    @property
    def slot(self) -> Int[Array, ""]:
        return self.time % self.documents.shape[1]

    @property
    def own(self) -> Int[Array, "B"]:
        """The document of the token."""
        return lax.dynamic_index_in_dim(self.documents, self.slot, 1, keepdims=False)

    @property
    def evicted(self) -> Int[Array, "B"]:
        """The document of the token that leaves the window behind this one."""
        return lax.dynamic_index_in_dim(self.documents, self._next, 1, keepdims=False)

    @property
    def _next(self) -> Int[Array, ""]:
        return (self.time + 1) % self.documents.shape[1]

    def attend(self, heads: HeadInputs, cache: Ring) -> tuple[Float[Array, "B N Q 1 U"], Ring]:
        ring, v, at = cache, heads.values, self.slot
        queries, distant = heads.queries[:, :, :, 0], heads.distant[:, :, :, 0]
        by_distance = jnp.einsum("BNQH,NQEH->BNQE", distant, heads.table)
        if heads.codes is None or heads.codebook is None:
            scores = self._scores_of_keys(queries, by_distance, heads.keys, ring.keys)
        else:
            ring = ring._replace(keys=lax.dynamic_update_slice_in_dim(ring.keys, heads.codes, at, 2))
            scores = self._scores_of_codes(queries, by_distance, heads.codebook, ring)
        p = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        # The token's own value is not in the ring yet. Were it written first, XLA would write it twice, each time into
        # a copy of all that is remembered.
        own = jnp.arange(p.shape[-1]) == at
        y = jnp.einsum("BNQE,BNEU->BNQU", jnp.where(own, 0, p), ring.values, preferred_element_type=jnp.float32)
        y = y + jnp.sum(jnp.where(own, p, 0), -1, keepdims=True) * v
        if heads.codes is None:
            ring = ring._replace(keys=_put(ring.keys, heads.keys, write_after_read(at, y)))
        elif self.spec.aggregate:
            ring = self._joined(ring, y)
        ring = ring._replace(values=_put(ring.values, v, write_after_read(at, y)))
        return y[:, :, :, None].astype(v.dtype), ring

    def _visible(self) -> Array:
        """The slots that the token may see, [R, 1, 1, E]."""
        visible = self.documents > 0
        if self.spec.documents:
            visible &= self.documents == self.own[:, None]
        return visible[:, None, None]

    def _scores_of_codes(
        self, queries: Float[Array, "B N Q H"], by_distance: Float[Array, "B N Q E"], codebook: Array, ring: Ring
    ) -> Float[Array, "B N Q _"]:
        """Of the slots, then of the means by code."""
        by_code = jnp.einsum("BNQH,NMH->BNQM", queries, codebook)
        near = jnp.take_along_axis(by_code, jnp.minimum(ring.keys, codebook.shape[1] - 1)[:, :, None], axis=-1)
        # by_distance ends with distance 0, the token's own: rotated until that stands in its slot.
        near = near + jnp.roll(by_distance, self.slot + 1, axis=-1)
        near = jnp.where(self._visible(), near, NEVER)
        if not self.spec.aggregate:
            return near
        # n keys of one score s weigh n · exp(s) = exp(s + log n).
        far = by_code + jnp.where(ring.counts > 0, jnp.log(jnp.maximum(ring.counts, 1.0)), NEVER)[:, :, None]
        if self.spec.documents:
            far = jnp.where((self.latest == self.own)[:, None, None, None], far, NEVER)
        return jnp.concatenate([near, far], axis=-1)

    def _scores_of_keys(
        self, queries: Float[Array, "B N Q H"], by_distance: Float[Array, "B N Q E"], key: Array, keys: Array
    ) -> Float[Array, "B N Q S"]:
        """Of all slots; the token's own key is not there yet."""
        window, distance = self.spec.window, self.time - jnp.arange(keys.shape[2])
        scores = jnp.einsum("BNQH,BNSH->BNQS", queries, keys)
        scores = jnp.where(distance == 0, jnp.einsum("BNQH,BNTH->BNQT", queries, key), scores)
        bias = jnp.take(by_distance, jnp.clip(window - distance, 0, window), axis=-1)
        scores = scores + jnp.where(distance <= window, bias, 0.0)
        seen = self._visible() & ((distance <= window) | self.spec.aggregate)
        return jnp.where(seen, scores, NEVER)

    def _joined(self, ring: Ring, read: Array) -> Ring:
        """The token that leaves the window becomes a part of its code's mean: mean += (value - mean) / count."""
        evicted, slots = self.evicted, self.documents.shape[1]
        rows, heads = jnp.arange(len(evicted))[:, None], jnp.arange(ring.counts.shape[1])
        counts = ring.counts * (self.latest == evicted)[:, None, None] if self.spec.documents else ring.counts
        code = lax.dynamic_index_in_dim(ring.keys, self._next, 2, keepdims=False)
        place = slots + code  # beyond all means, for padding: such writes are dropped
        value = lax.dynamic_index_in_dim(ring.values, self._next, 2, keepdims=False)
        joins = (evicted > 0).astype(jnp.float32)[:, None]
        old = counts.at[rows, heads, code].get(mode="fill", fill_value=0.0)
        new = old + joins
        share = joins / jnp.maximum(new, 1.0)
        mean = ring.values.at[rows, heads, place].get(mode="fill", fill_value=0.0)
        mean = jnp.where((old > 0)[..., None], mean, 0.0)
        mean = mean * (1 - share)[..., None] + value * share[..., None]
        counts = counts.at[rows, heads, code].set(self.spec.rounded(new), mode="drop")
        place = write_after_read(place, read)
        values = ring.values.at[rows, heads, place].set(self.spec.rounded(mean), mode="drop")
        return ring._replace(counts=counts, values=values)


def _put(slots: Array, new: Array, at: Array) -> Array:
    return lax.dynamic_update_slice_in_dim(slots, new.astype(slots.dtype), at, 2)
