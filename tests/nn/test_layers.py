"""The matrix product and its gradient, norms, dropout, the feed-forward network, initialisation."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxen.nn import hardware
from flaxen.nn.hardware import matmul_few_rows, transposed_copy, transposed_right
from flaxen.nn.layers import MLP, LayerNorm, Linear, RMSNorm, dropout, for_few_rows, keep_mask
from flaxen.nn.matmul import contract, dots
from flaxen.nn.param import initialise, normal


@pytest.mark.parametrize(("inputs", "outputs"), [((6,), (2, 5)), ((2, 5), (6,))])
def test_contract_has_the_gradient_of_a_matmul(inputs: tuple[int, ...], outputs: tuple[int, ...]) -> None:
    draw = np.random.default_rng(0)
    x, w = (jnp.asarray(draw.standard_normal(shape), jnp.float32) for shape in ((3, 4, *inputs), (*inputs, *outputs)))
    out, back = jax.vjp(lambda x, w: contract(x, w, len(inputs)), x, w)
    expected, expected_back = jax.vjp(lambda x, w: jnp.tensordot(x, w, len(inputs)), x, w)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    for gradient, expected_gradient in zip(back(out), expected_back(out)):
        np.testing.assert_allclose(gradient, expected_gradient, atol=1e-4)


def test_bfloat16_matmuls_accumulate_in_float32() -> None:
    """Sums 4096 ones: in bfloat16 the sum would stop growing at 256."""
    x, w = jnp.ones((1, 4096), jnp.bfloat16), jnp.ones((4096, 1), jnp.float32)
    assert float(contract(x, w, 1)[0, 0]) == float(matmul_few_rows(x, w.T)[0, 0]) == 4096
    assert contract(x, w, 1).dtype == jnp.bfloat16
    assert jax.grad(lambda w: contract(x, w, 1).astype(jnp.float32).sum())(w).dtype == jnp.float32


def test_few_rows_equals_linear() -> None:
    mlp = initialise(MLP(4, 6, "relu", gated=True), 0)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 4)), jnp.float32)
    np.testing.assert_allclose(for_few_rows(mlp)(x, 0.0, None), mlp(x, 0.0, None), atol=1e-6)
    layer = initialise(Linear((3, 4), (5, 2), std=1.0), 0)
    y = jnp.asarray(np.random.default_rng(0).standard_normal((2, 7, 3, 4)), jnp.float32)
    np.testing.assert_allclose(for_few_rows(layer)(y), layer(y), atol=1e-5)


def test_linear_contracts_several_axes() -> None:
    layer = initialise(Linear((3, 4), (5,), std=1.0), 0)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 7, 3, 4)), jnp.float32)
    np.testing.assert_allclose(layer(x), jnp.einsum("BTNH,NHD->BTD", x, layer.weight[...]), atol=1e-5)


def test_rms_norm_statistics_are_float32() -> None:
    norm = initialise(RMSNorm(4, 1e-6), 0)
    x = jnp.full((1, 4), 3e4, jnp.float32)
    np.testing.assert_allclose(norm(x, jnp.float32), 1.0, rtol=1e-6)
    assert norm(x, jnp.bfloat16).dtype == jnp.bfloat16


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_norms_have_the_gradient_of_their_formula(kind: type, dtype: str) -> None:
    draw = np.random.default_rng(0)
    x, g = (jnp.asarray(draw.standard_normal((3, 5, 24)) + 1, dtype) for _ in range(2))
    norm = jax.tree.map(lambda a: a + draw.standard_normal(a.shape).astype(np.float32), initialise(kind(24, 1e-3), 0))

    def formula(x: jax.Array, norm: RMSNorm | LayerNorm) -> jax.Array:
        x = x.astype(jnp.float32)
        x = x - x.mean(-1, keepdims=True) if kind is LayerNorm else x
        return x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-3) * norm.weight[...]

    def gradient(f: Callable[..., jax.Array]) -> tuple[jax.Array, jax.Array]:
        dx, dnorm = jax.grad(lambda x, n: jnp.vdot(f(x, n), g.astype(jnp.float32)), argnums=(0, 1))(x, norm)
        return dx, dnorm.weight[...]

    for ours, expected in zip(gradient(lambda x, norm: norm(x, jnp.float32)), gradient(formula)):
        assert ours.dtype == expected.dtype
        rtol = 2**-7 if ours.dtype == jnp.bfloat16 else 1e-4
        np.testing.assert_allclose(ours.astype(jnp.float32), expected.astype(jnp.float32), rtol=rtol, atol=1e-5)


def test_dots_equal_sums_of_products() -> None:
    a, b = jnp.asarray(np.random.default_rng(0).standard_normal((2, 5, 7)), jnp.float32)
    np.testing.assert_allclose(dots(a, b), (a * b).sum(-1), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dots(a, b, axis=0), (a * b).sum(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("panels", [True, False])
@pytest.mark.parametrize("shape", [(3, 4), (16, 2048), (17, 2048), (1000, 33)])
def test_transposed_copy_equals_transpose(shape: tuple[int, int], panels: bool, dtype: str) -> None:
    """In panels of 16 rows, the last of which may overlap; or at once, for small matrices or many cores."""
    a = jax.random.normal(jax.random.key(0), shape).astype(dtype)
    with hardware.compile_for(hardware.Target(transposed_copies=True, panels=panels)):
        np.testing.assert_array_equal(jax.jit(transposed_copy)(a), a.T)
        np.testing.assert_array_equal(jax.jit(transposed_right)(a), a.T)


def test_bfloat16_is_transposed_without_being_widened() -> None:
    """A loop over bfloat16 would convert its whole result in every iteration: half the time of a training step."""
    with hardware.compile_for(hardware.Target(transposed_copies=True, panels=True)):
        program = jax.jit(transposed_copy).lower(jnp.ones((256, 512), jnp.bfloat16)).compile().as_text()
    assert "while" in program
    assert "f32[" not in program


def test_gated_mlp_equals_its_formula() -> None:
    mlp = initialise(MLP(4, 6, "relu", gated=True), 0)
    x = jnp.ones((1, 4))
    w = {name: getattr(mlp, name).weight[...] for name in ("gate", "wi", "wo")}
    expected = (jax.nn.relu(x @ w["gate"]) * (x @ w["wi"])) @ w["wo"]
    np.testing.assert_allclose(mlp(x, 0.0, None), expected, atol=1e-6)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_rate_scale_and_independence(rate: float) -> None:
    x = jnp.ones((300, 400))
    index = jnp.arange(x.size, dtype=jnp.uint32).reshape(x.shape)
    masks = [np.asarray(keep_mask(jax.random.key(seed), index, rate)) for seed in (0, 1)]
    n, p = x.size, 1 - rate
    for mask in masks:
        assert abs(mask.mean() - p) < 5 * np.sqrt(p * rate / n)
        # Neighbours along both axes are uncorrelated.
        for a, b in ((mask[:, 1:], mask[:, :-1]), (mask[1:], mask[:-1])):
            assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 5 / np.sqrt(n)
    assert abs(np.corrcoef(masks[0].ravel(), masks[1].ravel())[0, 1]) < 5 / np.sqrt(n)
    dropped = np.asarray(dropout(x, rate, jax.random.key(0)))
    np.testing.assert_allclose(dropped, masks[0] / p, rtol=1e-6)
    assert dropout(x, rate, None) is x


def test_initial_values_depend_only_on_seed_and_path() -> None:
    import flax.nnx as nnx

    class Pair(nnx.Module):
        def __init__(self, both: bool):
            self.a = normal(50, 40, std=0.5)
            self.b = normal(50, 40, std=0.5) if both else None

    single, pair, other_seed = initialise(Pair(False), 7), initialise(Pair(True), 7), initialise(Pair(False), 8)
    np.testing.assert_array_equal(single.a[...], pair.a[...])
    assert not np.allclose(pair.a[...], pair.b[...])
    assert not np.allclose(single.a[...], other_seed.a[...])
    assert abs(float(single.a[...].std()) - 0.5) < 0.03
