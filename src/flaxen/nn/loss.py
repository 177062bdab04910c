"""Chunked cross-entropy with label smoothing: logits exist for one chunk of rows at a time, never all at once.

Under differentiation the forward pass also computes the gradients, while the logits of a chunk are in memory, so the
backward pass does not have to recompute them.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from flaxen.nn.hardware import materialise, transposed_right

# Logits in memory at a time: 2^23 are 260 rows of a 32k vocabulary (32 MB in f32), enough for fast matmuls. A chunk has
# at least 128 rows: with fewer, reading and writing the head's gradient in every chunk would take too long.
CHUNK_ELEMENTS, CHUNK_ROWS = 2**23, 128


class Sums(NamedTuple):
    """Weighted sums over tokens, which can be added up over chunks, batches and hosts."""

    loss: Float[Array, ""]
    correct: Float[Array, ""]  # total weight of the tokens whose label has the highest logit
    weight: Float[Array, ""]


def cross_entropy(
    hidden: Float[Array, "T D"],
    head: Float[Array, "V D"],
    labels: Int[Array, "T"],
    weights: Float[Array, "T"],
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk: int | None = None,
    bias: Float[Array, "V"] | None = None,
) -> Sums:
    """Sum over rows of weight · -log softmax(hidden · headᵀ + bias)[label], with label smoothing and z-loss.

    Label smoothing spreads a fraction `label_smoothing` of the target probability evenly over the vocabulary. The
    z-loss adds z_loss · lse², where lse is the log-sum-exp of the logits; it keeps logits from growing.
    """
    rows, vocab = hidden.shape[0], head.shape[0]
    chunk = min(rows, chunk or max(CHUNK_ROWS, CHUNK_ELEMENTS // vocab))
    n = -(-rows // chunk)
    chunk = -(-rows // n)  # equal chunks; rows added as padding have weight 0
    pad = n * chunk - rows
    hidden = jnp.pad(hidden, ((0, pad), (0, 0))).reshape(n, chunk, -1)
    labels = jnp.pad(labels, (0, pad)).reshape(n, chunk)
    padded = jnp.pad(weights.astype(jnp.float32), (0, pad)).reshape(n, chunk)
    loss, correct = _sums(hidden, head.astype(hidden.dtype), bias, labels, padded, (label_smoothing, z_loss))
    return Sums(loss, correct, weights.astype(jnp.float32).sum())


def _chunk(
    hidden: Array, head_t: Array, bias: Array | None, labels: Array, weights: Array, coefficients: tuple[float, float]
) -> tuple[Array, Array, Array, Array]:
    """Loss and correct predictions of one chunk, and the logits and their log-sum-exp, which its gradient needs."""
    label_smoothing, z_loss = coefficients
    logits = jnp.dot(hidden, head_t, preferred_element_type=jnp.float32)
    logits = logits if bias is None else logits + bias
    lse = jax.nn.logsumexp(logits, axis=-1)
    # The loss is lse minus the expected logit under the target distribution: the label's logit or, with label
    # smoothing, a weighted mean of it and the mean logit.
    gold = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    target = gold if label_smoothing == 0.0 else (1.0 - label_smoothing) * gold + label_smoothing * logits.mean(axis=-1)
    loss = jnp.sum(weights * (lse - target + z_loss * jnp.square(lse)))
    # A label that ties with another logit for the maximum counts as correct. This needs no argmax, which saves a pass.
    correct = jnp.sum(weights * (gold >= logits.max(axis=-1)))
    return loss, correct, logits, lse


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _sums(
    hidden: Array, head: Array, bias: Array | None, labels: Array, weights: Array, coefficients: tuple[float, float]
) -> tuple[Array, Array]:
    """Loss and correct predictions without gradients; `_forward` replaces it under differentiation."""
    head_t = transposed_right(head)

    def body(carry: tuple[Array, Array], xs: tuple[Array, Array, Array]) -> tuple[tuple[Array, Array], None]:
        loss, correct, _, _ = _chunk(xs[0], head_t, bias, *xs[1:], coefficients)
        return (carry[0] + loss, carry[1] + correct), None

    sums, _ = lax.scan(body, (jnp.zeros(()), jnp.zeros(())), (hidden, labels, weights))
    return sums


def _forward(
    hidden: Array, head: Array, bias: Array | None, labels: Array, weights: Array, coefficients: tuple[float, float]
) -> tuple[tuple[Array, Array], tuple[Array, Array, Array | None]]:
    """The sums, and as residuals the complete gradients, computed chunk by chunk while the logits are in memory."""
    label_smoothing, z_loss = coefficients
    vocab, head_t = len(head), transposed_right(head)

    def body(carry: tuple, xs: tuple[Array, Array, Array]) -> tuple[tuple, Array]:
        loss_sum, correct_sum, dhead, dbias = carry
        rows, labels, weights = xs
        loss, correct, logits, lse = _chunk(rows, head_t, bias, labels, weights, coefficients)
        # dlogits = weight · ((1 + 2 · z_loss · lse) · softmax(logits) - target distribution)
        slope = weights * (1.0 + 2.0 * z_loss * lse)
        dlogits = slope[:, None] * jnp.exp(logits - lse[:, None])
        is_label = jnp.arange(vocab) == labels[:, None]
        dlogits = dlogits - weights[:, None] * jnp.where(
            is_label, 1.0 - label_smoothing + label_smoothing / vocab, label_smoothing / vocab
        )
        dbias = None if bias is None else dbias + dlogits.sum(axis=0)
        dlogits = dlogits.astype(rows.dtype)
        drows = jnp.einsum("TV,VD->TD", dlogits, head, preferred_element_type=jnp.float32)
        # Accumulated as [D, V]: rowsᵀ is a small copy, dlogitsᵀ would be a large one (see nn/matmul.py).
        rows_t = materialise(rows.T)
        dhead = dhead + jnp.einsum("DT,TV->DV", rows_t, dlogits, preferred_element_type=jnp.float32)
        return (loss_sum + loss, correct_sum + correct, dhead, dbias), drows.astype(rows.dtype)

    start = (
        jnp.zeros(()),
        jnp.zeros(()),
        jnp.zeros((head.shape[1], vocab)),
        None if bias is None else jnp.zeros(vocab),
    )
    (loss, correct, dhead, dbias), dhidden = lax.scan(body, start, (hidden, labels, weights))
    return (loss, correct), (dhidden, dhead.T.astype(head.dtype), dbias)


def _backward(
    coefficients: tuple[float, float], residuals: tuple[Array, Array, Array | None], g: tuple[Array, Array]
) -> tuple[Array, Array, Array | None, None, None]:
    """Scale the gradients of `_forward` by the incoming gradient. The count of correct predictions has no gradient."""
    dhidden, dhead, dbias = residuals
    scaled = (g[0].astype(dhidden.dtype) * dhidden, g[0].astype(dhead.dtype) * dhead)
    return *scaled, None if dbias is None else g[0] * dbias, None, None


_sums.defvjp(_forward, _backward)
