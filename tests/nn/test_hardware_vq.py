"""What a Transformer-VQ does for CPUs stays on CPUs, and is how, not what: every switch off gives the same numbers."""

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

# Layers one by one, so that no loop is theirs; T · D is enough for transposes by panels.
CONFIG = Config(
    vocab_size=31, d_model=64, d_k=8, d_v=16, n_heads=2, n_layers=2, n_codes=8, block=64, window=32, scan=False
)
TOKENS = 512
HERE = replace(CPU, panels=True)  # on a machine with many cores, panels are off
SWITCHES = ("rows_in_sequence", "transposed_copies", "panels", "separate_arrays", "weights_first")
PLATFORMS = ("tpu", "cuda")


def ids(length: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(2, CONFIG.vocab_size, (1, length)), jnp.int32)


def gradient(model: VQLM, ids: jax.Array) -> Any:
    """Of an update of training, with what it carries on."""

    def loss(model: VQLM) -> tuple[jax.Array, Any]:
        sums, state, _ = model.loss(ids[:, :-1], ids[:, 1:], commit=0.1, learn=True)
        return sums.loss, state

    return jax.grad(loss, has_aux=True)(model)


def decode(decoder: VQDecoder, tokens: jax.Array, state: Any) -> Any:
    return decoder.step(tokens, state)


def prompt(length: int) -> tuple[jax.Array, jax.Array, None]:
    return ids(length), jnp.ones((1, length), bool), None


def lowered(function: Callable[..., Any], platform: str, *arguments: Any) -> str:
    """StableHLO of the program for a platform, which need not be here."""
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
    """Logits are made in chunks everywhere: for memory, not for a cache."""

    def loss(hidden: jax.Array, head: jax.Array) -> jax.Array:
        return cross_entropy(hidden, head, jnp.zeros(TOKENS, jnp.int32), jnp.ones(TOKENS)).loss

    hidden, head = (jax.ShapeDtypeStruct((n, CONFIG.d_model), jnp.float32) for n in (TOKENS, CONFIG.vocab_size))
    with compile_for(platform):
        return loops(lowered(jax.grad(loss, argnums=(0, 1)), platform, hidden, head))


@pytest.mark.parametrize("platform", PLATFORMS)
def test_training_on_an_accelerator_has_no_loops_of_a_cpu(platform: str) -> None:
    """No map over rows and heads, no scan over blocks, no transposes by panels: no loop but that of the loss. On a CPU
    each of the 4 units has loops over heads and blocks, forward and backward, and transposes by panels beside them."""
    assert loops(training_program(platform)) == loops_of_the_loss(platform)
    units = 2 * CONFIG.n_layers
    with compile_for(replace(HERE, panels=False)):
        without_panels = loops(lowered(gradient, "cpu", VQLM(CONFIG), ids(TOKENS + 1)))
    assert without_panels >= loops_of_the_loss("cpu") + 4 * units
    assert loops(training_program("cpu")) > without_panels


@pytest.mark.parametrize("platform", PLATFORMS)
def test_decoding_on_an_accelerator_leaves_matmuls_alone(platform: str) -> None:
    """A step has no loop, and no weight is a left operand: XLA turns round what barriers do not keep it from."""
    assert loops(decoding_program(platform)) == 0
    assert "optimization_barrier" not in decoding_program(platform)
    # On a CPU: q, kvg and o of each unit, and the head.
    assert decoding_program("cpu").count("stablehlo.optimization_barrier") == 3 * 2 * CONFIG.n_layers + 1


@cache
def results(target: hardware.Target) -> tuple[dict[str, Any], tuple[str, str]]:
    """Numbers, computed here with these optimisations; and the programs that computed them."""
    with compile_for(target):
        model = initialise(VQLM(CONFIG), 0)
        (slopes, state) = jax.jit(gradient)(model, ids(TOKENS + 1))
        decoder = VQDecoder(model)
        _, ring = jax.jit(lambda decoder: decoder.start(prompt(100), 8, 1, False))(decoder)
        logits = []
        for token in (3, 1, 7):
            now, ring = jax.jit(decode)(decoder, jnp.full((1, 1), token), ring)
            logits.append(now)
        programs = (lowered(gradient, "cpu", model, ids(TOKENS + 1)), lowered(decode, "cpu", decoder, ids(1), ring))
    return {"gradient": slopes, "state": state, "logits": logits}, programs


@pytest.mark.parametrize("switch", SWITCHES)
def test_every_switch_off_gives_the_same(switch: str) -> None:
    """Gradients, the state carried on and logits, each within 1e-5 of its largest value, by another program."""
    expected, programs = results(HERE)
    found, others = results(replace(HERE, **{switch: False}))
    assert programs != others, f"{switch} does nothing here: the comparison says nothing"
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected)):
        scale = max(float(np.abs(np.asarray(b, np.float32)).max()), 1e-3)
        np.testing.assert_allclose(a, b, atol=1e-5 * scale, rtol=0, err_msg=jax.tree_util.keystr(path))
