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
from flaxen.nn.vq_plan import NEVER, VQSpec


class BlockInputs(NamedTuple):
    """What one block is computed from, but for counts and means."""

    queries: Float[Array, "QX H"]
    distant: Float[Array, "QX H"]
    keys: Float[Array, "S H"]
    values: Float[Array, "S U"]
    table: Float[Array, "Q E H"]
    codebook: Float[Array, "M H"]
    hidden: Float[Array, "#X S"]  # NEVER for keys that a query does not see, beside those ahead of it or too far
    known: Bool[Array, "X"] | None  # which queries see the means, if not all do


def hidden_keys(spec: VQSpec, documents: Int[Array, "S"]) -> Float[Array, "#X S"]:
    """NEVER for keys of its window that a query of a block does not see: padding, or another document's."""
    seen = documents > 0
    if spec.documents:
        seen = seen & (documents == documents[spec.window :, None])
    return jnp.where(jnp.atleast_2d(seen), 0.0, NEVER)


def _scores(spec: VQSpec, w: BlockInputs, counts: Array) -> tuple[Float[Array, "QX S"], Float[Array, "QX M"] | None]:
    """Of the keys of the window and of the codes."""
    groups = len(w.table)
    by_distance = jax.vmap(dot)(w.distant.reshape(groups, spec.block, -1), w.table.swapaxes(1, 2))
    near = dot(w.queries, w.keys.T) + skew(spec, by_distance)
    near = (near.reshape(groups, spec.block, -1) + w.hidden).reshape(near.shape)
    if not spec.aggregate:
        return near, None
    # n keys of one score s weigh n · exp(s) = exp(s + log n).
    bias = jnp.where(counts > 0, jnp.log(jnp.maximum(counts, 1.0)), NEVER)
    if w.known is not None:
        bias = jnp.where(jnp.tile(w.known, groups)[:, None], bias, NEVER)
    return near, dot(w.queries, w.codebook.T) + bias


class SoftmaxScale(NamedTuple):
    """What makes weights of scores: exp(score - top) / total."""

    top: Float[Array, "*J QX"]
    total: Float[Array, "*J QX"]


def block_forward(
    spec: VQSpec, w: BlockInputs, counts: Float[Array, "M"], means: Float[Array, "M U"]
) -> tuple[Float[Array, "QX U"], SoftmaxScale]:
    """What the queries of one block see."""
    near, far = _scores(spec, w, counts)
    top = near.max(-1) if far is None else jnp.maximum(near.max(-1), far.max(-1))
    dtype = w.values.dtype
    near = jnp.exp(near - top[:, None])
    out, total = dot(near.astype(dtype), w.values), near.sum(-1)
    if far is not None:
        far = jnp.exp(far - top[:, None])
        out, total = out + dot(far.astype(dtype), means.astype(dtype)), total + far.sum(-1)
    return (out / total[:, None]).astype(dtype), SoftmaxScale(top, total)


class BlockGradients(NamedTuple):
    """Gradients of a block."""

    queries: Float[Array, "QX H"]
    distant: Float[Array, "QX H"]
    keys: Float[Array, "S H"]
    values: Float[Array, "S U"]
    table: Float[Array, "Q E H"]
    means: Float[Array, "M U"]


def block_backward(
    spec: VQSpec,
    w: BlockInputs,
    counts: Float[Array, "M"],
    means: Float[Array, "M U"],
    out: Float[Array, "QX U"],
    scale: SoftmaxScale,
    g: Float[Array, "QX U"],
) -> BlockGradients:
    """Weights are recomputed: they take a fortieth of the matmuls, and would be a third of what is kept.

    With weights p = exp(score - top) / total and out = Σ p v, the gradient of a score is p (g · v - g · out): the same
    g · out for all keys and codes. Scores of keys give gradients to queries, distances and keys; those of codes to
    queries alone, since codebooks do not learn by gradients.
    """
    dtype = w.values.dtype
    g = (g / scale.total[:, None]).astype(dtype)  # instead of dividing every weight by its total
    slope = dots(g, out)[:, None]
    near, far = _scores(spec, w, counts)
    near = jnp.exp(near - scale.top[:, None])
    ds = near * (dot(g, transposed_right(w.values)) - slope)
    dvalues = dot(transposed_copy(near.astype(dtype)), g)
    # Queries are narrower than ds, so theirs is the cheaper transpose.
    dqueries, dkeys = dot(ds, w.keys), transposed_copy(dot(transposed_copy(w.queries), ds))
    dx = unskew(spec, ds)
    ddistant = jax.vmap(dot)(dx, w.table).reshape(w.distant.shape)
    dtable = jax.vmap(lambda x, d: dot(transposed_copy(x), d))(dx, w.distant.reshape(len(dx), spec.block, -1))
    dmeans = jnp.zeros_like(means)
    if far is not None:
        far = jnp.exp(far - scale.top[:, None])
        ds = far * (dot(g, transposed_right(means.astype(dtype))) - slope)
        dqueries = dqueries + dot(ds, w.codebook)
        if spec.through:
            dmeans = dot(transposed_copy(far.astype(dtype)), g)
    return BlockGradients(dqueries, ddistant, dkeys, dvalues, dtable, dmeans)


def dot(a: Array, b: Array) -> Array:
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def skew(spec: VQSpec, x: Float[Array, "Q X E"]) -> Float[Array, "QX S"]:
    """Scores by distance, C first and 0 last, as scores by key: query i of a block finds its row moved i to the right,
    NEVER where a key is ahead, and where it is farther than C: 0, or NEVER if such keys are not seen at all."""
    size, w = spec.window + spec.block, spec.block
    # A row one longer than a row of the result: reading on, each query begins one later. What stands behind row i is
    # ahead of query i, and then, in the next row of the result, too far from query i + 1.
    ahead = jnp.arange(w) < w - 1 - jnp.arange(w)[:, None]
    behind = jnp.where(ahead, NEVER, 0.0 if spec.aggregate else NEVER)
    x = jnp.concatenate([x, jnp.broadcast_to(behind, (len(x), w, w))], axis=2)
    flat = materialise(x).reshape(len(x), -1)
    return flat[:, : w * size].reshape(-1, size)


def unskew(spec: VQSpec, y: Float[Array, "QX S"]) -> Float[Array, "Q X E"]:
    """Back again: what skew takes a value from."""
    size = spec.window + spec.block
    flat = jnp.pad(y.reshape(-1, spec.block * size), ((0, 0), (0, spec.block)))
    return materialise(flat).reshape(-1, spec.block, size + 1)[:, :, : spec.window + 1]
