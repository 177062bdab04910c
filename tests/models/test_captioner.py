"""The ViT-GPT-2 captioner equals transformers' VisionEncoderDecoderModel."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from vision_models import close, gradients, make_pair, pixels, same_gradients

import flaxen
from flaxen.errors import InputError
from flaxen.hf import captioner as hf_captioner
from flaxen.hf import weightmap

CASES: list[dict[str, Any]] = [
    {},
    {"width": 24},
    {"width": 48, "scale_attn_by_inverse_layer_idx": True, "n_inner": 40, "activation_function": "relu"},
]


def labels(rows: int = 3, length: int = 9) -> np.ndarray:
    """Captions of different lengths; each ends with eos, and labels after it are ignored (-100)."""
    draw = np.random.default_rng(4)
    ids = draw.integers(2, 97, (rows, length)).astype(np.int32)
    for row, n in enumerate(draw.integers(2, length, rows)):
        ids[row, n], ids[row, n + 1 :] = 1, -100
    return ids


@pytest.mark.optimised
@pytest.mark.parametrize("changes", CASES)
def test_logits_loss_and_gradients_equal_torch(changes: dict[str, Any], tmp_path: Path) -> None:
    """The loss equals that of VisionEncoderDecoderModel with labels, which shifts them by one."""
    reference = make_pair(tmp_path / "torch", **changes)
    images, captions = pixels(), labels()
    out = reference.model(torch.tensor(images), labels=torch.tensor(captions).long())
    loaded = flaxen.load(reference.directory)
    filled = np.where(captions < 0, 1, captions)
    shifted = np.concatenate([np.full((3, 1), 1), filled[:, :-1]], axis=1)
    close(loaded.logits(images, shifted), out.logits.detach(), 2e-5)

    out.loss.backward()

    def loss(model: Any) -> Any:
        return model.loss(jnp.asarray(images), jnp.asarray(captions))[0]

    value, grads = jax.jit(jax.value_and_grad(loss))(loaded.model)
    np.testing.assert_allclose(float(value), out.loss.item(), rtol=1e-5)
    expected = gradients(reference.model, tmp_path / "gradients")
    named = weightmap.save(grads, hf_captioner.rows(loaded.config))
    same_gradients(named, expected)


@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 4}, {"num_beams": 3, "num_return_sequences": 3, "length_penalty": 0.3}]
)
@pytest.mark.parametrize("changes", CASES[1:])
def test_captions_equal_torch(changes: dict[str, Any], options: dict[str, Any], tmp_path: Path) -> None:
    reference = make_pair(tmp_path, **changes)
    images = pixels(5)
    theirs = reference.model.generate(torch.tensor(images), do_sample=False, max_new_tokens=14, **options)
    ours = flaxen.load(tmp_path).generate(images, batch_size=4, max_new_tokens=14, **options)
    for caption, row in zip(ours, theirs[:, 1:].tolist(), strict=True):
        end = next((i + 1 for i, token in enumerate(row) if token == 1), len(row))
        assert caption.tokens == row[:end]


def test_generated_logprobs_equal_the_full_forward_pass(tmp_path: Path) -> None:
    make_pair(tmp_path, width=24)
    loaded, images = flaxen.load(tmp_path), pixels(3)
    for caption in loaded.generate(images, max_new_tokens=9, num_beams=3):
        logits = loaded.logits(images[caption.index : caption.index + 1], [[1, *caption.tokens[:-1]]])[0]
        logprobs = jax.nn.log_softmax(logits)[np.arange(len(caption.tokens)), caption.tokens]
        np.testing.assert_allclose(caption.logprobs, logprobs, atol=1e-4)


@pytest.mark.parametrize("changes", CASES)
def test_checkpoint_round_trips_through_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    reference = make_pair(tmp_path / "theirs", **changes)
    flaxen.load(tmp_path / "theirs").save(tmp_path / "ours")
    saved = transformers.VisionEncoderDecoderModel.from_pretrained(tmp_path / "ours").eval()
    for (name, a), (_, b) in zip(reference.model.state_dict().items(), saved.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
    images = torch.tensor(pixels())
    assert torch.equal(
        reference.model.generate(images, max_new_tokens=8, do_sample=False),
        saved.generate(images, max_new_tokens=8, do_sample=False),
    )


def test_other_encoder_architectures_are_rejected() -> None:
    with pytest.raises(InputError, match="the model_type of the encoder must be 'vit', got 'swin'"):
        hf_captioner.read_config({"encoder": {"model_type": "swin"}, "decoder": {"model_type": "gpt2"}}, None)


def test_pixels_of_a_wrong_shape_are_rejected(tmp_path: Path) -> None:
    make_pair(tmp_path)
    loaded = flaxen.load(tmp_path)
    with pytest.raises(InputError, match=r"expected pixels of shape \(images, 3, 32, 32\), got \(2, 3, 16, 16\)"):
        loaded.generate(pixels(2, 16))
    with pytest.raises(InputError, match=r"no preprocessor_config\.json"):
        loaded.generate(["a.jpg"])
