"""T5 equals transformers' torch model; and equivalent ways of computing it agree."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from conftest import Reference
from conftest import random_batch as numpy_batch
from flax import nnx

import flaxen
from flaxen.hf import t5 as hf_t5
from flaxen.hf import weightmap
from flaxen.models.t5 import PRESETS, T5, Config
from flaxen.models.t5_decoding import T5Decoder
from flaxen.nn.blockwise import Plan
from flaxen.nn.param import initialise
from flaxen.nn.position import relative_bucket
from flaxen.tree import leaves, size

TINY = Config(
    vocab_size=50,
    d_model=16,
    d_head=4,
    d_ff=24,
    n_layers=3,
    n_decoder_layers=2,
    n_heads=4,
    n_buckets=8,
    max_distance=20,
)
TINY_UMT5 = dataclasses.replace(TINY, bias_per_layer=True, family="umt5")


def random_batch(*arguments: int, **sizes: int) -> tuple[jax.Array, ...]:
    return tuple(jnp.asarray(a) for a in numpy_batch(*arguments, **sizes))


def close(ours: np.ndarray, theirs: np.ndarray, tolerance: float) -> None:
    """Assert equality within `tolerance` times the largest value of `theirs`."""
    ours, theirs = np.asarray(ours, np.float32), np.asarray(theirs, np.float32)
    assert ours.shape == theirs.shape
    scale = np.abs(theirs).max()
    np.testing.assert_allclose(ours / scale, theirs / scale, rtol=0, atol=tolerance)


def change(model: T5, **fields: object) -> T5:
    """Rebuild the model with the same weights and another configuration."""
    config = dataclasses.replace(model.config, **fields)
    return jax.tree.unflatten(jax.tree.structure(T5(config)), jax.tree.leaves(model))


@pytest.mark.optimised
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_logits_equal_torch(reference: Reference, seed: int) -> None:
    ids, valid, labels = random_batch(reference.vocab, seed)
    decoder = np.maximum(labels, 0)
    theirs = reference.model(
        input_ids=torch.tensor(np.asarray(ids)).long(),
        attention_mask=torch.tensor(np.asarray(valid)),
        decoder_input_ids=torch.tensor(np.asarray(decoder)).long(),
    ).logits.detach()
    close(flaxen.load(reference.directory).logits(ids, decoder, valid), theirs, 2e-5)


@pytest.mark.optimised
def test_loss_and_every_gradient_equal_torch(reference: Reference) -> None:
    ids, valid, labels = random_batch(reference.vocab, 3)
    reference.model.zero_grad()
    theirs = reference.model(
        input_ids=torch.tensor(np.asarray(ids)).long(),
        attention_mask=torch.tensor(np.asarray(valid)),
        labels=torch.tensor(np.asarray(labels)).long(),
    ).loss
    theirs.backward()
    model = flaxen.load(reference.directory).model
    ours, grads = jax.jit(jax.value_and_grad(lambda model: model.loss(ids, labels, valid)[0]))(model)
    np.testing.assert_allclose(float(ours), theirs.item(), rtol=1e-5)
    named = weightmap.save(grads, hf_t5.rows(model.config))
    expected = {name: p.grad for name, p in reference.model.named_parameters() if p.grad is not None}
    assert named.keys() == expected.keys()
    for name, gradient in named.items():
        close(gradient, expected[name], 1e-4)


def test_logits_equal_torch_over_several_blocks(t5_reference: Reference) -> None:
    """700 input and 200 output tokens: several blocks of queries and keys, distances beyond max_distance."""
    ids, valid, labels = random_batch(t5_reference.vocab, 4, rows=2, source=700, target=200)
    decoder = np.maximum(labels, 0)
    theirs = t5_reference.model(
        input_ids=torch.tensor(np.asarray(ids)).long(),
        attention_mask=torch.tensor(np.asarray(valid)),
        decoder_input_ids=torch.tensor(np.asarray(decoder)).long(),
    ).logits.detach()
    close(flaxen.load(t5_reference.directory).logits(ids, decoder, valid), theirs, 2e-5)


@functools.cache
def scanned(config: Config) -> tuple[Callable[[T5], tuple[jax.Array, T5]], T5, jax.Array, T5]:
    """A function for loss and gradient with dropout, a scanned model, and the function's values for it."""
    model = initialise(T5(dataclasses.replace(config, dropout=0.2)), 0)
    ids, valid, labels = random_batch(50)

    def loss(model: Any) -> Any:
        return model.loss(ids, labels, valid, key=jax.random.key(1))[0]

    value_and_grad = jax.jit(jax.value_and_grad(loss))
    return value_and_grad, model, *value_and_grad(model)


