"""One source for all hardware: programs lowered for accelerators have no CPU loops, and each switch works alone.

Programs are lowered, not compiled, so TPU and CUDA programs can be inspected on any machine. The text of a loop shows
its number of iterations; the sizes below are chosen so that every kind of loop has a different number.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxen.generate import search
from flaxen.generate.options import Options
from flaxen.models import captioner, gpt2, t5, vit
from flaxen.models.captioner import Captioner
from flaxen.models.t5 import T5
from flaxen.models.t5_decoding import T5Decoder
from flaxen.nn import hardware
from flaxen.nn.param import initialise
from flaxen.tree import leaves

ROWS, SOURCE, TARGET = 11, 520, 9
LAYERS, DECODER_LAYERS, HEADS = 7, 5, 13
BLOCKS = 3  # blocks of 174 keys into which full attention cuts the source
BANDS = 9  # blocks of 64 queries into which local attention cuts the source; targets and labels are one block
CPU = dataclasses.replace(hardware.CPU, activations=2**14, scores=2**12, panels=True)

T5_CONFIG = t5.Config(
    vocab_size=50, d_model=52, d_head=4, d_ff=64, n_layers=LAYERS, n_decoder_layers=DECODER_LAYERS, n_heads=HEADS,
    radius=40,
)  # fmt: skip
CAPTIONER_CONFIG = captioner.Config(
    vit.Config(image_size=(32, 32), patch_size=(8, 8), d_model=52, d_ff=64, n_layers=LAYERS, n_heads=HEADS),
    gpt2.Config(
        vocab_size=50, n_positions=16, d_model=52, d_ff=64, n_layers=DECODER_LAYERS, n_heads=HEADS, cross=True,
        pad_id=0, eos_ids=(1,), start_id=0,
    ),
)  # fmt: skip


def ids(rows: int, length: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows, length), jnp.int32)


def lower_gradient(model: Any, *batch: jax.ShapeDtypeStruct, platform: str) -> str:
    def loss(model: Any, *batch: jax.Array) -> jax.Array:
        return model.loss(*batch)[0]

    return jax.jit(jax.grad(loss)).trace(model, *batch).lower(lowering_platforms=(platform,)).as_text()


def lower_t5(attention: str) -> Callable[[str], str]:
    def lower(platform: str) -> str:
        model = T5(dataclasses.replace(T5_CONFIG, attention=attention))
        return lower_gradient(model, ids(ROWS, SOURCE), ids(ROWS, TARGET), platform=platform)

    return lower


def lower_captioner(platform: str) -> str:
    pixels = jax.ShapeDtypeStruct((ROWS, 3, 32, 32), jnp.float32)
    return lower_gradient(Captioner(CAPTIONER_CONFIG), pixels, ids(ROWS, TARGET), platform=platform)


def lower_decoding(platform: str) -> str:
    """Greedy search: one loop over tokens, whose number of iterations is not a constant."""
    decoder = jax.eval_shape(T5Decoder, T5(T5_CONFIG))
    inputs = (ids(ROWS, SOURCE), jax.ShapeDtypeStruct((ROWS, SOURCE), bool))
    options, rows = Options().static(), jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    state = jax.eval_shape(lambda *args: search.begin(*args, room=16, options=options, pad=0), decoder, inputs, rows)
    until = jax.ShapeDtypeStruct((), jnp.int32)
    traced = search.advance.trace(decoder, state, until, {}, options=options, eos=(1,), pad=0)
    return traced.lower(lowering_platforms=(platform,)).as_text()


def iterations(program: str) -> list[int]:
    """The number of iterations of each loop where it is a constant, which the loop's condition compares with."""
    constant = r"%\S+ = stablehlo.constant dense<(\d+)> : tensor<i32>\s*"
    return sorted(map(int, re.findall(rf"cond \{{\s*{constant}%\S+ = stablehlo.compare", program)))


def barred_transposes(program: str) -> int:
    """Count barriers that keep XLA from fusing a transpose into its reader or from transposing a matmul."""
    count = 0
    for function in program.split("func.func"):  # names of values are local to a function
        transposes = set(re.findall(r"(%\w+) = stablehlo.transpose ", function))
        barriers = re.findall(r"(%\w+) = stablehlo.optimization_barrier (%\w+) :", function)
        read = set(re.findall(r"stablehlo.transpose (%\w+),", function))
        count += sum(operand in transposes or result in read for result, operand in barriers)
    return count


