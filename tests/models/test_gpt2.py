"""GPT-2 equals transformers' torch model: logits, gradients, generation, cross-attention."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file
from vision_models import close, gradients, make_gpt2, same_gradients

import flaxen
from flaxen.errors import InputError
from flaxen.hf import gpt2 as hf_gpt2
from flaxen.hf import weightmap
from flaxen.models.gpt2 import GPT2, Config
from flaxen.nn.param import initialise
from flaxen.tree import leaves

CASES: list[dict[str, Any]] = [
    {},
    {"n_inner": 40, "activation_function": "relu", "layer_norm_epsilon": 1e-3},
    {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True, "activation_function": "gelu"},
    {"scale_attn_weights": False, "tie_word_embeddings": False, "n_layer": 3},
]


def tokens(rows: int = 3, length: int = 11, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(2, 97, (rows, length)).astype(np.int32)


@pytest.mark.parametrize("changes", CASES)
def test_logits_loss_and_gradients_equal_torch(changes: dict[str, Any], tmp_path: Path) -> None:
    reference = make_gpt2(tmp_path / "torch", **changes)
    ids = tokens()
    out = reference.model(torch.tensor(ids).long(), labels=torch.tensor(ids).long())
    loaded = flaxen.load(reference.directory)
    close(loaded.logits(ids), out.logits.detach(), 2e-5)

    out.loss.backward()
    inputs, labels = jnp.asarray(ids[:, :-1]), jnp.asarray(ids[:, 1:])
    loss, grads = jax.jit(jax.value_and_grad(lambda model: model.loss(inputs, labels)[0]))(loaded.model)
    np.testing.assert_allclose(float(loss), out.loss.item(), rtol=1e-5)
    expected = gradients(reference.model, tmp_path / "gradients")
    named = weightmap.save(grads, hf_gpt2.rows(loaded.config))
    same_gradients(named, expected)


def test_cross_attention_equals_torch(tmp_path: Path) -> None:
    reference = make_gpt2(tmp_path, add_cross_attention=True, scale_attn_by_inverse_layer_idx=True)
    ids = tokens()
    source = np.random.default_rng(3).normal(size=(3, 7, 32)).astype(np.float32)
    theirs = reference.model(torch.tensor(ids).long(), encoder_hidden_states=torch.tensor(source)).logits
    model = flaxen.load(tmp_path).model
    close(jax.jit(model.logits)(jnp.asarray(ids), jnp.asarray(source)), theirs.detach(), 2e-5)


def torch_continuations(reference: Any, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    """Torch's continuation of each prompt, generated without padding, one prompt at a time."""
    continuations = []
    for prompt in prompts:
        out = reference.model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)).long(), do_sample=False, **options
        )
        new = out[:, len(prompt) :].tolist()
        for row in new:
            end = next((i + 1 for i, token in enumerate(row) if token == 1), len(row))
            continuations.append(row[:end])
    return continuations


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 4},
        {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 2.0, "early_stopping": True},
        {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2},
        {"num_beams": 2, "no_repeat_ngram_size": 3, "min_new_tokens": 6},
    ],
)
def test_continuations_equal_torch(options: dict[str, Any], tmp_path: Path) -> None:
    """Prompts of different lengths in one left-padded batch are continued as if each were alone."""
    reference = make_gpt2(tmp_path, scale_attn_by_inverse_layer_idx=True)
    prompts = [tokens(1, n, n)[0].tolist() for n in (1, 2, 5, 17, 9)]
    ours = flaxen.load(tmp_path).generate(prompts, max_new_tokens=12, **options)
    assert [output.tokens for output in ours] == torch_continuations(reference, prompts, max_new_tokens=12, **options)


