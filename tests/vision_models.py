"""Small random ViTs, GPT-2s and captioners of both, in torch and on disk."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from conftest import Reference

from flaxen.hf.safetensors_files import Safetensors

VIT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 32,
    "patch_size": 8, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
GPT2 = {
    "vocab_size": 97, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 1,
}  # fmt: skip


def randomise_weights(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """Randomise biases and norms of a model and enlarge its other weights, so that its outputs vary."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and "weight" in name:
                parameter.copy_(1 + 0.1 * torch.randn_like(parameter))
            elif parameter.ndim == 1:
                parameter.copy_(0.1 * torch.randn_like(parameter))
            elif "wte" in name:
                parameter.mul_(10.0)
            else:
                parameter.mul_(8.0)
    return model.eval()


def saved(model: transformers.PreTrainedModel, directory: Path) -> Reference:
    model.save_pretrained(directory)
    return Reference(model, directory)


def make_vit(directory: Path, seed: int = 0, **changes: Any) -> Reference:
    torch.manual_seed(seed)
    return saved(randomise_weights(transformers.ViTModel(transformers.ViTConfig(**VIT | changes))), directory)


def make_gpt2(directory: Path, seed: int = 0, **changes: Any) -> Reference:
    torch.manual_seed(seed)
    return saved(randomise_weights(transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2 | changes))), directory)


def make_pair(directory: Path, seed: int = 0, width: int = 32, **decoder: Any) -> Reference:
    """Save a random captioner whose encoder has width `width`."""
    torch.manual_seed(seed)
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        transformers.ViTConfig(**VIT | {"hidden_size": width}), transformers.GPT2Config(**GPT2 | decoder)
    )
    config.decoder_start_token_id = config.pad_token_id = config.eos_token_id = 1
    model = randomise_weights(transformers.VisionEncoderDecoderModel(config))
    model.generation_config.update(decoder_start_token_id=1, pad_token_id=1, eos_token_id=1)
    return saved(model, directory)


def gradients(model: transformers.PreTrainedModel, directory: Path) -> dict[str, np.ndarray]:
    """The gradients of a torch model by their names in its checkpoint, which differ from those in memory.

    They are saved as the parameters of a copy, so that transformers maps the names.
    """
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for target, parameter in zip(copied.parameters(), model.parameters(), strict=True):
            target.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    copied.save_pretrained(directory)
    tensors = Safetensors(directory)
    return {name: np.array(tensors[name]) for name in tensors}


def pixels(rows: int = 3, size: int = 32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, 3, size, size)).astype(np.float32)


def close(ours: Any, theirs: Any, tolerance: float, floor: float = 1e-20) -> None:
    """Assert equality within `tolerance` times the largest value of `theirs`, or times `floor` if that is larger."""
    ours, theirs = np.asarray(ours, np.float32), np.asarray(theirs, np.float32)
    assert ours.shape == theirs.shape
    scale = max(np.abs(theirs).max(), floor)
    np.testing.assert_allclose(ours / scale, theirs / scale, rtol=0, atol=tolerance)


def same_gradients(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    """Assert that each gradient is equal within 1e-4 of its largest value.

    Gradients of key biases are 0 in theory and rounding noise in practice, so biases have a larger tolerance.
    """
    assert ours.keys() == theirs.keys()
    floor = 1e-2 * max(np.abs(gradient).max() for gradient in theirs.values())
    for name, gradient in ours.items():
        close(gradient, theirs[name], 1e-4, floor if name.endswith("bias") else 1e-20)