@pytest.mark.parametrize("config", [TINY, TINY_UMT5], ids=["t5", "umt5"])
@pytest.mark.parametrize("form", [{"scan": False}, {"scan": False, "remat": True}])
def test_scan_unroll_and_remat_agree(config: Config, form: dict[str, bool]) -> None:
    """With dropout too: a layer's key does not depend on how the stack is run."""
    value_and_grad, model, value, grads = scanned(config)
    other_value, other_grads = value_and_grad(change(model, **form))
    np.testing.assert_allclose(value, other_value, rtol=1e-6)
    for name, gradient in leaves(grads).items():
        close(leaves(other_grads)[name], gradient, 1e-5)


def test_padding_does_not_change_logits(t5_reference: Reference) -> None:
    """A row of a padded batch has the same logits as alone."""
    ids, valid, labels = random_batch(t5_reference.vocab, 5)
    decoder = np.maximum(labels, 0)
    pretrained = flaxen.load(t5_reference.directory)
    together = pretrained.logits(ids, decoder, valid)
    for row, n in enumerate(valid.sum(axis=1)):
        close(pretrained.logits(ids[row : row + 1, :n], decoder[row : row + 1])[0], together[row], 1e-5)


@pytest.mark.parametrize("config", [TINY, TINY_UMT5], ids=["t5", "umt5"])
def test_cached_decoding_equals_full_decoding(config: Config) -> None:
    """Three beams that are reordered at every step have the logits of their full histories."""
    model = initialise(T5(config), 1)
    ids, valid, _ = random_batch(50, rows=2)
    draw = np.random.default_rng(0)
    decoder = T5Decoder(model)
    tokens, state = decoder.start((jnp.asarray(ids), jnp.asarray(valid)), 8, 3, reorder=True)
    histories = np.asarray(tokens)
    step, full = jax.jit(decoder.step), jax.jit(model.logits)
    for n in range(6):
        logits, state = step(jnp.asarray(histories[:, :, -1]), state)
        padded = jnp.asarray(
            np.pad(histories, ((0, 0), (0, 0), (0, 5 - n)))
        )  # padding does not matter: the decoder is causal
        for beam in range(3):
            close(logits[:, beam], full(ids, padded[:, beam], valid)[:, n], 1e-5)
        order = draw.integers(0, 3, (2, 3))
        state = decoder.select(state, jnp.asarray(order))
        histories = np.take_along_axis(histories, order[:, :, None], axis=1)
        histories = np.concatenate([histories, draw.integers(2, 50, (2, 3, 1))], axis=2)


def test_cache_with_and_without_reordering_agree() -> None:
    """Both cache layouts give the same logits if beams are never reordered."""
    model = initialise(T5(TINY), 1)
    ids, valid, _ = random_batch(50, rows=2)
    decoder, draw = T5Decoder(model), np.random.default_rng(0)
    (tokens, shared), (_, separate) = (decoder.start((ids, valid), 8, 3, reorder=reorder) for reorder in (True, False))
    tokens, step = tokens[:, :, 0], jax.jit(decoder.step)
    for _ in range(4):
        (logits, shared), (expected, separate) = step(tokens, shared), step(tokens, separate)
        close(logits, expected, 1e-5)
        tokens = jnp.asarray(draw.integers(2, 50, (2, 3)), jnp.int32)


