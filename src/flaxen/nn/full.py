"""The quadratic twin of nn/vq.py: the same attention, with keys as they are and all of them one by one."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from flaxen.nn.hardware import each_row
from flaxen.nn.vq_block import NEVER, Law, dot, skew

SEGMENTS = 8  # parts of a sequence, each of which sees all keys up to its end: a sixteenth of the work is for nothing


def attend(
    queries: Float[Array, "B N G T H"],
    distant: Float[Array, "B N G T H"],
    keys: Float[Array, "B N T H"],
    values: Float[Array, "B N T V"],
    table: Float[Array, "N G E H"],
    documents: Int[Array, "B T"],
    law: Law,
) -> Float[Array, "B N G T V"]:
    """What each query sees of all keys before it. Scores are held for one block of queries at a time."""
    b, n, g, t, _ = queries.shape
    blocks = t // law.block
    tables = jnp.broadcast_to(table, (b, *table.shape)).reshape(b * n, g, *table.shape[2:])
    numbers = jnp.broadcast_to(documents[:, None], (b, n, t)).reshape(b * n, t)
    rows = [a.reshape(b * n, *a.shape[2:]) for a in (queries, distant, keys, values)]
    one = partial(_row, law, blocks)
    every = (*rows, tables, numbers)
    out = each_row(one, every)
    return out.reshape(b, n, g, t, -1)


def _row(law: Law, blocks: int, q: Array, d: Array, k: Array, v: Array, table: Array, documents: Array) -> Array:
    g, w = q.shape[0], law.block
    q, d = (a.reshape(g, blocks, w, -1).swapaxes(0, 1) for a in (q, d))
    k, v, documents = (jnp.pad(a, ((law.window, 0), *[(0, 0)] * (a.ndim - 1))) for a in (k, v, documents))
    parts, size = [], -(-blocks // SEGMENTS)
    for first in range(0, blocks, size):
        last = min(first + size, blocks)
        stop = law.window + last * w
        body = jax.checkpoint(partial(_block, law, k=k[:stop], v=v[:stop], table=table, documents=documents[:stop]))
        parts.append(lax.map(lambda xs, body=body: body(*xs), (jnp.arange(first, last), q[first:last], d[first:last])))
    return jnp.concatenate(parts).swapaxes(0, 1).reshape(g, blocks * w, -1)


def _block(
    law: Law, i: Array, q: Array, d: Array, *, k: Array, v: Array, table: Array, documents: Array
) -> Float[Array, "G W V"]:
    g, w, size = *q.shape[:2], law.window + law.block
    near = skew(law, jax.vmap(dot)(d, table.swapaxes(1, 2))).reshape(g, w, size)
    at, ahead = i * w, jnp.arange(len(k)) - law.window  # of each key
    scores = jnp.einsum("GWH,SH->GWS", q, k)
    old = lax.dynamic_slice_in_dim(scores, at, size, axis=2)
    scores = lax.dynamic_update_slice_in_dim(scores, old + near, at, axis=2)
    mine = at + jnp.arange(w)[:, None]
    own = lax.dynamic_slice_in_dim(documents, at + law.window, w)[:, None]
    visible = (ahead <= mine) & (documents > 0) & ((documents == own) if law.documents else True)
    if not law.aggregate:
        visible &= ahead >= mine - law.window
    p = jax.nn.softmax(jnp.where(visible, scores, NEVER), axis=-1)
    return jnp.einsum("GWS,SV->GWV", p.astype(v.dtype), v, preferred_element_type=jnp.float32).astype(v.dtype)
