"""Attention of one token to all tokens before it, in a ring buffer: the decoding form of nn/vq.py and nn/full.py.

A row of the batch is one generated sequence here: B counts inputs × sequences per input.
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
    """The decoding cache of one attention unit: the last E = W + 1 tokens, and counts and means of all older ones.

    Token t is written to slot t % E, which held the token that has just left the window. Only the code of a key is
    stored: the score of a quantised key is that of its code. With full attention nothing is overwritten: there is a
    slot for every token, and the keys themselves are stored.
    """

    keys: Int[Array, "B N E"] | Float[Array, "B N E H"]  # codes; with full attention, keys
    counts: Float[Array, "B N M"]  # number of evicted keys with each code
    values: Float[Array, "B N _ U"]  # E values by slot, then M means by code: one array, for a single matmul


@dataclass(frozen=True)
class TokenStep:
    """Attention of one token in every row."""

    spec: VQSpec
    time: Int[Array, ""]  # the token's slot is time % slots
    documents: Int[Array, "B E"]  # document number by slot, including the current token's; 0 for an empty slot
    latest: Int[Array, "B"]  # the document that the means belong to
    weights: None = None  # codebooks are not updated while decoding

    @property
    def slot(self) -> Int[Array, ""]:
        return self.time % self.documents.shape[1]

    @property
    def own(self) -> Int[Array, "B"]:
        """The document of the current token."""
        return lax.dynamic_index_in_dim(self.documents, self.slot, 1, keepdims=False)

    @property
    def evicted(self) -> Int[Array, "B"]:
        """The document of the token that leaves the window after this step."""
        return lax.dynamic_index_in_dim(self.documents, self._next, 1, keepdims=False)

    @property
    def _next(self) -> Int[Array, ""]:
        """The slot of the next token, which holds the oldest one now: the token to evict."""
        return (self.time + 1) % self.documents.shape[1]

    def attend(self, heads: HeadInputs, cache: Ring) -> tuple[Float[Array, "B N Q 1 U"], Ring]:
        """Return the attention output of the token, and the ring with the token in it and the oldest one evicted."""
        ring, v, at = cache, heads.values, self.slot
        queries, distant = heads.queries[:, :, :, 0], heads.distant[:, :, :, 0]
        by_distance = jnp.einsum("BNQH,NQEH->BNQE", distant, heads.table)
        if heads.codes is None or heads.codebook is None:
            scores = self._scores_of_keys(queries, by_distance, heads.keys, ring.keys)
        else:
            ring = ring._replace(keys=lax.dynamic_update_slice_in_dim(ring.keys, heads.codes, at, 2))
            scores = self._scores_of_codes(queries, by_distance, heads.codebook, ring)
        p = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        # The token's own value is not in the ring yet, so it is added separately. If it were written first, XLA would
        # write it twice, each time into a copy of the whole ring.
        own = jnp.arange(p.shape[-1]) == at
        y = jnp.einsum("BNQE,BNEU->BNQU", jnp.where(own, 0, p), ring.values, preferred_element_type=jnp.float32)
        y = y + jnp.sum(jnp.where(own, p, 0), -1, keepdims=True) * v
        if heads.codes is None:
            ring = ring._replace(keys=_put(ring.keys, heads.keys, write_after_read(at, y)))
        elif self.spec.aggregate:
            ring = self._merge_evicted(ring, y)
        ring = ring._replace(values=_put(ring.values, v, write_after_read(at, y)))
        return y[:, :, :, None].astype(v.dtype), ring

    def _visible(self) -> Array:
        """Which slots the token may see, [B, 1, 1, E]: filled ones, and with `documents` only those of its document."""
        visible = self.documents > 0
        if self.spec.documents:
            visible &= self.documents == self.own[:, None]
        return visible[:, None, None]

    def _scores_of_codes(
        self, queries: Float[Array, "B N Q H"], by_distance: Float[Array, "B N Q E"], codebook: Array, ring: Ring
    ) -> Float[Array, "B N Q _"]:
        """Scores of the slots, followed by scores of the codes if keys beyond the window are attended to."""
        by_code = jnp.einsum("BNQH,NMH->BNQM", queries, codebook)
        # Code M marks an empty slot. It is clipped to a valid index, and `_visible` masks its score.
        near = jnp.take_along_axis(by_code, jnp.minimum(ring.keys, codebook.shape[1] - 1)[:, :, None], axis=-1)
        # by_distance is ordered from distance W to 0. Rotated so that distance 0 is at the token's own slot, it is
        # ordered by slot.
        near = near + jnp.roll(by_distance, self.slot + 1, axis=-1)
        near = jnp.where(self._visible(), near, NEVER)
        if not self.spec.aggregate:
            return near
        # Log-count bias: n keys with the same code have the same score s; their total weight is exp(s + log n).
        far = by_code + jnp.where(ring.counts > 0, jnp.log(jnp.maximum(ring.counts, 1.0)), NEVER)[:, :, None]
        if self.spec.documents:
            far = jnp.where((self.latest == self.own)[:, None, None, None], far, NEVER)
        return jnp.concatenate([near, far], axis=-1)

    def _scores_of_keys(
        self, queries: Float[Array, "B N Q H"], by_distance: Float[Array, "B N Q E"], key: Array, keys: Array
    ) -> Float[Array, "B N Q S"]:
        """Scores of all slots, with full attention. The token's own key is not in its slot yet."""
        window, distance = self.spec.window, self.time - jnp.arange(keys.shape[2])
        scores = jnp.einsum("BNQH,BNSH->BNQS", queries, keys)
        scores = jnp.where(distance == 0, jnp.einsum("BNQH,BNTH->BNQT", queries, key), scores)
        # by_distance begins with distance W, so distance d has index W - d. Only slots beyond the window, which get no
        # bias below, and empty slots, which are masked, have an index that is clipped.
        bias = jnp.take(by_distance, jnp.clip(window - distance, 0, window), axis=-1)
        scores = scores + jnp.where(distance <= window, bias, 0.0)
        seen = self._visible() & ((distance <= window) | self.spec.aggregate)
        return jnp.where(seen, scores, NEVER)

    def _merge_evicted(self, ring: Ring, read: Array) -> Ring:
        """Merge the token that leaves the window into the mean of its code: mean += (value - mean) / count.

        `read` is the attention output: means are overwritten only after it has been computed.
        """
        evicted, slots = self.evicted, self.documents.shape[1]
        rows, heads = jnp.arange(len(evicted))[:, None], jnp.arange(ring.counts.shape[1])
        # A new document starts with empty counts. Its means need no reset: with a count of 0 they are not read.
        counts = ring.counts * (self.latest == evicted)[:, None, None] if self.spec.documents else ring.counts
        code = lax.dynamic_index_in_dim(ring.keys, self._next, 2, keepdims=False)
        place = slots + code  # the code's mean; code M (an empty slot) is out of range, so its writes are dropped
        value = lax.dynamic_index_in_dim(ring.values, self._next, 2, keepdims=False)
        joins = (evicted > 0).astype(jnp.float32)[:, None]
        old = counts.at[rows, heads, code].get(mode="fill", fill_value=0.0)
        new = old + joins
        share = joins / jnp.maximum(new, 1.0)
        mean = ring.values.at[rows, heads, place].get(mode="fill", fill_value=0.0)
        # With a count of 0, the stored mean may be that of an earlier document.
        mean = jnp.where((old > 0)[..., None], mean, 0.0)
        mean = mean * (1 - share)[..., None] + value * share[..., None]
        counts = counts.at[rows, heads, code].set(self.spec.rounded(new), mode="drop")
        place = write_after_read(place, read)
        values = ring.values.at[rows, heads, place].set(self.spec.rounded(mean), mode="drop")
        return ring._replace(counts=counts, values=values)


def _put(slots: Array, new: Array, at: Array) -> Array:
    """Write `new` into slot `at` of [B, N, slots, …]."""
    return lax.dynamic_update_slice_in_dim(slots, new.astype(slots.dtype), at, 2)
