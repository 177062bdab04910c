"""ViT equals transformers' torch model: hidden states, gradients, image sizes, checkpoints."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from vision_models import close, gradients, make_vit, pixels, randomise_weights, same_gradients, saved

import flaxen
from flaxen.errors import InputError
from flaxen.hf import vit as hf_vit
from flaxen.hf import weightmap
from flaxen.models.vit import Config, ViT, bicubic
from flaxen.nn.param import initialise
from flaxen.tree import leaves

CASES: list[dict[str, Any]] = [
    {},
    {"qkv_bias": False, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-3},
    {"hidden_act": "gelu_new", "image_size": [32, 48], "patch_size": [8, 16], "num_channels": 3},
    {"hidden_act": "relu", "intermediate_size": 80, "num_attention_heads": 2, "pooler_output_size": 24},
]


@pytest.mark.parametrize("changes", CASES)
def test_states_and_gradients_equal_torch(changes: dict[str, Any], tmp_path: Path) -> None:
    reference = make_vit(tmp_path / "torch", **changes)
    height, width = reference.model.embeddings.patch_embeddings.image_size
    images = np.random.default_rng(1).normal(size=(3, 3, height, width)).astype(np.float32)
    theirs = reference.model(torch.tensor(images)).last_hidden_state
    model = flaxen.load(reference.directory).model
    close(jax.jit(model)(jnp.asarray(images)), theirs.detach(), 2e-5)

    weights = np.random.default_rng(2).normal(size=theirs.shape).astype(np.float32)
    (theirs * torch.tensor(weights)).sum().backward()
    grads = jax.jit(jax.grad(lambda model: jnp.sum(model(jnp.asarray(images)) * weights)))(model)
    expected = gradients(reference.model, tmp_path / "gradients")
    named = weightmap.save(grads, hf_vit.rows(model.config))
    same_gradients(named, expected)


def test_interpolated_positions_equal_torch(tmp_path: Path) -> None:
    reference = make_vit(tmp_path)
    model = flaxen.load(tmp_path).model
    bigger = pixels(2, 48)
    with pytest.raises(ValueError, match="expected images of 32 × 32 pixels, got 48 × 48"):
        model(jnp.asarray(bigger))
    config = dataclasses.replace(model.config, interpolate=True)
    flexible = jax.tree.unflatten(jax.tree.structure(ViT(config)), jax.tree.leaves(model))
    for images in (bigger, pixels(2, 40)[:, :, :24], pixels(1, 32)):
        theirs = reference.model(torch.tensor(images), interpolate_pos_encoding=True).last_hidden_state.detach()
        close(jax.jit(flexible)(jnp.asarray(images)), theirs, 2e-5)


def test_bicubic_is_the_identity_for_equal_sizes_and_sums_to_one() -> None:
    np.testing.assert_allclose(bicubic(7, 7), np.eye(7), atol=1e-6)
    np.testing.assert_allclose(bicubic(7, 19).sum(axis=1), 1.0, atol=1e-5)


def test_checkpoint_round_trips_through_transformers(tmp_path: Path) -> None:
    reference = make_vit(tmp_path / "theirs")
    flaxen.load(tmp_path / "theirs").save(tmp_path / "ours")
    loaded = transformers.ViTModel.from_pretrained(tmp_path / "ours").eval()
    for (name, a), (_, b) in zip(reference.model.state_dict().items(), loaded.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


def test_vit_loads_from_a_classifier(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.ViTConfig(**{**make_vit(tmp_path / "vit").model.config.to_dict(), "num_labels": 5})
    reference = saved(randomise_weights(transformers.ViTForImageClassification(config)), tmp_path / "classifier")
    images = pixels()
    theirs = reference.model.vit(torch.tensor(images)).last_hidden_state.detach()
    loaded = flaxen.load(tmp_path / "classifier")
    close(jax.jit(loaded.model)(jnp.asarray(images)), theirs, 2e-5)
    with pytest.raises(InputError, match="cannot generate text by itself"):
        loaded.generate(["a"])


@pytest.mark.parametrize("form", [{"scan": False}, {"remat": True}])
def test_scan_unroll_and_remat_agree(form: dict[str, bool]) -> None:
    config = Config(image_size=(16, 16), patch_size=(8, 8), d_model=16, d_ff=24, n_layers=3, n_heads=2, dropout=0.2)
    model = initialise(ViT(config), 0)
    images = jnp.asarray(pixels(2, 16))
    changed = jax.tree.unflatten(
        jax.tree.structure(ViT(dataclasses.replace(config, **form))),
        jax.tree.leaves(model),  # type: ignore[arg-type]
    )
    weights = np.random.default_rng(2).normal(size=(2, 5, 16)).astype(np.float32)
    gradient_of = jax.jit(jax.grad(lambda model: jnp.sum(model(images, jax.random.key(1)) * weights)))
    changed_gradients = leaves(gradient_of(changed))
    for name, gradient in leaves(gradient_of(model)).items():
        close(changed_gradients[name], gradient, 1e-5, floor=0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "mystery"}, "activation must be one of"),
        ({"rope_theta": 1.0}, "unknown field rope_theta=1.0"),
        ({"is_decoder": True}, "is_decoder=True is not supported"),
        ({"hidden_size": 30}, "multiple of n_heads"),
        ({"image_size": 4}, "image_size must be at least patch_size"),
    ],
)
def test_unsupported_config_is_rejected(change: dict[str, Any], message: str) -> None:
    json = {"model_type": "vit", "hidden_size": 32, "num_attention_heads": 4, **change}
    with pytest.raises(InputError, match=message):
        hf_vit.read_config(json, None)
