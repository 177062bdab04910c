"""Cross-entropy that never holds all logits: rows in chunks, gradients made while the logits are at hand."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from flaxen.nn.hardware import materialise, transposed_right

# Elements of logits alive at a time. 2^23 keeps a 32k vocabulary to 260 rows (32 MB) without slowing its products;
# below 128 rows the head's gradient would be read and written too often.
CHUNK_ELEMENTS, CHUNK_ROWS = 2**23, 128


class Sums(NamedTuple):
    """Weighted sums over tokens; they add across chunks, batches and hosts."""

    loss: Float[Array, ""]
    correct: Float[Array, ""]
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
    """Sum over rows of weight · -log softmax(hidden · headᵀ + bias)[label], with label smoothing and z_loss · lse²."""
    rows, vocab = hidden.shape[0], head.shape[0]
    chunk = min(rows, chunk or max(CHUNK_ROWS, CHUNK_ELEMENTS // vocab))
    n = -(-rows // chunk)
    chunk = -(-rows // n)  # equal chunks
    pad = n * chunk - rows
    hidden = jnp.pad(hidden, ((0, pad), (0, 0))).reshape(n, chunk, -1)
    labels = jnp.pad(labels, (0, pad)).reshape(n, chunk)
    padded = jnp.pad(weights.astype(jnp.float32), (0, pad)).reshape(n, chunk)
    loss, correct = _sums(hidden, head.astype(hidden.dtype), bias, labels, padded, (label_smoothing, z_loss))
    return Sums(loss, correct, weights.astype(jnp.float32).sum())


def _chunk(
    hidden: Array, head_t: Array, bias: Array | None, labels: Array, weights: Array, coefficients: tuple[float, float]
) -> tuple[Array, Array, Array, Array]:
    """The sums of one chunk, and what its gradient needs: the logits and their log-sum-exp."""
    label_smoothing, z_loss = coefficients
    logits = jnp.dot(hidden, head_t, preferred_element_type=jnp.float32)
    logits = logits if bias is None else logits + bias
    lse = jax.nn.logsumexp(logits, axis=-1)
    gold = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    target = gold if label_smoothing == 0.0 else (1.0 - label_smoothing) * gold + label_smoothing * logits.mean(axis=-1)
    loss = jnp.sum(weights * (lse - target + z_loss * jnp.square(lse)))
    # A label that ties with another logit for the maximum counts as correct: no argmax, one pass less.
    correct = jnp.sum(weights * (gold >= logits.max(axis=-1)))
    return loss, correct, logits, lse


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _sums(
    hidden: Array, head: Array, bias: Array | None, labels: Array, weights: Array, coefficients: tuple[float, float]
) -> tuple[Array, Array]:
    head_t = transposed_right(head)

    def body(carry: tuple[Array, Array], xs: tuple[Array, Array, Array]) -> tuple[tuple[Array, Array], None]:
        loss, correct, _, _ = _chunk(xs[0], head_t, bias, *xs[1:], coefficients)
        return (carry[0] + loss, carry[1] + correct), None

    sums, _ = lax.scan(body, (jnp.zeros(()), jnp.zeros(())), (hidden, labels, weights))
    return sums


def _forward(
    hidden: Array, head: Array, bias: Array | None, labels: Array, weights: Array, coefficients: tuple[float, float]
) -> tuple[tuple[Array, Array], tuple[Array, Array, Array | None]]:
    label_smoothing, z_loss = coefficients
    vocab, head_t = len(head), transposed_right(head)

    def body(carry: tuple, xs: tuple[Array, Array, Array]) -> tuple[tuple, Array]:
        total, right, dhead, dbias = carry
        rows, labels, weights = xs
        loss, correct, logits, lse = _chunk(rows, head_t, bias, labels, weights, coefficients)
        slope = weights * (1.0 + 2.0 * z_loss * lse)
        dlogits = slope[:, None] * jnp.exp(logits - lse[:, None])
        hit = jnp.arange(vocab) == labels[:, None]
        dlogits = dlogits - weights[:, None] * jnp.where(
            hit, 1.0 - label_smoothing + label_smoothing / vocab, label_smoothing / vocab
        )
        dbias = None if bias is None else dbias + dlogits.sum(axis=0)
        dlogits = dlogits.astype(rows.dtype)
        drows = jnp.einsum("TV,VD->TD", dlogits, head, preferred_element_type=jnp.float32)
        # Kept as [D, V]: rowsᵀ is a small copy, dlogitsᵀ would be a large one (see nn/matmul.py).
        rows_t = materialise(rows.T)
        dhead = dhead + jnp.einsum("DT,TV->DV", rows_t, dlogits, preferred_element_type=jnp.float32)
        return (total + loss, right + correct, dhead, dbias), drows.astype(rows.dtype)

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
    dhidden, dhead, dbias = residuals
    scaled = (g[0].astype(dhidden.dtype) * dhidden, g[0].astype(dhead.dtype) * dhead)
    return *scaled, None if dbias is None else g[0] * dbias, None, None


_sums.defvjp(_forward, _backward)