def test_generated_logprobs_equal_the_full_forward_pass(tmp_path: Path) -> None:
    """Cached decoding equals full decoding, and left padding changes nothing."""
    make_gpt2(tmp_path)
    loaded = flaxen.load(tmp_path)
    prompts = [tokens(1, n, n)[0].tolist() for n in (3, 10)]
    for generated in loaded.generate(prompts, max_new_tokens=9, do_sample=True, seed=3):
        ids = [*prompts[generated.index], *generated.tokens]
        logits = loaded.logits([ids])[0]
        logprobs = jax.nn.log_softmax(logits)[np.arange(len(ids) - 1), ids[1:]]
        np.testing.assert_allclose(generated.logprobs, logprobs[len(prompts[generated.index]) - 1 :], atol=1e-4)
    padded = np.array([[0] * 7 + prompts[0], prompts[1]])
    valid = np.arange(10) >= np.array([[7], [0]])
    close(loaded.logits(padded, valid=valid)[0, 7:], loaded.logits([prompts[0]])[0], 1e-5)


def test_sampling_does_not_depend_on_the_batch(tmp_path: Path) -> None:
    make_gpt2(tmp_path)
    loaded = flaxen.load(tmp_path)
    prompts = [tokens(1, n, n)[0].tolist() for n in (3, 30, 10)]
    together = loaded.generate(prompts, max_new_tokens=8, do_sample=True, num_return_sequences=2, seed=5)
    alone = loaded.generate(prompts, batch_size=1, max_new_tokens=8, do_sample=True, num_return_sequences=2, seed=5)
    assert [generated.tokens for generated in together] == [generated.tokens for generated in alone]


def test_empty_prompt_begins_with_the_start_token(tmp_path: Path) -> None:
    make_gpt2(tmp_path)
    loaded = flaxen.load(tmp_path)
    assert loaded.generate([[]], max_new_tokens=4)[0].tokens == loaded.generate([[1]], max_new_tokens=4)[0].tokens


def test_more_tokens_than_positions_are_rejected(tmp_path: Path) -> None:
    make_gpt2(tmp_path)
    loaded = flaxen.load(tmp_path)
    with pytest.raises(
        InputError, match=r"prompt 1 has 50 tokens, which together with max_new_tokens=20 .* 64 positions"
    ):
        loaded.generate([[2], [3] * 50], max_new_tokens=20)


def test_checkpoint_round_trips_through_transformers_and_loads_without_prefix(tmp_path: Path) -> None:
    reference = make_gpt2(tmp_path / "theirs")
    loaded = flaxen.load(tmp_path / "theirs")
    loaded.save(tmp_path / "ours")
    saved = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "ours").eval()
    for (name, a), (_, b) in zip(reference.model.state_dict().items(), saved.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
    # The hub's gpt2 has no prefix in its tensor names, and contains attention masks.
    plain = {
        name.removeprefix("transformer."): t for name, t in load_file(tmp_path / "theirs/model.safetensors").items()
    }
    plain |= {"h.0.attn.bias": np.ones((1, 1, 4, 4), np.float32), "h.0.attn.masked_bias": np.zeros((), np.float32)}
    save_file(plain, tmp_path / "theirs/model.safetensors")
    for path, leaf in leaves(flaxen.load(tmp_path / "theirs").model).items():
        np.testing.assert_array_equal(leaf, leaves(loaded.model)[path])


def test_model_is_causal() -> None:
    config = Config(vocab_size=20, n_positions=8, d_model=8, d_ff=16, n_layers=2, n_heads=2, pad_id=0, start_id=0)
    model = initialise(GPT2(config), 0)
    ids = jnp.arange(6)[None]
    hidden = jax.jit(model)(ids)
    changed = jax.jit(model)(ids.at[0, 4].set(9))
    np.testing.assert_array_equal(hidden[:, :4], changed[:, :4])
    assert not np.allclose(hidden[:, 4:], changed[:, 4:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation_function": "mystery"}, "activation must be one of"),
        ({"n_head": 5}, "multiple of n_heads"),
        ({"n_layers": 3}, "unknown field n_layers=3.*n_layer"),
        ({"cross_attention_hidden_size": 64}, "cross_attention_hidden_size=64 is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_unsupported_config_is_rejected(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        hf_gpt2.read_config({"model_type": "gpt2", "n_embd": 32, "n_head": 4, **change}, None)
