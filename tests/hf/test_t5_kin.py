"""Checkpoints that are nearly T5, as their authors wrote them: umT5, MADLAD-400, UL2, Chronos."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from conftest import GATED, SMALL, Reference, make_reference, random_batch, shaken, torch_generate

import flaxen
from flaxen.errors import InputError

# What config.json says, beside sizes. None is a field that it leaves out.
STYLES = {
    "madlad400": {"pad_token_id": 1, "eos_token_id": 2, "d_kv": 16, "feed_forward_proj": "gated-gelu",
                  "tie_word_embeddings": False},
    "ul2": {"feed_forward_proj": "gated-silu", "tie_word_embeddings": None, "scale_decoder_outputs": None},
    "chronos-t5": {"chronos_config": {"tokenizer_class": "MeanScaleUniformBins", "context_length": 512}},
}  # fmt: skip


def styled(name: str, head: bool, directory: Path) -> Reference:
    """A small model in this style, with a head of its own or without."""
    torch.manual_seed(0)
    says = STYLES[name]
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**{**SMALL, **says})).eval()
    if head:
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.shared.weight))
    shaken(model).save_pretrained(directory)
    path = directory / "config.json"
    # As transformers 4 wrote it: without the field in which version 5 keeps the scale.
    fields = {**json.loads(path.read_text()), **says, "scale_decoder_outputs": None, "transformers_version": "4.23.1"}
    path.write_text(json.dumps({field: value for field, value in fields.items() if value is not None}))
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
@pytest.mark.parametrize("name", list(STYLES))
def test_logits_and_tokens_equal_transformers(name: str, head: bool, tmp_path: Path) -> None:
    reference = styled(name, head, tmp_path / "theirs")
    one = flaxen.load(reference.directory)
    assert one.config.tied is not head
    ids, valid, labels = random_batch(97)
    decoder = np.maximum(labels, 0)
    expected = torch_logits(reference, ids, decoder, valid)
    close(one.logits(ids, decoder, valid), expected)
    eos = reference.model.config.eos_token_id
    prompts = [row[:n].tolist() for row, n in zip(ids, valid.sum(axis=1))]
    for options in ({"num_beams": 1}, {"num_beams": 3}):
        theirs, _ = torch_generate(reference, prompts, max_new_tokens=12, eos_token_id=eos, **options)
        ours = one.generate(prompts, max_new_tokens=12, **options)
        assert [output.tokens for output in ours] == theirs
    one.save(tmp_path / "ours")
    again = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "ours").eval()
    np.testing.assert_array_equal(torch_logits(Reference(again, tmp_path), ids, decoder, valid), expected)


def test_madlad_starts_with_another_token_than_padding(tmp_path: Path) -> None:
    config = flaxen.load(styled("madlad400", True, tmp_path).directory).config
    assert (config.pad_id, config.eos_ids, config.start_id) == (1, (2,), 0)


def test_umt5_as_google_wrote_it_is_not_scaled(tmp_path: Path) -> None:
    """transformers 4 scales the hidden states of a umT5 only if config.json ties its head; version 5 does so always,
    and is wrong by the factor d_model^-0.5 for these files."""
    reference = make_reference("umt5", tmp_path / "theirs")
    path = reference.directory / "config.json"
    fields = {"tie_word_embeddings": False, "transformers_version": "4.31.0.dev0", "scalable_attention": True}
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    one = flaxen.load(reference.directory)
    assert (one.config.tied, one.config.scaled, one.config.bias_per_layer) == (False, False, True)
    ids, valid, labels = random_batch(reference.vocab)
    decoder = np.maximum(labels, 0)
    close(one.logits(ids, decoder, valid), torch_logits(reference, ids, decoder, valid) * SMALL["d_model"] ** 0.5)
    one.save(tmp_path / "ours")
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["tie_word_embeddings"] is False
    assert flaxen.load(tmp_path / "ours").config == one.config


def test_umt5_needs_the_bias_of_every_layer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    transformers.MT5ForConditionalGeneration(transformers.MT5Config(**{**SMALL, **GATED})).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "umt5"}))
    missing = r"missing tensor 'encoder\.block\.1\.layer\.0\.SelfAttention\.relative_attention_bias\.weight'"
    with pytest.raises(InputError, match=missing):
        flaxen.load(tmp_path)
