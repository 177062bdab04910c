"""CPU optimisations of Transformer-VQ are absent from accelerator programs; switching them off changes no result."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxen.models.vq_config import Config
from flaxen.models.vq_decoding import VQDecoder
from flaxen.models.vq_lm import VQLM
from flaxen.nn import hardware
from flaxen.nn.hardware import CPU, compile_for
from flaxen.nn.loss import cross_entropy
from flaxen.nn.param import initialise

# Layers are unrolled, so that none of the counted loops is over layers; T · D is large enough for panel transposes.
CONFIG = Config(
    vocab_size=31, d_model=64, d_k=8, d_v=16, n_heads=2, n_layers=2, n_codes=8, block=64, window=32, scan=False
)
TOKENS = 512
HERE = replace(CPU, panels=True)  # panels are off by default on a machine with many cores
SWITCHES = ("rows_in_sequence", "transposed_copies", "panels", "separate_arrays", "weights_first")
PLATFORMS = ("tpu", "cuda")


def ids(length: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(2, CONFIG.vocab_size, (1, length)), jnp.int32)


def gradient(model: VQLM, ids: jax.Array) -> Any:
    """The gradient of a training update, and the carried state."""

    def loss(model: VQLM) -> tuple[jax.Array, Any]:
        sums, state, _ = model.loss(ids[:, :-1], ids[:, 1:], commit=0.1, learn=True)
        return sums.loss, state

    return jax.grad(loss, has_aux=True)(model)


def decode(decoder: VQDecoder, tokens: jax.Array, state: Any) -> Any:
    return decoder.step(tokens, state)


def prompt(length: int) -> tuple[jax.Array, jax.Array, None]:
    return ids(length), jnp.ones((1, length), bool), None


def lowered(function: Callable[..., Any], platform: str, *arguments: Any) -> str:
    """StableHLO of the program for a platform, which this machine need not have."""
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()


@cache
def training_program(platform: str) -> str:
    with compile_for(HERE if platform == "cpu" else platform):
        return lowered(gradient, platform, VQLM(CONFIG), ids(TOKENS + 1))


@cache
def decoding_program(platform: str) -> str:
    with compile_for(HERE if platform == "cpu" else platform):
        decoder = jax.eval_shape(VQDecoder, VQLM(CONFIG))
        state = jax.eval_shape(lambda decoder: decoder.start(prompt(1), 8, 1, False)[1], decoder)
        return lowered(decode, platform, decoder, ids(1), state)


def loops(program: str) -> int:
    return program.count("stablehlo.while")


def loops_of_the_loss(platform: str) -> int:
    """Loops of the cross-entropy, which computes logits in chunks on every platform, to save memory."""

    def loss(hidden: jax.Array, head: jax.Array) -> jax.Array:
        return cross_entropy(hidden, head, jnp.zeros(TOKENS, jnp.int32), jnp.ones(TOKENS)).loss

    hidden, head = (jax.ShapeDtypeStruct((n, CONFIG.d_model), jnp.float32) for n in (TOKENS, CONFIG.vocab_size))
    with compile_for(platform):
        return loops(lowered(jax.grad(loss, argnums=(0, 1)), platform, hidden, head))


@pytest.mark.parametrize("platform", PLATFORMS)
def test_accelerator_training_has_no_cpu_loops(platform: str) -> None:
    """On an accelerator there is no map over rows and heads, no scan over blocks and no panel transpose: all loops are
    those of the loss. On a CPU each of the 4 units has loops over heads and blocks, forward and backward, and panel
    transposes."""
    assert loops(training_program(platform)) == loops_of_the_loss(platform)
    units = 2 * CONFIG.n_layers
    with compile_for(replace(HERE, panels=False)):
        without_panels = loops(lowered(gradient, "cpu", VQLM(CONFIG), ids(TOKENS + 1)))
    assert without_panels >= loops_of_the_loss("cpu") + 4 * units
    assert loops(training_program("cpu")) > without_panels


@pytest.mark.parametrize("platform", PLATFORMS)
def test_accelerator_decoding_has_no_cpu_matmul_order(platform: str) -> None:
    """An accelerator decoding step has no loop, and no barrier that makes a weight a left operand of a matmul."""
    assert loops(decoding_program(platform)) == 0
    assert "optimization_barrier" not in decoding_program(platform)
    # On a CPU there is a barrier for q, kvg and o of each unit, and for the head.
    assert decoding_program("cpu").count("stablehlo.optimization_barrier") == 3 * 2 * CONFIG.n_layers + 1


@cache
def results(target: hardware.Target) -> tuple[dict[str, Any], tuple[str, str]]:
    """Gradient, state and logits computed with these optimisations, and the programs that computed them."""
    with compile_for(target):
        model = initialise(VQLM(CONFIG), 0)
        (gradients, state) = jax.jit(gradient)(model, ids(TOKENS + 1))
        decoder = VQDecoder(model)
        _, ring = jax.jit(lambda decoder: decoder.start(prompt(100), 8, 1, False))(decoder)
        logits = []
        for token in (3, 1, 7):
            now, ring = jax.jit(decode)(decoder, jnp.full((1, 1), token), ring)
            logits.append(now)
        programs = (lowered(gradient, "cpu", model, ids(TOKENS + 1)), lowered(decode, "cpu", decoder, ids(1), ring))
    return {"gradient": gradients, "state": state, "logits": logits}, programs


@pytest.mark.parametrize("switch", SWITCHES)
def test_switching_off_an_optimisation_changes_no_result(switch: str) -> None:
    """Gradients, carried state and logits agree within 1e-5 of their largest value, though the programs differ."""
    expected, programs = results(HERE)
    actual, other_programs = results(replace(HERE, **{switch: False}))
    assert programs != other_programs, f"{switch} changes nothing in this program, so the comparison proves nothing"
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected)):
        scale = max(float(np.abs(np.asarray(b, np.float32)).max()), 1e-3)
        np.testing.assert_allclose(a, b, atol=1e-5 * scale, rtol=0, err_msg=jax.tree_util.keystr(path))
