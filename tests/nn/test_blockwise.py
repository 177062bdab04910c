"""Blockwise attention equals plain attention: values and gradients, whatever the blocks."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxen.nn import hardware
from flaxen.nn.blockwise import MASKED, Plan, _toeplitz, attend, attend_plain


def full_bias(plan: Plan, t: int, s: int) -> jax.Array:
    """Bias and masks of a plan as [B, N, T, S]."""
    distance = jnp.arange(s) - jnp.arange(t)[:, None]
    bias = plan.bias[:, distance + t - 1][None] + jnp.where(plan.valid, 0.0, MASKED)[:, None, None]
    return jnp.where(distance > 0, MASKED, bias) if plan.causal else bias


def random_case(t: int, s: int, seed: int = 0) -> tuple:
    draw = np.random.default_rng(seed)
    q, k, v, g = (jnp.asarray(draw.standard_normal((2, 3, n, 8)), jnp.float32) for n in (t, s, s, t))
    bias = jnp.asarray(draw.standard_normal((3, t + s - 1)), jnp.float32)
    valid = jnp.asarray(draw.random((2, s)) > 0.3).at[:, 0].set(True)
    return q, k, v, g, bias, valid


def value_and_gradients(f: Callable[..., jax.Array], q, k, v, g, bias) -> tuple:
    return jax.jit(lambda g, *xs: (f(*xs), jax.vjp(f, *xs)[1](g)))(g, q, k, v, bias)


@functools.cache
def plain(t: int, s: int, causal: bool) -> tuple:
    *inputs, valid = random_case(t, s)

    def attention(q, k, v, bias):
        return attend_plain(q, k, v, full_bias(Plan(valid, bias, causal), t, s))

    return value_and_gradients(attention, *inputs)


@pytest.mark.parametrize(
    ("t", "s", "causal"), [(1, 5, False), (7, 7, True), (50, 130, False), (129, 129, True), (64, 64, True)]
)
@pytest.mark.parametrize(("block", "together"), [(16, 1), (16, 3), (256, 6)])
def test_blockwise_equals_plain_attention(t: int, s: int, causal: bool, block: int, together: int) -> None:
    """Values and gradients, with `together` heads computed at a time."""
    cached = hardware.Target(scores=together * min(t, block) * min(s, block))
    *inputs, valid = random_case(t, s)

    def blockwise(q, k, v, bias):
        return attend(q, k, v, Plan(valid, bias, causal), block=block)

    with hardware.compile_for(cached):
        ours, grads = value_and_gradients(blockwise, *inputs)
    expected, expected_grads = plain(t, s, causal)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5)
    for grad, plain_grad in zip(grads, expected_grads):
        np.testing.assert_allclose(grad, plain_grad, rtol=0, atol=2e-5 * float(jnp.abs(plain_grad).max()))


def test_dropout_is_the_same_in_forward_and_backward() -> None:
    """With a fixed key, attention is linear in v, so its derivative along v is the function itself."""
    q, k, v, _, bias, valid = random_case(40, 40)
    key = jax.random.key(3)

    def f(v: Any) -> Any:
        return attend(q, k, v, Plan(valid, bias, True, rate=0.5), key, block=16)

    out, back = jax.jit(lambda v: (f(v), jax.vjp(f, v)[1](f(v))[0]))(v)
    np.testing.assert_allclose(jnp.vdot(out, out), jnp.vdot(back, v), rtol=1e-5)
    assert not np.allclose(out, attend(q, k, v, Plan(valid, bias, True)))
    # Compare a numeric derivative in q too, which passes through softmax and dropout.
    direction = jnp.asarray(np.random.default_rng(1).standard_normal(q.shape), jnp.float32)
    h = jax.jit(lambda e: attend(q + e * direction, k, v, Plan(valid, bias, True, rate=0.5), key, block=16).sum())
    numeric = (h(1e-2) - h(-1e-2)) / 2e-2
    np.testing.assert_allclose(jax.grad(h)(0.0), numeric, rtol=5e-3)


def test_dropout_preserves_the_mean() -> None:
    q, k, v, _, bias, valid = random_case(8, 40)
    plan = Plan(valid, bias, rate=0.3)
    outputs = jax.jit(jax.vmap(lambda key: attend(q, k, v, plan, key)))(jax.random.split(jax.random.key(0), 4000))
    np.testing.assert_allclose(outputs.mean(axis=0), attend(q, k, v, plan), atol=0.06)


def test_output_without_valid_keys_is_finite() -> None:
    q, k, v, _, bias, _ = random_case(5, 7)
    out = attend(q, k, v, Plan(jnp.zeros((2, 7), bool), bias))
    assert np.isfinite(out).all()


def test_toeplitz_equals_indexing_by_distance() -> None:
    window = jnp.arange(9.0)
    index = np.arange(6) - np.arange(4)[:, None] + 3
    np.testing.assert_array_equal(_toeplitz(window, 4, 6), window[index])
