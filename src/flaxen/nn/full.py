"""The quadratic twin of nn/vq.py: the same attention, with keys as they are and all of them one by one.

Axes as in nn/vq_plan.py.
"""

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

SEGMENTS = 8  # parts of a sequence, each of which sees all keys up to its end: a sixteenth of the work is for nothing


@dataclass(frozen=True)
class FullPass:
    """The plan of a pass over T tokens with nothing before them. Scores are held for one block of queries at a time."""

    spec: VQSpec
    documents: Int[Array, "B T"]  # from 1 on, 0 for padding
    room: int | None = None  # keep all keys and values, with slots for so many tokens more: for decoding
    weights: None = None  # there are no codebooks

    def attend(self, heads: HeadInputs, cache: None) -> tuple[Float[Array, "B N Q T U"], Ring | None]:
        b, n, g, t, _ = heads.queries.shape
        tables = jnp.broadcast_to(heads.table, (b, *heads.table.shape))
        documents = jnp.broadcast_to(self.documents[:, None], (b, n, t))
        every = (heads.queries, heads.distant, heads.keys, heads.values, tables, documents)
        rows = tuple(a.reshape(b * n, *a.shape[2:]) for a in every)
        out = each_row(partial(_row, self.spec, t // self.spec.block), rows).reshape(b, n, g, t, -1)
        if self.room is None:
            return out, None
        slots = ((0, 0), (0, 0), (0, self.room), (0, 0))
        return out, Ring(jnp.pad(heads.keys, slots), jnp.zeros((b, n, 0)), jnp.pad(heads.values, slots))


def _row(spec: VQSpec, blocks: int, q: Array, d: Array, k: Array, v: Array, table: Array, documents: Array) -> Array:
    g, w = q.shape[0], spec.block
    q, d = (a.reshape(g, blocks, w, -1).swapaxes(0, 1) for a in (q, d))
    k, v, documents = (jnp.pad(a, ((spec.window, 0), *[(0, 0)] * (a.ndim - 1))) for a in (k, v, documents))
    parts, size = [], -(-blocks // SEGMENTS)
    for first in range(0, blocks, size):
        last = min(first + size, blocks)
        stop = spec.window + last * w
        body = jax.checkpoint(partial(_block, spec, k=k[:stop], v=v[:stop], table=table, documents=documents[:stop]))
        parts.append(lax.map(lambda xs, body=body: body(*xs), (jnp.arange(first, last), q[first:last], d[first:last])))
    return jnp.concatenate(parts).swapaxes(0, 1).reshape(g, blocks * w, -1)


def _block(
    spec: VQSpec, i: Array, q: Array, d: Array, *, k: Array, v: Array, table: Array, documents: Array
) -> Float[Array, "Q X U"]:
    g, w, size = *q.shape[:2], spec.window + spec.block
    near = skew(spec, jax.vmap(dot)(d, table.swapaxes(1, 2))).reshape(g, w, size)
    at, ahead = i * w, jnp.arange(len(k)) - spec.window  # of each key
    scores = jnp.einsum("QXH,SH->QXS", q, k)
    old = lax.dynamic_slice_in_dim(scores, at, size, axis=2)
    scores = lax.dynamic_update_slice_in_dim(scores, old + near, at, axis=2)
    mine = at + jnp.arange(w)[:, None]
    own = lax.dynamic_slice_in_dim(documents, at + spec.window, w)[:, None]
    visible = (ahead <= mine) & (documents > 0) & ((documents == own) if spec.documents else True)
    if not spec.aggregate:
        visible &= ahead >= mine - spec.window
    p = jax.nn.softmax(jnp.where(visible, scores, NEVER), axis=-1)
    return jnp.einsum("QXS,SU->QXU", p.astype(v.dtype), v, preferred_element_type=jnp.float32).astype(v.dtype)
