"""Gradient accumulation gives the loss and gradient of the whole batch."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import random_batch

from flaxen.models.t5 import T5, Config
from flaxen.nn.param import initialise
from flaxen.train.accumulate import value_and_grad
from flaxen.tree import leaves

TINY = Config(vocab_size=50, d_model=16, d_head=4, d_ff=24, n_layers=2, n_decoder_layers=1, n_heads=4)


@functools.cache
def whole_batch() -> tuple[T5, tuple[jax.Array, ...], jax.Array, T5]:
    """A model, a batch, and the loss and gradient of the whole batch at once."""
    model = initialise(T5(TINY), 0)
    batch = tuple(jnp.asarray(a) for a in random_batch(50, rows=6))

    def loss(model: Any) -> Any:
        return model.loss(batch[0], batch[2], batch[1])[0]

    return model, batch, *jax.jit(jax.value_and_grad(loss))(model)


@pytest.mark.parametrize("pieces", [1, 2, 6])
def test_accumulated_gradient_equals_whole_batch(pieces: int) -> None:
    """Rows have different numbers of labels, so a mean of the pieces' means would be wrong."""
    model, batch, expected, gradient = whole_batch()

    def loss(model: Any, piece: Any, _: Any, key: Any) -> Any:
        return (model.loss(piece[0], piece[2], piece[1], key=key)[1], None)

    mean, sums, ours, _ = jax.jit(lambda model: value_and_grad(loss, model, batch, pieces))(model)
    np.testing.assert_allclose(mean, expected, rtol=1e-6)
    assert float(sums.weight) == (np.asarray(batch[2]) >= 0).sum()
    for name, leaf in leaves(gradient).items():
        np.testing.assert_allclose(leaves(ours)[name], leaf, rtol=0, atol=1e-5 * float(jnp.abs(leaf).max()))


def test_indivisible_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="4 pieces"):
        value_and_grad(lambda model, piece, carry, key: None, {}, jnp.zeros((6, 2)), 4)
