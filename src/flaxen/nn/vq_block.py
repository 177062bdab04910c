"""Attention of one block of queries of one key head, forward and backward.

Queries attend to S = W + X keys individually (the window before the block, then the block itself), and to M codes that
stand for all older keys. A row of scores belongs to one of the Q · X queries: Q query heads share the keys.
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
    """Inputs of one block, except counts and means."""

    queries: Float[Array, "QX H"]
    distant: Float[Array, "QX H"]
    keys: Float[Array, "S H"]
    values: Float[Array, "S U"]
    table: Float[Array, "Q E H"]
    codebook: Float[Array, "M H"]
    hidden: Float[Array, "#X S"]  # added to scores: NEVER for padding and other documents, 0 elsewhere
    known: Bool[Array, "X"] | None  # which queries may read the means; None: all of them


def hidden_keys(spec: VQSpec, documents: Int[Array, "S"]) -> Float[Array, "#X S"]:
    """Mask to add to the scores of a block: NEVER for keys that are padding or belong to another document, 0 elsewhere.

    Masking by position (future keys, keys beyond the window) is done by `skew`.
    """
    visible = documents > 0
    if spec.documents:
        visible = visible & (documents == documents[spec.window :, None])
    return jnp.where(jnp.atleast_2d(visible), 0.0, NEVER)


def _scores(
    spec: VQSpec, inputs: BlockInputs, counts: Array
) -> tuple[Float[Array, "QX S"], Float[Array, "QX M"] | None]:
    """Scores of the individual keys and, with `aggregate`, of the codes.

    The score of a key is query · key, plus query · distance embedding if the key is in the window.
    """
    query_heads = len(inputs.table)
    by_distance = jax.vmap(dot)(inputs.distant.reshape(query_heads, spec.block, -1), inputs.table.swapaxes(1, 2))
    near = dot(inputs.queries, inputs.keys.T) + skew(spec, by_distance)
    near = (near.reshape(query_heads, spec.block, -1) + inputs.hidden).reshape(near.shape)
    if not spec.aggregate:
        return near, None
    # Log-count bias: n quantised keys with the same code have the same score s, and their total weight in the softmax
    # is n · exp(s) = exp(s + log n). It multiplies the mean of their values.
    # The maximum keeps log away from 0 in the branch that is not used.
    bias = jnp.where(counts > 0, jnp.log(jnp.maximum(counts, 1.0)), NEVER)
    if inputs.known is not None:
        bias = jnp.where(jnp.tile(inputs.known, query_heads)[:, None], bias, NEVER)
    return near, dot(inputs.queries, inputs.codebook.T) + bias


class SoftmaxScale(NamedTuple):
    """The numbers that turn scores into softmax weights: weight = exp(score - top) / total."""

    top: Float[Array, "*J QX"]
    total: Float[Array, "*J QX"]


def block_forward(
    spec: VQSpec, inputs: BlockInputs, counts: Float[Array, "M"], means: Float[Array, "M U"]
) -> tuple[Float[Array, "QX U"], SoftmaxScale]:
    """Attention output of one block, and the softmax scale that its backward pass needs.

    One softmax runs over individual keys and codes together, in two parts that share maximum and total.
    """
    near, far = _scores(spec, inputs, counts)
    top = near.max(-1) if far is None else jnp.maximum(near.max(-1), far.max(-1))
    dtype = inputs.values.dtype
    near = jnp.exp(near - top[:, None])
    out, total = dot(near.astype(dtype), inputs.values), near.sum(-1)
    if far is not None:
        far = jnp.exp(far - top[:, None])
        out, total = out + dot(far.astype(dtype), means.astype(dtype)), total + far.sum(-1)
    return (out / total[:, None]).astype(dtype), SoftmaxScale(top, total)


class BlockGradients(NamedTuple):
    """Gradients of a loss with respect to the inputs of a block."""

    queries: Float[Array, "QX H"]
    distant: Float[Array, "QX H"]
    keys: Float[Array, "S H"]
    values: Float[Array, "S U"]
    table: Float[Array, "Q E H"]
    means: Float[Array, "M U"]


def block_backward(
    spec: VQSpec,
    inputs: BlockInputs,
    counts: Float[Array, "M"],
    means: Float[Array, "M U"],
    out: Float[Array, "QX U"],
    scale: SoftmaxScale,
    dout: Float[Array, "QX U"],
) -> BlockGradients:
    """Gradients of a block, given the gradient of its output.

    Softmax weights are recomputed from the saved scale. In vq-mini that takes a fortieth of the matmul FLOPs of a
    training step, while saving the weights would take almost a third of the memory kept for the backward pass.

    With weights p = exp(score - top) / total and out = Σ p v, the gradient of a score is p (dout · v - dout · out).
    The term dout · out is the same for all keys and codes. Scores of keys pass gradients to queries, distances and
    keys; scores of codes only to queries, since codebooks are not trained by gradients.
    """
    dtype = inputs.values.dtype
    dout = (dout / scale.total[:, None]).astype(dtype)  # instead of dividing every weight by its total
    dout_out = dots(dout, out)[:, None]
    near, far = _scores(spec, inputs, counts)
    near = jnp.exp(near - scale.top[:, None])
    dscores = near * (dot(dout, transposed_right(inputs.values)) - dout_out)
    dvalues = dot(transposed_copy(near.astype(dtype)), dout)
    # dkeys = dscoresᵀ · queries, computed as (queriesᵀ · dscores)ᵀ: queries are narrower than dscores, so transposing
    # them is cheaper.
    dqueries, dkeys = dot(dscores, inputs.keys), transposed_copy(dot(transposed_copy(inputs.queries), dscores))
    dby_distance = unskew(spec, dscores)
    ddistant = jax.vmap(dot)(dby_distance, inputs.table).reshape(inputs.distant.shape)
    dtable = jax.vmap(lambda x, d: dot(transposed_copy(x), d))(
        dby_distance, inputs.distant.reshape(len(dby_distance), spec.block, -1)
    )
    dmeans = jnp.zeros_like(means)
    if far is not None:
        far = jnp.exp(far - scale.top[:, None])
        dscores = far * (dot(dout, transposed_right(means.astype(dtype))) - dout_out)
        dqueries = dqueries + dot(dscores, inputs.codebook)
        if spec.through:
            dmeans = dot(transposed_copy(far.astype(dtype)), dout)
    return BlockGradients(dqueries, ddistant, dkeys, dvalues, dtable, dmeans)


def dot(a: Array, b: Array) -> Array:
    """Matrix product with f32 accumulation and result, whatever the dtype of the operands."""
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def skew(spec: VQSpec, x: Float[Array, "Q X E"]) -> Float[Array, "QX S"]:
    """Convert scores by distance (W first, 0 last) to scores by key: the relative-shift trick, by reshapes alone.

    Key j is at distance W + i - j from query i of the block, so the row of query i moves i places to the right.
    Future keys get NEVER. Keys farther than W have no distance bias. They get 0 rather than NEVER, because they are not
    in the means yet; they get NEVER only if keys beyond the window are not attended to at all.
    """
    size, block = spec.window + spec.block, spec.block
    # Pad each row from E = W + 1 to S + 1 columns, one more than a row of the result. Read as rows of S, every row then
    # starts one place later than the row before. The X columns appended to row i land, in this order, on the future
    # keys of query i, and at the start of the next row, on the keys that are too far from query i + 1.
    future = jnp.arange(block) < block - 1 - jnp.arange(block)[:, None]
    appended = jnp.where(future, NEVER, 0.0 if spec.aggregate else NEVER)
    x = jnp.concatenate([x, jnp.broadcast_to(appended, (len(x), block, block))], axis=2)
    flat = materialise(x).reshape(len(x), -1)
    return flat[:, : block * size].reshape(-1, size)


def unskew(spec: VQSpec, y: Float[Array, "QX S"]) -> Float[Array, "Q X E"]:
    """Convert gradients by key to gradients by distance: the transpose of `skew`, by the same reshapes in reverse."""
    size = spec.window + spec.block
    flat = jnp.pad(y.reshape(-1, spec.block * size), ((0, 0), (0, spec.block)))
    return materialise(flat).reshape(-1, spec.block, size + 1)[:, :, : spec.window + 1]