# For each program: how to lower it, the number of loops it has on accelerators, and their numbers of iterations.
PROGRAMS: dict[str, tuple[Callable[[str], str], int, set[int]]] = {
    "t5": (lower_t5("full"), 24, {LAYERS, DECODER_LAYERS, BLOCKS, 1}),
    "local": (lower_t5("local"), 20, {LAYERS, DECODER_LAYERS, BLOCKS, BANDS, 1}),
    "transient-global": (lower_t5("transient-global"), 20, {LAYERS, DECODER_LAYERS, BLOCKS, BANDS, 1}),
    "captioner": (lower_captioner, 22, {LAYERS, DECODER_LAYERS, 1}),
    "decoding": (lower_decoding, 1, set()),
}


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_for_accelerators_have_no_cpu_loops(name: str, platform: str) -> None:
    """No loop over heads, batch rows, chunks of tokens or panels of a transpose; no barrier around a transpose."""
    lower, n_loops, lengths = PROGRAMS[name]
    with hardware.compile_for(platform):
        program = lower(platform)
    assert set(iterations(program)) == lengths
    assert program.count("stablehlo.while") == n_loops
    assert barred_transposes(program) == 0


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_for_cpus_have_cpu_loops(name: str) -> None:
    """Shows that the test for accelerators can fail."""
    lower, n_loops, lengths = PROGRAMS[name]
    with hardware.compile_for(CPU):
        program = lower("cpu")
    assert barred_transposes(program) > 20
    if name == "decoding":
        return
    assert program.count("stablehlo.while") > n_loops
    cpu_loops = set(iterations(program)) - lengths
    assert ROWS in cpu_loops  # one batch row at a time
    if name != "captioner":  # its rows are too short for loops over heads and panels
        assert {ROWS * HEADS, -(-ROWS * SOURCE // hardware.PANEL)} <= cpu_loops


TINY_T5 = dataclasses.replace(
    T5_CONFIG, n_layers=1, n_decoder_layers=1, n_heads=4, d_model=24, attention="transient-global", radius=10
)
# Small enough that even this model's batch is split.
SMALL_CACHES = dataclasses.replace(hardware.CPU, activations=2**9, scores=2**9, panels=True)


@functools.cache
def results(target: hardware.Target) -> dict[str, np.ndarray]:
    """Loss and gradients of a LongT5, and its logits when decoding two tokens for two beams."""
    draw = np.random.default_rng(0)
    source, labels = (jnp.asarray(draw.integers(2, 50, (3, n)), jnp.int32) for n in (90, TARGET))
    model = initialise(T5(TINY_T5), 0)

    def loss(model: T5) -> jax.Array:
        return model.loss(source, labels)[0]

    def decode(model: T5) -> jax.Array:
        decoder = T5Decoder(model)
        _, state = decoder.start((source, source > 0), 4, 2, True)
        logits = []
        for t in range(2):
            step_logits, state = decoder.step(jnp.broadcast_to(labels[:, t : t + 1], (3, 2)), state)
            logits.append(step_logits)
        return jnp.stack(logits)

    with hardware.compile_for(target):
        value, gradient = jax.jit(jax.value_and_grad(loss), compiler_options=hardware.training_options())(model)
        logits = jax.jit(decode)(model)
    return {name: np.asarray(a) for name, a in {"loss": value, "logits": logits, **leaves(gradient)}.items()}


@pytest.mark.parametrize("switch", [field.name for field in dataclasses.fields(hardware.Target)])
def test_switching_off_one_optimisation_keeps_results(switch: str) -> None:
    off = dataclasses.replace(SMALL_CACHES, **{switch: getattr(hardware.ACCELERATOR, switch)})
    assert off != SMALL_CACHES
    ours = results(off)
    for name, expected in results(SMALL_CACHES).items():
        np.testing.assert_allclose(ours[name], expected, rtol=0, atol=1e-5 * max(1.0, np.abs(expected).max()))
