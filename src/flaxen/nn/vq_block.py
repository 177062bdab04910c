"""One block of queries of one head: what it sees of its window and of the codes, and the gradients of that.

Axes as in nn/vq_plan.py; R = G · W queries.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from flaxen.nn.hardware import materialise, transposed_copy, transposed_right
from flaxen.nn.matmul import dots
from flaxen.nn.vq_plan import NEVER, Law


class Window(NamedTuple):
    """What one block is computed from, but for counts and means."""

    queries: Float[Array, "R H"]
    distant: Float[Array, "R H"]
    keys: Float[Array, "S H"]
    values: Float[Array, "S U"]
    table: Float[Array, "G E H"]
    codebook: Float[Array, "M H"]
    hidden: Float[Array, "#W S"]  # NEVER for keys that a query does not see, beside those ahead of it or too far
    known: Bool[Array, "W"] | None  # which queries see the means, if not all do


def hidden_keys(law: Law, documents: Int[Array, "S"]) -> Float[Array, "#W S"]:
    """NEVER for keys of its window that a query of a block does not see: padding, or another document's."""
    seen = documents > 0
    if law.documents:
        seen = seen & (documents == documents[law.window :, None])
    return jnp.where(jnp.atleast_2d(seen), 0.0, NEVER)


def _scores(law: Law, w: Window, counts: Array) -> tuple[Float[Array, "R S"], Float[Array, "R M"] | None]:
    """Of the keys of the window and of the codes."""
    groups = len(w.table)
    by_distance = jax.vmap(dot)(w.distant.reshape(groups, law.block, -1), w.table.swapaxes(1, 2))
    near = dot(w.queries, w.keys.T) + skew(law, by_distance)
    near = (near.reshape(groups, law.block, -1) + w.hidden).reshape(near.shape)
    if not law.aggregate:
        return near, None
    # n keys of one score s weigh n · exp(s) = exp(s + log n).
    bias = jnp.where(counts > 0, jnp.log(jnp.maximum(counts, 1.0)), NEVER)
    if w.known is not None:
        bias = jnp.where(jnp.tile(w.known, groups)[:, None], bias, NEVER)
    return near, dot(w.queries, w.codebook.T) + bias


class Scale(NamedTuple):
    """What makes weights of scores: exp(score - top) / total."""

    top: Float[Array, "*K R"]
    total: Float[Array, "*K R"]


def block_forward(
    law: Law, w: Window, counts: Float[Array, "M"], means: Float[Array, "M U"]
) -> tuple[Float[Array, "R U"], Scale]:
    """What the queries of one block see."""
    near, far = _scores(law, w, counts)
    top = near.max(-1) if far is None else jnp.maximum(near.max(-1), far.max(-1))
    dtype = w.values.dtype
    near = jnp.exp(near - top[:, None])
    out, total = dot(near.astype(dtype), w.values), near.sum(-1)
    if far is not None:
        far = jnp.exp(far - top[:, None])
        out, total = out + dot(far.astype(dtype), means.astype(dtype)), total + far.sum(-1)
    return (out / total[:, None]).astype(dtype), Scale(top, total)


class Slopes(NamedTuple):
    """Gradients of a block."""

    queries: Float[Array, "R H"]
    distant: Float[Array, "R H"]
    keys: Float[Array, "S H"]
    values: Float[Array, "S U"]
    table: Float[Array, "G E H"]
    means: Float[Array, "M U"]


def block_backward(
    law: Law,
    w: Window,
    counts: Float[Array, "M"],
    means: Float[Array, "M U"],
    out: Float[Array, "R U"],
    scale: Scale,
    g: Float[Array, "R U"],
) -> Slopes:
    """Weights are recomputed: they take a fortieth of the matmuls, and would be a third of what is kept.

    With weights p = exp(score - top) / total and out = Σ p v, the gradient of a score is p (g · v - g · out): the same
    g · out for all keys and codes. Scores of keys give gradients to queries, distances and keys; those of codes to
    queries alone, since codebooks do not learn by gradients.
    """
    dtype = w.values.dtype
    g = (g / scale.total[:, None]).astype(dtype)  # instead of dividing every weight by its total
    slope = dots(g, out)[:, None]
    near, far = _scores(law, w, counts)
    near = jnp.exp(near - scale.top[:, None])
    ds = near * (dot(g, transposed_right(w.values)) - slope)
    dvalues = dot(transposed_copy(near.astype(dtype)), g)
    # Queries are narrower than ds, so theirs is the cheaper transpose.
    dqueries, dkeys = dot(ds, w.keys), transposed_copy(dot(transposed_copy(w.queries), ds))
    dx = unskew(law, ds)
    ddistant = jax.vmap(dot)(dx, w.table).reshape(w.distant.shape)
    dtable = jax.vmap(lambda x, d: dot(transposed_copy(x), d))(dx, w.distant.reshape(len(dx), law.block, -1))
    dmeans = jnp.zeros_like(means)
    if far is not None:
        far = jnp.exp(far - scale.top[:, None])
        ds = far * (dot(g, transposed_right(means.astype(dtype))) - slope)
        dqueries = dqueries + dot(ds, w.codebook)
        if law.through:
            dmeans = dot(transposed_copy(far.astype(dtype)), g)
    return Slopes(dqueries, ddistant, dkeys, dvalues, dtable, dmeans)


def dot(a: Array, b: Array) -> Array:
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def skew(law: Law, x: Float[Array, "G W E"]) -> Float[Array, "R S"]:
    """Scores by distance, C first and 0 last, as scores by key: query i of a block finds its row moved i to the right,
    NEVER where a key is ahead, and where it is farther than C: 0, or NEVER if such keys are not seen at all."""
    size, w = law.window + law.block, law.block
    # A row one longer than a row of the result: reading on, each query begins one later. What stands behind row i is
    # ahead of query i, and then, in the next row of the result, too far from query i + 1.
    ahead = jnp.arange(w) < w - 1 - jnp.arange(w)[:, None]
    behind = jnp.where(ahead, NEVER, 0.0 if law.aggregate else NEVER)
    x = jnp.concatenate([x, jnp.broadcast_to(behind, (len(x), w, w))], axis=2)
    flat = materialise(x).reshape(len(x), -1)
    return flat[:, : w * size].reshape(-1, size)


def unskew(law: Law, y: Float[Array, "R S"]) -> Float[Array, "G W E"]:
    """Back again: what skew takes a value from."""
    size = law.window + law.block
    flat = jnp.pad(y.reshape(-1, law.block * size), ((0, 0), (0, law.block)))
    return materialise(flat).reshape(-1, law.block, size + 1)[:, :, : law.window + 1]