def test_bfloat16_is_close_to_float32() -> None:
    model = initialise(T5(TINY), 0)
    ids, valid, labels = random_batch(50)

    def loss(model: Any) -> Any:
        return model.loss(ids, labels, valid)[0]

    value_and_grad = jax.jit(jax.value_and_grad(loss))
    value, grads = value_and_grad(model)
    low_value, low_grads = value_and_grad(change(model, compute="bfloat16"))
    np.testing.assert_allclose(low_value, value, rtol=1e-2)
    flat, low = (jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(g)]) for g in (grads, low_grads))
    assert low.dtype == jnp.float32
    assert jnp.vdot(flat, low) / (jnp.linalg.norm(flat) * jnp.linalg.norm(low)) > 0.999


def test_dropout_depends_only_on_its_key() -> None:
    model = initialise(T5(dataclasses.replace(TINY, dropout=0.3)), 0)
    ids, valid, labels = random_batch(50)
    loss = jax.jit(lambda key: model.loss(ids, labels, valid, key=key)[0])
    assert loss(jax.random.key(0)) == loss(jax.random.key(0)) != loss(jax.random.key(1))
    assert loss(None) == loss(None) != loss(jax.random.key(0))


def test_decoder_is_causal() -> None:
    """By the Jacobian: hidden states at t depend on decoder embeddings up to t and no further."""
    model = initialise(T5(TINY), 2)
    ids, _, _ = random_batch(50, rows=1)
    source = jax.jit(model.encode)(ids)

    def hidden(x: jax.Array) -> jax.Array:
        return model.decoder(x, None, (source, Plan()), None)[0].sum(axis=-1)

    jacobian = jax.jit(jax.jacobian(hidden))(model.embedding(jnp.asarray([[0, 5, 6, 7, 8, 9]])))[:, 0]
    reach = np.abs(jacobian).sum(axis=-1) > 0
    np.testing.assert_array_equal(reach, np.tril(np.ones((6, 6), bool)))


@pytest.mark.parametrize("bidirectional", [True, False])
def test_buckets_equal_transformers(bidirectional: bool) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = np.arange(-700, 701)
    for n, far in ((32, 128), (8, 20), (16, 500)):
        theirs = T5Attention._relative_position_bucket(torch.tensor(distance), bidirectional, n, far)
        np.testing.assert_array_equal(relative_bucket(jnp.asarray(distance), bidirectional, n, far), theirs)


# Parameter counts that transformers computes from the published configurations.
@pytest.mark.parametrize(
    ("name", "millions"),
    [("t5-small", 60.5), ("t5-base", 222.9), ("t5-large", 737.7), ("t5-3b", 2851.6), ("t5-11b", 11307.3),
     ("t5-v1_1-small", 77.0),
     ("t5-v1_1-base", 247.6), ("flan-t5-xl", 2849.8), ("mt5-small", 300.2), ("mt5-base", 582.4), ("umt5-small", 306.6),
     ("byt5-small", 299.6),
     ("byt5-base", 581.7), ("byt5-large", 1228.2)],
)  # fmt: skip
def test_presets_have_their_published_size(name: str, millions: float) -> None:
    assert size(T5(PRESETS[name])) / 1e6 == pytest.approx(millions, abs=0.06)


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"n_heads": 0}, "n_heads"), ({"activation": "mystery"}, "activation"), ({"n_buckets": 6}, "n_buckets"),
     ({"max_distance": 4}, "max_distance"), ({"compute": "float16"}, "compute"), ({"start_id": 50}, "start_id"),
     ({"bias_per_layer": True, "attention": "local"}, "bias_per_layer"), ({"family": "umt5"}, "bias_per_layer")],
)  # fmt: skip
def test_invalid_config_is_rejected(fields: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(TINY, **fields)


def test_new_model_is_abstract_and_a_pytree() -> None:
    model = T5(PRESETS["t5-11b"])
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(model))
    assert isinstance(jax.tree.map(lambda leaf: leaf, model), nnx.Module)
