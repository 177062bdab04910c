"""LongT5 equals transformers' torch model over lengths, radii and block sizes; packed rows equal separate ones."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from conftest import SMALL, Reference, random_batch, randomise_weights, torch_generate
from transformers.models.longt5 import modeling_longt5

import flaxen
from flaxen.hf import t5 as hf_t5
from flaxen.hf import weightmap
from flaxen.models import t5
from flaxen.models.t5 import PRESETS, T5, Config
from flaxen.nn import hardware
from flaxen.nn.param import initialise
from flaxen.tree import leaves

# (attention, radius, block size, length, gated, tied)
CASES = [
    ("local", 3, 16, 1, False, True),
    ("local", 3, 16, 700, True, False),
    ("local", 31, 16, 200, False, True),
    pytest.param(("local", 127, 16, 300, True, True), marks=pytest.mark.optimised),
    ("transient-global", 3, 2, 61, False, True),
    ("transient-global", 5, 3, 131, True, True),
    ("transient-global", 15, 16, 9, True, False),  # shorter than a block of global tokens
    ("transient-global", 31, 8, 257, False, False),
    ("transient-global", 100, 12, 450, True, False),
    pytest.param(("transient-global", 127, 16, 700, True, False), marks=pytest.mark.optimised),
]


def close(ours: object, theirs: object, tolerance: float) -> None:
    ours, theirs = np.asarray(ours, np.float32), np.asarray(theirs, np.float32)
    assert ours.shape == theirs.shape
    scale = np.abs(theirs).max()
    np.testing.assert_allclose(ours / scale, theirs / scale, rtol=0, atol=tolerance)


def exact_block_ids(mask: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The block ids that transformers' function should return. It sums 1 / size in f32, and for sizes such as 3 the
    floor() of the sum is one too low at some block boundaries. Assumes rows padded at the end, as in all tests here."""
    length = mask.shape[1]
    real = mask.sum(dim=1, keepdim=True)
    ids = torch.minimum(torch.arange(length) // size, real // size - 1)
    ids = torch.where((mask > 0) & (real >= size), ids, -1)
    live = torch.arange(length // size) < real // size
    return ids.int(), live.int()


@pytest.fixture(params=CASES, ids=lambda case: "-".join(map(str, case)))
def longt5(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Reference, int]:
    attention, radius, size, length, gated, tied = request.param
    if size & (size - 1):
        monkeypatch.setattr(modeling_longt5, "_make_global_fixed_block_ids", exact_block_ids)
    config = transformers.LongT5Config(
        **{**SMALL, "num_decoder_layers": 1},
        encoder_attention_type=attention,
        local_radius=radius,
        global_block_size=size,
        feed_forward_proj="gated-gelu" if gated else "relu",
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    model = transformers.LongT5ForConditionalGeneration(config).eval()
    if not tied:
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.shared.weight))
    randomise_weights(model).save_pretrained(tmp_path)
    return Reference(model, tmp_path), length


def test_logits_loss_gradients_and_tokens_equal_torch(longt5: tuple[Reference, int]) -> None:
    reference, length = longt5
    ids, valid, labels = random_batch(reference.vocab, length, rows=3, source=length)
    torch_batch = {
        "input_ids": torch.tensor(ids).long(),
        "attention_mask": torch.tensor(valid).long(),
        "labels": torch.tensor(labels).long(),
    }
    reference.model.zero_grad()
    theirs = reference.model(**torch_batch)
    theirs.loss.backward()
    pretrained = flaxen.load(reference.directory)
    decoder = np.pad(np.maximum(labels, 0)[:, :-1], ((0, 0), (1, 0)))
    close(pretrained.logits(ids, decoder, valid), theirs.logits.detach(), 2e-5)

    def loss(model: Any) -> Any:
        return model.loss(*map(jnp.asarray, (ids, labels, valid)))[0]

    ours, grads = jax.jit(jax.value_and_grad(loss))(pretrained.model)
    np.testing.assert_allclose(float(ours), theirs.loss.item(), rtol=1e-5)
    named = weightmap.save(grads, hf_t5.rows(pretrained.config))
    expected = {name: p.grad for name, p in reference.model.named_parameters()}
    assert named.keys() == expected.keys()
    for name, gradient in named.items():
        if expected[name] is None or not expected[name].any():  # there is only one key, or no row has global tokens
            np.testing.assert_allclose(gradient, 0.0, atol=1e-7)
        else:
            close(gradient, expected[name], 1e-4)

    prompts = [row[ok].tolist() for row, ok in zip(ids, valid)]
    for beams in (1, 4):
        tokens, _ = torch_generate(reference, prompts, max_new_tokens=8, num_beams=beams)
        ours = pretrained.generate(prompts, batch_size=3, max_new_tokens=8, num_beams=beams)
        assert [generated.tokens for generated in ours] == tokens


def test_checkpoint_round_trips_through_transformers(longt5: tuple[Reference, int], tmp_path: Path) -> None:
    reference, _ = longt5
    pretrained = flaxen.load(reference.directory)
    pretrained.save(tmp_path / "ours")
    torch_model = transformers.LongT5ForConditionalGeneration.from_pretrained(tmp_path / "ours")
    for name, tensor in reference.model.state_dict().items():
        assert torch.equal(torch_model.state_dict()[name], tensor), name
    reloaded = flaxen.load(tmp_path / "ours")
    assert reloaded.config == pretrained.config
    for name, leaf in leaves(reloaded.model).items():
        np.testing.assert_array_equal(leaf, leaves(pretrained.model)[name])


LONG = Config(
    vocab_size=50, d_model=16, d_head=4, d_ff=24, n_layers=2, n_decoder_layers=2, n_heads=4, n_buckets=8,
    max_distance=20, radius=7, global_block=4, dropout=0.0, family="longt5",
)  # fmt: skip


@pytest.mark.parametrize("attention", ["full", "local", "transient-global"])
def test_packed_rows_equal_separate_rows(attention: str) -> None:
    """Loss and all gradients of five pairs: one pair per row, and two or three per row."""
    model = initialise(T5(dataclasses.replace(LONG, attention=attention)), 0)
    draw = np.random.default_rng(0)
    pairs = [
        (draw.integers(2, 50, n).astype(np.int32), draw.integers(2, 50, m).astype(np.int32))
        for n, m in ((30, 9), (3, 1), (17, 12), (24, 4), (9, 7))
    ]

    def batch(rows: list[list[int]]) -> tuple[jax.Array, ...]:
        sides = []
        for side in (0, 1):
            width = max(sum(len(pairs[i][side]) for i in row) for row in rows) + 3
            ids, numbers = np.zeros((len(rows), width), np.int32), np.zeros((len(rows), width), np.int32)
            for r, row in enumerate(rows):
                tokens = np.concatenate([pairs[i][side] for i in row])
                ids[r, : len(tokens)] = tokens
                numbers[r, : len(tokens)] = np.repeat(np.arange(1, len(row) + 1), [len(pairs[i][side]) for i in row])
            sides.append((jnp.asarray(ids), jnp.asarray(numbers)))
        (ids, segments), (labels, target_segments) = sides
        return ids, jnp.where(target_segments > 0, labels, -1), segments, target_segments

    def loss(model: T5, ids: jax.Array, labels: jax.Array, segments: jax.Array, targets: jax.Array | None) -> jax.Array:
        return model.loss(ids, labels, segments if targets is not None else segments > 0, targets)[0]

    packed = batch([[0, 1], [2, 3, 4]])
    ids, labels, segments, _ = batch([[0], [1], [2], [3], [4]])
    value, grads = jax.jit(jax.value_and_grad(loss))(model, *packed)
    alone, alone_grads = jax.jit(jax.value_and_grad(loss))(model, ids, labels, segments, None)
    np.testing.assert_allclose(value, alone, rtol=1e-6)
    for name, gradient in leaves(grads).items():
        close(gradient, leaves(alone_grads)[name], 1e-5)


@pytest.mark.parametrize("attention", ["local", "transient-global"])
def test_padding_does_not_change_logits(attention: str) -> None:
    """Padding on either side. (In transformers, padding in front moves the blocks of global tokens.)"""
    pretrained = flaxen.create(dataclasses.replace(LONG, attention=attention), 1)
    ids, _, labels = random_batch(50, 3, rows=1, source=37)
    decoder = np.maximum(labels, 0)
    alone = pretrained.logits(ids, decoder)
    for before, after in ((0, 5), (6, 0), (9, 100)):
        padded = np.pad(ids, ((0, 0), (before, after)))
        valid = np.pad(np.ones_like(ids, bool), ((0, 0), (before, after)))
        close(pretrained.logits(padded, decoder, valid), alone, 1e-5)


def test_presets_have_the_published_sizes() -> None:
    base = PRESETS["long-t5-tglobal-base"]
    assert (base.d_model, base.d_ff, base.n_layers, base.n_heads, base.attention) == (
        768,
        2048,
        12,
        12,
        "transient-global",
    )
    assert (base.radius, base.global_block, base.family) == (127, 16, "longt5")
    assert PRESETS["long-t5-local-large"].attention == "local"


@pytest.mark.parametrize("attention", ["local", "transient-global"])
def test_bfloat16_is_close_to_float32(attention: str) -> None:
    """Runs the compiled program: XLA may compile a bf16 matmul and then have no kernel for it at run time."""
    ids, valid, labels = (jnp.asarray(a) for a in random_batch(50, 2, rows=2, source=100))
    results = []
    for compute in ("float32", "bfloat16"):
        model = initialise(T5(dataclasses.replace(LONG, attention=attention, compute=compute)), 0)
        results.append(jax.jit(jax.value_and_grad(lambda model: model.loss(ids, labels, valid)[0]))(model))
    (value, grads), (low, low_grads) = results
    np.testing.assert_allclose(low, value, rtol=1e-2)
    for name, gradient in leaves(grads).items():
        rounded = leaves(low_grads)[name]
        assert jnp.vdot(gradient, rounded) > 0.98 * jnp.linalg.norm(gradient) * jnp.linalg.norm(rounded), name


def test_saving_less_for_long_rows_gives_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    model = initialise(T5(dataclasses.replace(LONG, attention="transient-global")), 0)
    ids, valid, labels = (jnp.asarray(a) for a in random_batch(50, 2, rows=1, source=90))
    results = []
    for long, cached in ((2**22, 2**18), (16, 200)):
        monkeypatch.setattr(t5, "LONG", long)
        with hardware.compile_for(dataclasses.replace(hardware.CPU, activations=cached)):
            results.append(jax.jit(jax.value_and_grad(lambda model: model.loss(ids, labels, valid)[0]))(model))
    (value, grads), (long_value, long_grads) = results
    np.testing.assert_allclose(value, long_value, rtol=1e-6)
    for name, gradient in leaves(grads).items():
        close(gradient, leaves(long_grads)[name], 1e-5)


@pytest.mark.parametrize("attention", ["full", "local", "transient-global"])
def test_memory_is_linear_in_length(attention: str) -> None:
    """Temporary memory of the compiled gradient: no array of size [T, S] is stored, not even a mask."""
    model = T5(dataclasses.replace(LONG, attention=attention))

    def temporaries(length: int) -> int:
        ids, labels = (jax.ShapeDtypeStruct((1, n), jnp.int32) for n in (length, 8))
        gradient = jax.jit(lambda model, ids, labels: jax.grad(lambda model: model.loss(ids, labels)[0])(model))
        return gradient.lower(model, ids, labels).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(8192) < 2.2 * temporaries(4096)
