"""A few rows of the batch at a time, or all: the same numbers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import random_batch

from flaxen.models.t5 import T5, Config
from flaxen.nn import hardware, stack
from flaxen.nn.param import initialise
from flaxen.tree import leaves

TINY = Config(vocab_size=50, d_model=16, d_head=4, d_ff=24, n_layers=2, n_decoder_layers=2, n_heads=4)


def loss_and_gradient() -> tuple[jax.Array, T5]:
    model = initialise(T5(TINY), 0)
    ids, valid, labels = (jnp.asarray(a) for a in random_batch(50, rows=4))
    return jax.jit(jax.value_and_grad(lambda model: model.loss(ids, labels, valid)[0]))(model)


@functools.cache
def whole() -> tuple[jax.Array, T5]:
    return loss_and_gradient()


@pytest.mark.parametrize("tokens", [1, 50])
def test_rows_by_rows_equal_the_batch(tokens: int) -> None:
    """With 50 tokens in the cache two rows of 23 go together, and four of 11."""
    expected, gradient = whole()
    with hardware.compile_for(dataclasses.replace(hardware.CPU, activations=tokens * TINY.d_model)):
        ours, other = loss_and_gradient()
    np.testing.assert_allclose(ours, expected, rtol=1e-6)
    for name, leaf in leaves(gradient).items():
        np.testing.assert_allclose(leaves(other)[name], leaf, rtol=0, atol=1e-5 * float(jnp.abs(leaf).max()))


@pytest.mark.parametrize("length", [7, 32, 33])
def test_tokens_by_tokens_equal_the_row(length: int) -> None:
    """Values and gradients, also where the pieces do not divide the row."""
    draw = np.random.default_rng(0)
    x, w = (jnp.asarray(draw.standard_normal(shape), jnp.float32) for shape in ((2, length, 4), (4, 4)))

    def f(w: jax.Array, x: jax.Array) -> jax.Array:
        return hardware.few_tokens_at_a_time(lambda x, key: jnp.tanh(x @ w), x, None, checkpoint=length == 33)

    with hardware.compile_for(hardware.Target(activations=40)):
        value, back = jax.vjp(f, w, x)
    expected, expected_back = jax.vjp(lambda w, x: jnp.tanh(x @ w), w, x)
    np.testing.assert_allclose(value, expected, atol=1e-6)
    for one, other in zip(back(x), expected_back(x)):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_each_piece_has_noise_of_its_own() -> None:
    draw = lambda x, key: jax.random.normal(key, x.shape)  # noqa: E731
    with hardware.compile_for(hardware.Target(activations=40)):
        noise = hardware.few_tokens_at_a_time(draw, jnp.zeros((1, 20, 4)), jax.random.key(0), checkpoint=False)
    assert not np.allclose(noise[0, :10], noise[0, 10:])


def test_unstacking_has_the_gradient_of_slicing() -> None:
    w = jnp.arange(12.0).reshape(3, 4)
    f = lambda w: sum((i + 1) * jnp.sum(row**2) for i, row in enumerate(stack.unstack(w)))  # noqa: E731
    np.testing.assert_allclose(jax.grad(f)(w), 2 * w * jnp.arange(1, 4)[:, None])
