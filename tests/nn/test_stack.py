"""Computing a few rows or tokens of a batch at a time gives the same results as the whole batch at once."""

import dataclasses
import functools
from typing import Any

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
def whole_batch() -> tuple[jax.Array, T5]:
    return loss_and_gradient()


@pytest.mark.parametrize("tokens", [1, 50])
def test_few_rows_at_a_time_equal_the_batch(tokens: int) -> None:
    """With 50 tokens at a time, two source rows of 23 tokens are computed together, and four target rows of 11."""
    expected, gradient = whole_batch()
    with hardware.compile_for(dataclasses.replace(hardware.CPU, activations=tokens * TINY.d_model)):
        ours, our_gradient = loss_and_gradient()
    np.testing.assert_allclose(ours, expected, rtol=1e-6)
    for name, leaf in leaves(gradient).items():
        np.testing.assert_allclose(leaves(our_gradient)[name], leaf, rtol=0, atol=1e-5 * float(jnp.abs(leaf).max()))


@pytest.mark.parametrize("length", [7, 32, 33])
def test_few_tokens_at_a_time_equal_the_batch(length: int) -> None:
    """Values and gradients, also if the chunks do not divide the number of tokens."""
    draw = np.random.default_rng(0)
    x, w = (jnp.asarray(draw.standard_normal(shape), jnp.float32) for shape in ((2, length, 4), (4, 4)))

    def f(w: jax.Array, x: jax.Array) -> jax.Array:
        return hardware.few_tokens_at_a_time(lambda x, key: jnp.tanh(x @ w), x, None, checkpoint=length == 33)

    with hardware.compile_for(hardware.Target(activations=40)):
        value, back = jax.vjp(f, w, x)
    expected, expected_back = jax.vjp(lambda w, x: jnp.tanh(x @ w), w, x)
    np.testing.assert_allclose(value, expected, atol=1e-6)
    for gradient, expected_gradient in zip(back(x), expected_back(x)):
        np.testing.assert_allclose(gradient, expected_gradient, atol=1e-5)


def test_each_chunk_of_tokens_has_its_own_noise() -> None:
    def draw(x: Any, key: Any) -> Any:
        return jax.random.normal(key, x.shape)

    with hardware.compile_for(hardware.Target(activations=40)):
        noise = hardware.few_tokens_at_a_time(draw, jnp.zeros((1, 20, 4)), jax.random.key(0), checkpoint=False)
    assert not np.allclose(noise[0, :10], noise[0, 10:])


def test_unstack_has_the_gradient_of_slicing() -> None:
    w = jnp.arange(12.0).reshape(3, 4)

    def f(w: Any) -> Any:
        return sum((i + 1) * jnp.sum(row**2) for i, row in enumerate(stack.unstack(w)))

    np.testing.assert_allclose(jax.grad(f)(w), 2 * w * jnp.arange(1, 4)[:, None])
