"""Reading and writing transformers' T5 checkpoints: exact round trips, and complete error reports."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import transformers
from conftest import Reference, make_reference, random_batch
from safetensors.numpy import load_file, save_file

import flaxen
from flaxen.errors import InputError
from flaxen.hf import t5, weightmap
from flaxen.hf.tensors import InMemory
from flaxen.models.t5 import PRESETS, T5, Config
from flaxen.tree import leaves


@pytest.fixture
def copy(t5_reference: Reference, tmp_path: Path) -> Path:
    """A checkpoint that a test may modify."""
    shutil.copytree(t5_reference.directory, tmp_path / "copy")
    return tmp_path / "copy"


def edit_config(directory: Path, **fields: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def torch_logits(model: torch.nn.Module, ids: np.ndarray, decoder: np.ndarray, valid: np.ndarray) -> np.ndarray:
    out = model(
        input_ids=torch.tensor(ids).long(),
        attention_mask=torch.tensor(valid),
        decoder_input_ids=torch.tensor(decoder).long(),
    )
    return out.logits.detach().numpy()


def test_saved_checkpoint_loads_in_transformers_with_equal_logits(reference: Reference, tmp_path: Path) -> None:
    flaxen.load(reference.directory).save(tmp_path / "saved")
    kind = type(reference.model)
    again = kind.from_pretrained(tmp_path / "saved").eval()
    ids, valid, labels = random_batch(reference.vocab)
    decoder = np.maximum(labels, 0)
    expected = torch_logits(reference.model, ids, decoder, valid)
    np.testing.assert_array_equal(torch_logits(again, ids, decoder, valid), expected)
    auto = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "saved")
    assert type(auto) is kind


def test_round_trip_is_exact(reference: Reference, tmp_path: Path) -> None:
    pretrained = flaxen.load(reference.directory)
    pretrained.save(tmp_path / "saved", shard_bytes=20_000)  # in shards
    again = flaxen.load(tmp_path / "saved")
    assert pretrained.config == again.config
    for name, leaf in leaves(pretrained.model).items():
        np.testing.assert_array_equal(leaf, leaves(again.model)[name])


def test_saved_tensors_equal_the_file(reference: Reference) -> None:
    tensors = load_file(reference.directory / "model.safetensors")
    pretrained = flaxen.load(reference.directory)
    ours = weightmap.save(pretrained.model, t5.rows(pretrained.config))
    assert ours.keys() == tensors.keys()
    for name, array in tensors.items():
        np.testing.assert_array_equal(ours[name], array)


def test_head_tied_by_transformers_5_stays_unscaled(tmp_path: Path) -> None:
    """transformers 5 saves a new T5 1.1 model without a head, and does not scale it."""
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, decoder_start_token_id=0,
        feed_forward_proj="gated-gelu", tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path / "theirs")
    pretrained = flaxen.load(tmp_path / "theirs")
    assert (pretrained.config.tied, pretrained.config.scaled) == (True, False)
    ids, valid, labels = random_batch(97)
    expected = torch_logits(model, ids, np.maximum(labels, 0), valid)
    np.testing.assert_allclose(
        pretrained.logits(ids, np.maximum(labels, 0), valid), expected, atol=2e-5 * np.abs(expected).max()
    )
    pretrained.save(tmp_path / "ours")
    # transformers 4 scales the inputs of a head that config.json calls tied: so it is saved separately as untied.
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["tie_word_embeddings"] is False
    assert "lm_head.weight" in load_file(tmp_path / "ours" / "model.safetensors")
    assert flaxen.load(tmp_path / "ours").config == pretrained.config
    again = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "ours").eval()
    np.testing.assert_array_equal(torch_logits(again, ids, np.maximum(labels, 0), valid), expected)


@pytest.mark.parametrize(
    ("json_fields", "kind", "scaled"),
    [
        ({"tie_word_embeddings": True}, "t5", True),
        ({}, "t5", True),
        ({"tie_word_embeddings": False}, "t5", False),
        ({"tie_word_embeddings": True, "scale_decoder_outputs": False}, "t5", False),
        ({"tie_word_embeddings": True, "transformers_version": "5.22.2"}, "mt5", False),
        ({"tie_word_embeddings": False, "transformers_version": "4.30.0"}, "mt5", False),
        ({"tie_word_embeddings": True, "transformers_version": "4.30.0"}, "mt5", True),
        ({"tie_word_embeddings": True, "transformers_version": "5.22.2"}, "umt5", True),
        ({"tie_word_embeddings": False, "transformers_version": "4.31.0"}, "umt5", False),
    ],
)
def test_scaling_is_read_as_each_transformers_version_means_it(json_fields: dict, kind: str, scaled: bool) -> None:
    assert t5._scaled(json_fields, kind) is scaled


def test_bfloat16_weights_load_and_save(reference: Reference, tmp_path: Path) -> None:
    low = flaxen.load(reference.directory, dtype="bfloat16")
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(low.model)} == {"bfloat16"}
    low.save(tmp_path / "low")
    assert json.loads((tmp_path / "low" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    again = type(reference.model).from_pretrained(tmp_path / "low", dtype=torch.float32).eval()
    ids, valid, labels = random_batch(reference.vocab)
    exact = flaxen.load(tmp_path / "low", dtype="float32").logits(ids, np.maximum(labels, 0), valid)
    theirs = torch_logits(again, ids, np.maximum(labels, 0), valid)
    np.testing.assert_allclose(exact, theirs, rtol=0, atol=2e-5 * np.abs(theirs).max())
    rough = low.logits(ids, np.maximum(labels, 0), valid)
    assert rough.dtype == np.float32
    assert np.abs(rough - theirs).max() < 0.1 * np.abs(theirs).max()


def test_all_weight_problems_are_reported_at_once(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    tensors.pop("encoder.block.1.layer.0.SelfAttention.q.weight")
    tensors["decoder.block.0.layer.2.DenseReluDense.wo.weight"] = np.zeros((32, 47), np.float32)
    tensors["encoder.block.9.layer.0.layer_norm.weight"] = np.zeros(32, np.float32)
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(InputError) as error:
        flaxen.load(copy)
    message = str(error.value)
    assert "3 problems" in message
    assert "missing tensor 'encoder.block.1.layer.0.SelfAttention.q.weight'" in message
    assert "'decoder.block.0.layer.2.DenseReluDense.wo.weight' has shape (32, 47), expected (32, 48)" in message
    assert "unexpected tensor 'encoder.block.9.layer.0.layer_norm.weight'" in message


def test_redundant_tensors_of_old_files_are_ignored(copy: Path) -> None:
    """Copies of the embedding and an unused bias are ignored, but a copy that differs is an error."""
    tensors = load_file(copy / "model.safetensors")
    tensors["encoder.embed_tokens.weight"] = tensors["shared.weight"].copy()
    tensors["lm_head.weight"] = tensors["shared.weight"].copy()
    tensors["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = np.zeros((8, 4), np.float32)
    save_file(tensors, copy / "model.safetensors")
    assert flaxen.load(copy).config.tied
    tensors["encoder.embed_tokens.weight"] += 1
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(InputError, match=r"unexpected tensor 'encoder\.embed_tokens\.weight'"):
        flaxen.load(copy)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "bert"}, "model_type 'bert' is not supported"),
        ({"rope_theta": 10000}, "unknown field rope_theta=10000"),
        ({"num_head": 4}, "did you mean 'num_heads'"),
        ({"is_encoder_decoder": False}, "is_encoder_decoder=False is not supported"),
        ({"feed_forward_proj": "gated-mish"}, "mish"),
        ({"d_model": "wide"}, "d_model must be of type int, got 'wide'"),
        ({"num_heads": -1}, "n_heads"),
    ],
    ids=str,
)
def test_unsupported_config_is_rejected(copy: Path, fields: dict, message: str) -> None:
    edit_config(copy, **fields)
    with pytest.raises(InputError, match=message):
        flaxen.load(copy)


def test_presets_round_trip_through_config_json() -> None:
    for name, config in PRESETS.items():
        config = dataclasses.replace(config, family="mt5" if name.startswith("mt5") else config.family)
        assert (
            t5.read_config(
                t5.write_config(config, "float32"), InMemory({} if config.tied else {"lm_head.weight": np.zeros(1)})
            )
            == config
        )


def test_tokenizer_larger_than_the_vocabulary_is_rejected(tmp_path: Path) -> None:
    make_reference("t5-1.0", tmp_path / "model")  # 97 ids
    transformers.ByT5Tokenizer().save_pretrained(tmp_path / "model")  # 384 ids
    with pytest.raises(InputError, match="tokenizer has 384 ids, but the model has only 97"):
        flaxen.load(tmp_path / "model")


def test_rows_name_every_leaf_once() -> None:
    for config in (Config(), PRESETS["byt5-small"], PRESETS["umt5-small"]):
        rows = t5.rows(config)
        assert sorted(row.ours for row in rows) == sorted(leaves(T5(config)))
        assert len({row.theirs for row in rows}) == len(rows)
