"""Chunked cross-entropy equals plain cross-entropy: value, gradients, accuracy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxen.nn.loss import cross_entropy


def plain(hidden, head, labels, weights, label_smoothing, z_loss):
    logits = hidden @ head.T
    logp = jax.nn.log_softmax(logits)
    nll = -jnp.take_along_axis(logp, labels[:, None], axis=1)[:, 0]
    loss = (
        (1 - label_smoothing) * nll
        - label_smoothing * logp.mean(axis=1)
        + z_loss * jax.nn.logsumexp(logits, axis=1) ** 2
    )
    return jnp.sum(weights * loss)


@pytest.mark.parametrize("chunk", [1, 7, 16, None])
@pytest.mark.parametrize(("label_smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.0), (0.1, 1e-2)])
def test_chunked_equals_plain_cross_entropy(chunk: int | None, label_smoothing: float, z_loss: float) -> None:
    draw = np.random.default_rng(0)
    hidden, head = (jnp.asarray(draw.standard_normal(shape), jnp.float32) for shape in ((33, 8), (50, 8)))
    labels = jnp.asarray(draw.integers(0, 50, 33), jnp.int32)
    weights = jnp.asarray(draw.random(33) * (draw.random(33) > 0.3), jnp.float32)

    def ours(hidden: Any, head: Any) -> Any:
        return 3.0 * cross_entropy(hidden, head, labels, weights, label_smoothing, z_loss, chunk).loss

    def reference(hidden: Any, head: Any) -> Any:
        return 3.0 * plain(hidden, head, labels, weights, label_smoothing, z_loss)

    value, grads = jax.value_and_grad(ours, argnums=(0, 1))(hidden, head)
    expected, expected_grads = jax.value_and_grad(reference, argnums=(0, 1))(hidden, head)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(ours(hidden, head), expected, rtol=1e-5)  # without gradients: another code path
    for grad, plain_grad in zip(grads, expected_grads):
        np.testing.assert_allclose(grad, plain_grad, rtol=0, atol=1e-5 * float(jnp.abs(plain_grad).max()))


def test_accuracy_and_weight_are_exact_sums() -> None:
    head = jnp.eye(5)
    hidden = 4 * jnp.eye(5)[jnp.asarray([0, 1, 2, 3])]
    sums = cross_entropy(hidden, head, jnp.asarray([0, 1, 0, 3]), jnp.asarray([1.0, 0.5, 1.0, 0.0]), chunk=3)
    assert float(sums.correct) == 1.5
    assert float(sums.weight) == 2.5
