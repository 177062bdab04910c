"""Local and transient-global attention equal plain attention with the same mask: values and gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxen.nn import local
from flaxen.nn.blockwise import MASKED, Plan, attend, attend_plain
from flaxen.nn.local import GlobalTokens, LocalPlan, attend_local, block_sums, plan_global, plan_local
from flaxen.nn.param import initialise
from flaxen.nn.position import RelativeBias

N, H = 3, 8


def relative(seed: int) -> RelativeBias:
    return initialise(RelativeBias(N, 8, 20, True, 1.0), seed)


def random_case(length: int, n_global: int, seed: int = 0) -> tuple[jax.Array, ...]:
    draw = np.random.default_rng(seed)
    return tuple(
        jnp.asarray(draw.standard_normal((2, N, n, H)), jnp.float32)
        for n in (length, length, length, length, n_global, n_global)
    )


def segments_of(*rows: list[int]) -> jax.Array:
    """Segment numbers from segment lengths: [3, 2], [4] -> rows 1 1 1 2 2 and 1 1 1 1 0."""
    length = max(map(sum, rows))
    numbered = [np.repeat(np.arange(1, len(row) + 1), row) for row in rows]
    return jnp.asarray([np.pad(row, (0, length - len(row))) for row in numbered], jnp.int32)


def plain(q, k, v, bias, global_bias, plan: LocalPlan, radius: int, global_kv=None):
    """Textbook attention: one row of scores over all tokens and all global tokens."""
    length = q.shape[2]
    distance = jnp.arange(length) - jnp.arange(length)[:, None]
    seen = (jnp.abs(distance) <= radius) & (plan.segments[:, :, None] == plan.segments[:, None])
    offset = bias(distance)[None] + jnp.where(seen, 0.0, MASKED)[:, None]
    if global_kv is not None:
        assert plan.global_tokens is not None
        global_distance = (
            jnp.arange(plan.global_tokens.owner.shape[1]) - jnp.maximum(plan.global_tokens.block, 0)[..., None]
        )
        global_seen = plan.segments[:, :, None] == plan.global_tokens.owner[:, None]
        far = jnp.moveaxis(global_bias(global_distance), 0, 1) + jnp.where(global_seen, 0.0, MASKED)[:, None]
        k, v = (jnp.concatenate(pair, axis=2) for pair in zip((k, v), global_kv))
        offset = jnp.concatenate([offset, far], axis=3)
    return attend_plain(q, k, v, offset)


SEGMENTS = {
    "whole": ([70], [70]),
    "padded": ([70], [33]),
    "short": ([5], [1]),
    "long": ([300], [211]),
    "packed": ([20, 7, 43], [3, 50, 9]),
    "one": ([1], [1]),
    "empty row": ([70], []),
}


# (segments, radius, size of global blocks or None for local attention)
CASES = [
    ("whole", 3, None), ("padded", 40, None), ("long", 127, None), ("packed", 9, None), ("one", 3, None),
    ("whole", 3, 2), ("padded", 9, 4), ("long", 40, 7), ("long", 127, 16), ("packed", 5, 4), ("packed", 5, 1),
    ("short", 127, 16), ("one", 3, 1), ("empty row", 9, 4),
]  # fmt: skip


@pytest.mark.parametrize(("case", "radius", "size"), CASES)
def test_blocks_equal_plain_attention(case: str, radius: int, size: int | None) -> None:
    segments = segments_of(*SEGMENTS[case])
    bias, global_bias = relative(1), relative(2)
    n_global = segments.shape[1] // size if size else 0
    q, k, v, g, *global_kv = random_case(segments.shape[1], n_global)
    g = g * (segments > 0)[:, None, :, None]  # outputs at padding are never used

    def ours(q, k, v, bias, global_bias, *global_kv):
        global_plan = plan_global(global_bias, segments, size) if size else None
        plan = plan_local(bias, segments, radius, 0.0, global_plan)
        return attend_local(q, k, v, plan, None, global_kv if global_plan is not None else None)

    def reference(q, k, v, bias, global_bias, *global_kv):
        global_plan = plan_global(global_bias, segments, size) if size else None
        plan = plan_local(bias, segments, radius, 0.0, global_plan)
        return plain(q, k, v, bias, global_bias, plan, radius, global_kv if global_plan is not None else None)

    inputs = (q, k, v, bias, global_bias, *global_kv)

    def value_and_vjp(f: Any) -> Any:
        return jax.jit(lambda inputs, g: (f(*inputs), jax.vjp(f, *inputs)[1](g)))(inputs, g)

    (value, gradients), (expected, expected_gradients) = value_and_vjp(ours), value_and_vjp(reference)
    real = np.asarray(segments > 0)

    def close(a: Any, b: Any) -> Any:
        return np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * max(1.0, float(jnp.abs(b).max())))

    close(jnp.moveaxis(value, 2, 1)[real], jnp.moveaxis(expected, 2, 1)[real])
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients)):
        if a.size:
            close(a, b)


def test_wide_band_equals_full_attention() -> None:
    q, k, v, *_ = random_case(90, 0)
    bias, valid = relative(1), jnp.arange(90) < jnp.array([[90], [41]])
    wide = jax.jit(lambda *qkv: attend_local(*qkv, plan_local(bias, valid.astype(jnp.int32), 90, 0.0)))(q, k, v)
    full = jax.jit(lambda *qkv: attend(*qkv, Plan(valid, bias(jnp.arange(-89, 90)))))(q, k, v)
    np.testing.assert_allclose(wide[0], full[0], atol=1e-5)
    np.testing.assert_allclose(wide[1, :, :41], full[1, :, :41], atol=1e-5)


def test_masked_global_tokens_change_nothing() -> None:
    q, k, v, _, *global_kv = random_case(90, 5)
    segments = segments_of([90], [60])
    global_plan = plan_global(relative(2), segments, 16)
    assert global_plan is not None
    bias = relative(1)

    @jax.jit
    def attention(owner: jax.Array | None) -> jax.Array:
        changed = None if owner is None else global_plan._replace(owner=owner)
        plan = plan_local(bias, segments, 11, 0.0, changed)
        return attend_local(q, k, v, plan, None, None if changed is None else tuple(global_kv))

    without = attention(None)
    np.testing.assert_allclose(attention(jnp.full_like(global_plan.owner, 7)), without, atol=1e-6)
    assert not np.allclose(attention(global_plan.owner), without, atol=1e-2)


def test_global_tokens_are_blocks_of_each_segment() -> None:
    """Blocks start with each segment, the remainder joins the last block, and short segments have none."""
    segments = segments_of([10, 3, 4], [17])
    global_tokens = plan_global(relative(0), segments, 4)
    assert global_tokens is not None
    np.testing.assert_array_equal(global_tokens.block[0], [0] * 4 + [1] * 6 + [-1] * 3 + [2] * 4)
    np.testing.assert_array_equal(global_tokens.block[1], [0] * 4 + [1] * 4 + [2] * 4 + [3] * 5)
    np.testing.assert_array_equal(global_tokens.owner, [[1, 1, 3, 0], [1, 1, 1, 1]])
    x = jnp.ones((2, 17, 5))
    np.testing.assert_array_equal(block_sums(x, global_tokens)[..., 0], [[4, 6, 4, 0], [4, 4, 4, 5]])
    assert plan_global(relative(0), segments_of([3], [2]), 4) is None


def test_padding_in_front_does_not_move_blocks() -> None:
    """A text has the same blocks wherever it is in its row."""
    segments = jnp.asarray([[0, 0, 0, 1, 1, 1, 1, 1, 1, 0]], jnp.int32)
    global_tokens = plan_global(relative(0), segments, 3)
    assert global_tokens is not None
    np.testing.assert_array_equal(global_tokens.block[0], [-1, -1, -1, 0, 0, 0, 1, 1, 1, -1])


@pytest.mark.parametrize("size", [None, 4])
def test_dropout_is_the_same_in_forward_and_backward(size: int | None) -> None:
    """Attention is linear in v, so its derivative along v is the function itself; along q, compare a numeric one."""
    segments = segments_of([90], [70])
    q, k, v, _, *global_kv = random_case(90, 90 // size if size else 0)
    global_plan = plan_global(relative(2), segments, size) if size else None
    plan, key = plan_local(relative(1), segments, 11, 0.5, global_plan), jax.random.key(3)

    @jax.jit
    def f(q, v, global_v):
        return attend_local(q, k, v, plan, key, (global_kv[0], global_v) if size else None)

    out, back = jax.vjp(lambda *vs: f(q, *vs), v, global_kv[1])
    np.testing.assert_allclose(
        jnp.vdot(out, out), sum(jnp.vdot(d, x) for d, x in zip(back(out), (v, global_kv[1]))), rtol=1e-5
    )
    undropped = jax.jit(lambda q: attend_local(q, k, v, plan, None, tuple(global_kv) if size else None))(q)
    assert not np.allclose(out, undropped, atol=1e-2)
    direction = jnp.asarray(np.random.default_rng(1).standard_normal(q.shape), jnp.float32)
    h = jax.jit(lambda e: f(q + e * direction, v, global_kv[1]).sum())
    np.testing.assert_allclose(jax.grad(h)(0.0), (h(1e-2) - h(-1e-2)) / 2e-2, rtol=1e-2)


def test_bfloat16_is_finite_and_near_float32_over_16k_tokens_and_empty_rows() -> None:
    """Values and gradients have no NaN."""
    draw = np.random.default_rng(0)
    length, size = 16_384, 16
    q, k, v = (jnp.asarray(draw.standard_normal((2, 1, length, H)), jnp.float32) for _ in range(3))
    global_kv = tuple(jnp.asarray(draw.standard_normal((2, 1, length // size, H)), jnp.float32) for _ in range(2))
    segments = jnp.asarray([[1] * length, [0] * length], jnp.int32)
    bias = [initialise(RelativeBias(1, 8, 20, True, 1.0), seed) for seed in (1, 2)]
    plan = plan_local(bias[0], segments, 127, 0.0, plan_global(bias[1], segments, size))

    def f(q, k, v, *global_kv):
        return attend_local(q, k, v, plan, None, global_kv)

    exact = jax.jit(f)(q, k, v, *global_kv)
    half = [a.astype(jnp.bfloat16) for a in (q, k, v, *global_kv)]
    out, gradients = jax.jit(lambda *xs: (f(*xs), jax.vjp(f, *xs)[1](jnp.ones_like(xs[0]))))(*half)
    assert out.dtype == jnp.bfloat16
    for leaf in (out, *gradients):
        assert jnp.isfinite(leaf).all()
    np.testing.assert_allclose(out[0].astype(jnp.float32), exact[0], atol=0.06)


def test_few_global_tokens_are_enough_for_every_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries of one block can be part of several global tokens; the block length does not change the result."""
    segments = segments_of([37, 41, 12], [90])
    q, k, v, _, *global_kv = random_case(90, 30)
    bias, tokens = relative(1), plan_global(relative(2), segments, 3)
    assert isinstance(tokens, GlobalTokens)
    results = []
    for block in (5, 16, 64):
        monkeypatch.setattr(local, "BLOCK", block)

        def attention(q: Any) -> Any:
            return attend_local(q, k, v, plan_local(bias, segments, 6, 0.0, tokens), None, tuple(global_kv))

        results.append(jax.jit(attention)(q))
    np.testing.assert_allclose(results[0], results[2], atol=1e-5)
    np.testing.assert_allclose(results[1], results[2], atol=1e-5)
