"""Checkpoints of T5 variants with the config.json of their authors: umT5, MADLAD-400, UL2, Chronos."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from conftest import GATED, SMALL, Reference, make_reference, random_batch, randomise_weights, torch_generate

import flaxen
from flaxen.errors import InputError

# Fields of config.json other than sizes. None means that the field is absent.
VARIANTS = {
    "madlad400": {"pad_token_id": 1, "eos_token_id": 2, "d_kv": 16, "feed_forward_proj": "gated-gelu",
                  "tie_word_embeddings": False},
    "ul2": {"feed_forward_proj": "gated-silu", "tie_word_embeddings": None, "scale_decoder_outputs": None},
    "chronos-t5": {"chronos_config": {"tokenizer_class": "MeanScaleUniformBins", "context_length": 512}},
}  # fmt: skip


def make_variant(name: str, head: bool, directory: Path) -> Reference:
    """Save a small model with this config.json, with an untied or a tied head."""
    torch.manual_seed(0)
    fields = VARIANTS[name]
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**{**SMALL, **fields})).eval()
    if head:
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.shared.weight))
    randomise_weights(model).save_pretrained(directory)
    path = directory / "config.json"
    # As transformers 4 wrote it: without the field in which transformers 5 stores the scaling.
    saved = {**json.loads(path.read_text()), **fields, "scale_decoder_outputs": None, "transformers_version": "4.23.1"}
    path.write_text(json.dumps({field: value for field, value in saved.items() if value is not None}))
    return Reference(transformers.T5ForConditionalGeneration.from_pretrained(directory).eval(), directory)


def torch_logits(reference: Reference, ids: np.ndarray, decoder: np.ndarray, valid: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        out = reference.model(
            input_ids=torch.tensor(ids).long(),
            attention_mask=torch.tensor(valid),
            decoder_input_ids=torch.tensor(decoder).long(),
        )
    return out.logits.numpy()


def close(ours: np.ndarray, theirs: np.ndarray) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5 * np.abs(theirs).max())


@pytest.mark.parametrize("head", [True, False], ids=["untied", "tied"])
@pytest.mark.parametrize("name", list(VARIANTS))
def test_logits_and_tokens_equal_transformers(name: str, head: bool, tmp_path: Path) -> None:
    reference = make_variant(name, head, tmp_path / "theirs")
    pretrained = flaxen.load(reference.directory)
    assert pretrained.config.tied is not head
    ids, valid, labels = random_batch(97)
    decoder = np.maximum(labels, 0)
    expected = torch_logits(reference, ids, decoder, valid)
    close(pretrained.logits(ids, decoder, valid), expected)
    eos = reference.model.config.eos_token_id
    prompts = [row[:n].tolist() for row, n in zip(ids, valid.sum(axis=1))]
    for options in ({"num_beams": 1}, {"num_beams": 3}):
        theirs, _ = torch_generate(reference, prompts, max_new_tokens=12, eos_token_id=eos, **options)
        ours = pretrained.generate(prompts, max_new_tokens=12, **options)
        assert [output.tokens for output in ours] == theirs
    pretrained.save(tmp_path / "ours")
    again = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "ours").eval()
    np.testing.assert_array_equal(torch_logits(Reference(again, tmp_path), ids, decoder, valid), expected)


def test_madlad_start_token_differs_from_padding(tmp_path: Path) -> None:
    config = flaxen.load(make_variant("madlad400", True, tmp_path).directory).config
    assert (config.pad_id, config.eos_ids, config.start_id) == (1, (2,), 0)


def test_umt5_in_googles_format_is_not_scaled(tmp_path: Path) -> None:
    """transformers 4 scales the hidden states of a umT5 only if config.json ties its head. transformers 5 always does,
    so that its logits are wrong by the factor d_model^-0.5 for these files."""
    reference = make_reference("umt5", tmp_path / "theirs")
    path = reference.directory / "config.json"
    fields = {"tie_word_embeddings": False, "transformers_version": "4.31.0.dev0", "scalable_attention": True}
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    pretrained = flaxen.load(reference.directory)
    assert (pretrained.config.tied, pretrained.config.scaled, pretrained.config.bias_per_layer) == (False, False, True)
    ids, valid, labels = random_batch(reference.vocab)
    decoder = np.maximum(labels, 0)
    close(
        pretrained.logits(ids, decoder, valid), torch_logits(reference, ids, decoder, valid) * SMALL["d_model"] ** 0.5
    )
    pretrained.save(tmp_path / "ours")
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["tie_word_embeddings"] is False
    assert flaxen.load(tmp_path / "ours").config == pretrained.config


def test_umt5_requires_a_position_bias_in_every_layer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    transformers.MT5ForConditionalGeneration(transformers.MT5Config(**{**SMALL, **GATED})).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "umt5"}))
    missing = r"missing tensor 'encoder\.block\.1\.layer\.0\.SelfAttention\.relative_attention_bias\.weight'"
    with pytest.raises(InputError, match=missing):
        flaxen.load(tmp_path)
