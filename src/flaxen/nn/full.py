"""Full, quadratic attention: the same as nn/vq.py, but keys are not quantised and each is attended to individually."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from flaxen.nn.hardware import each_row
from flaxen.nn.vq_block import dot, skew
from flaxen.nn.vq_plan import NEVER, HeadInputs, VQSpec
from flaxen.nn.vq_ring import Ring

# A sequence is computed in 8 segments, each against the keys up to its own end. Of all T × T scores, the half above the
# diagonal is masked; this way only a sixteenth of all scores is computed unnecessarily.
SEGMENTS = 8


@dataclass(frozen=True)
class FullPass:
    """Attention of T tokens to themselves. Only the scores of one block of queries are in memory at a time."""

    spec: VQSpec
    documents: Int[Array, "B T"]  # document number of each token, starting at 1; 0 for padding
    room: int | None = None  # for decoding: return keys and values, with this many empty slots appended
    weights: None = None  # there are no codebooks to update

    def attend(self, heads: HeadInputs, cache: None) -> tuple[Float[Array, "B N Q T U"], Ring | None]:
        """Return the attention output of each query, and a decoding cache if `room` is set."""
        b, n, query_heads, t, _ = heads.queries.shape
        tables = jnp.broadcast_to(heads.table, (b, *heads.table.shape))
        documents = jnp.broadcast_to(self.documents[:, None], (b, n, t))
        inputs = (heads.queries, heads.distant, heads.keys, heads.values, tables, documents)
        rows = tuple(a.reshape(b * n, *a.shape[2:]) for a in inputs)
        out = each_row(partial(_attend_row, self.spec, t // self.spec.block), rows).reshape(b, n, query_heads, t, -1)
        if self.room is None:
            return out, None
        slots = ((0, 0), (0, 0), (0, self.room), (0, 0))
        return out, Ring(jnp.pad(heads.keys, slots), jnp.zeros((b, n, 0)), jnp.pad(heads.values, slots))


def _attend_row(
    spec: VQSpec, blocks: int, q: Array, d: Array, k: Array, v: Array, table: Array, documents: Array
) -> Array:
    """Attention output [Q, T, U] of one key head of one row, segment by segment and block by block.

    `q` and `d` are the queries with the content bias and with the distance bias, [Q, T, H].
    """
    query_heads, block = q.shape[0], spec.block
    q, d = (a.reshape(query_heads, blocks, block, -1).swapaxes(0, 1) for a in (q, d))
    # W padding keys (document 0) in front, so that every block has a full window before it.
    k, v, documents = (jnp.pad(a, ((spec.window, 0), *[(0, 0)] * (a.ndim - 1))) for a in (k, v, documents))
    parts, size = [], -(-blocks // SEGMENTS)
    for first in range(0, blocks, size):
        last = min(first + size, blocks)
        stop = spec.window + last * block
        # Recomputed in the backward pass, which would otherwise save the scores of all blocks.
        body = jax.checkpoint(
            partial(_attend_block, spec, k=k[:stop], v=v[:stop], table=table, documents=documents[:stop])
        )
        parts.append(lax.map(lambda xs, body=body: body(*xs), (jnp.arange(first, last), q[first:last], d[first:last])))
    return jnp.concatenate(parts).swapaxes(0, 1).reshape(query_heads, blocks * block, -1)


def _attend_block(
    spec: VQSpec, i: Array, q: Array, d: Array, *, k: Array, v: Array, table: Array, documents: Array
) -> Float[Array, "Q X U"]:
    """Attention output of block i, which attends to all keys up to the end of its segment."""
    query_heads, block, size = *q.shape[:2], spec.window + spec.block
    by_distance = skew(spec, jax.vmap(dot)(d, table.swapaxes(1, 2))).reshape(query_heads, block, size)
    start, key_position = i * block, jnp.arange(len(k)) - spec.window
    scores = jnp.einsum("QXH,SH->QXS", q, k)
    # The distance bias applies to the W + X keys that end with the block; only these scores are updated.
    content = lax.dynamic_slice_in_dim(scores, start, size, axis=2)
    scores = lax.dynamic_update_slice_in_dim(scores, content + by_distance, start, axis=2)
    query_position = start + jnp.arange(block)[:, None]
    own = lax.dynamic_slice_in_dim(documents, start + spec.window, block)[:, None]
    visible = (key_position <= query_position) & (documents > 0) & ((documents == own) if spec.documents else True)
    if not spec.aggregate:
        visible &= key_position >= query_position - spec.window
    p = jax.nn.softmax(jnp.where(visible, scores, NEVER), axis=-1)
    return jnp.einsum("QXS,SU->QXU", p.astype(v.dtype), v, preferred_element_type=jnp.float32).astype(v.dtype)
