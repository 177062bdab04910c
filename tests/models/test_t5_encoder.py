"""Encoders of T5s: hidden states equal to transformers', checkpoints in and out, alone and in diffusion models."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from commands import command
from conftest import GATED, SMALL, random_batch, shaken
from safetensors.numpy import load_file, save_file

import flaxen
from flaxen import families
from flaxen.errors import InputError
from flaxen.hf import t5_encoder
from flaxen.models import t5
from flaxen.models.t5_encoder import Config, T5Encoder, flops
from flaxen.tree import leaves

KINDS = {
    "T5": {},
    "MT5": GATED,
    "UMT5": GATED,
    "LongT5": {**GATED, "encoder_attention_type": "transient-global", "local_radius": 5, "global_block_size": 3},
}


def make_encoder(name: str, directory: Path) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **KINDS[name]})
    model = shaken(getattr(transformers, f"{name}EncoderModel")(config).eval())
    model.save_pretrained(directory)
    return model


def torch_states(model: torch.nn.Module, ids: np.ndarray, valid: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        out = model(input_ids=torch.tensor(ids).long(), attention_mask=torch.tensor(valid).long())
    return out.last_hidden_state.numpy()


def states(pretrained: flaxen.Pretrained, ids: np.ndarray, valid: np.ndarray) -> np.ndarray:
    return np.asarray(pretrained.model.encode(jnp.asarray(ids), jnp.asarray(valid)))


@pytest.mark.parametrize("name", list(KINDS))
def test_hidden_states_equal_transformers_and_survive_a_round_trip(name: str, tmp_path: Path) -> None:
    model = make_encoder(name, tmp_path / "theirs")
    one = flaxen.load(tmp_path / "theirs")
    assert one.family is families.T5_ENCODER
    ids, valid, _ = random_batch(97)
    expected = torch_states(model, ids, valid)[valid]
    np.testing.assert_allclose(states(one, ids, valid)[valid], expected, rtol=0, atol=2e-5 * np.abs(expected).max())
    one.save(tmp_path / "ours")
    kind = type(model)
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["architectures"] == [kind.__name__]
    np.testing.assert_array_equal(
        torch_states(kind.from_pretrained(tmp_path / "ours").eval(), ids, valid)[valid], expected
    )
    two = flaxen.load(tmp_path / "ours")
    assert two.config == one.config
    for path, leaf in leaves(one.model).items():
        np.testing.assert_array_equal(leaf, leaves(two.model)[path])
    assert (
        load_file(tmp_path / "ours" / "model.safetensors").keys()
        == load_file(tmp_path / "theirs" / "model.safetensors").keys()
    )


def test_the_architecture_decides_in_float16_with_words_of_a_decoder(tmp_path: Path) -> None:
    """As the text encoders of diffusion models are stored."""
    model = make_encoder("T5", tmp_path / "flux" / "text_encoder_2").half()
    model.save_pretrained(tmp_path / "flux" / "text_encoder_2")
    path = tmp_path / "flux" / "text_encoder_2" / "config.json"
    says = {"is_encoder_decoder": True, "num_decoder_layers": 24, "tie_word_embeddings": False, "output_past": True}
    path.write_text(json.dumps(json.loads(path.read_text()) | says))
    one = flaxen.load(tmp_path / "flux", subfolder="text_encoder_2")
    assert one.tokenizer is None
    assert {str(leaf.dtype) for leaf in leaves(one.model).values()} == {"float32"}
    ids, valid, _ = random_batch(97)
    expected = torch_states(model.float(), ids, valid)[valid]
    np.testing.assert_allclose(states(one, ids, valid)[valid], expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_tokenizer_beside_the_text_encoder(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.T5Config(**{**SMALL, "vocab_size": 384})
    transformers.T5EncoderModel(config).save_pretrained(tmp_path / "text_encoder_3")
    transformers.ByT5Tokenizer().save_pretrained(tmp_path / "tokenizer_3")
    one = flaxen.load(tmp_path, subfolder="text_encoder_3")
    assert one.tokenizer is not None
    assert flaxen.load(tmp_path / "text_encoder_3").tokenizer is not None
    one.save(tmp_path / "alone")
    assert flaxen.load(tmp_path / "alone").tokenizer is not None
    done = command("info", tmp_path, "--subfolder", "text_encoder_3")
    assert done.code == 0, done.err
    assert "ByteTokenizer" in done.out
    with pytest.raises(InputError, match=r"no subfolder 'text_encoder_2'; did you mean 'text_encoder_3'\?; available"):
        flaxen.load(tmp_path, subfolder="text_encoder_2")


def test_a_subfolder_of_a_hub_id_is_all_that_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, list[str]]] = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    make_encoder("T5", tmp_path / "text_encoder_2")
    flaxen.load("someone/diffusion", subfolder="text_encoder_2")
    ((name, patterns),) = asked
    assert name == "someone/diffusion"
    assert {pattern.split("/")[0] for pattern in patterns} == {"text_encoder_2", "tokenizer_2"}


def test_the_table_by_its_other_name_and_what_is_left_of_a_decoder(tmp_path: Path) -> None:
    make_encoder("T5", tmp_path / "a")
    expected = flaxen.load(tmp_path / "a")
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    tensors["encoder.embed_tokens.weight"] = tensors.pop("shared.weight")
    tensors["decoder.final_layer_norm.weight"] = np.ones(32, np.float32)
    save_file(tensors, tmp_path / "a" / "model.safetensors")
    np.testing.assert_array_equal(
        flaxen.load(tmp_path / "a").model.embedding.weight[...], expected.model.embedding.weight[...]
    )
    tensors["encoder.block.7.layer.0.layer_norm.weight"] = np.ones(32, np.float32)
    save_file(tensors, tmp_path / "a" / "model.safetensors")
    with pytest.raises(InputError, match=r"unexpected tensor 'encoder\.block\.7\.layer\.0\.layer_norm\.weight'"):
        flaxen.load(tmp_path / "a")


def test_an_encoder_says_what_it_cannot_do(tmp_path: Path) -> None:
    make_encoder("T5", tmp_path / "a")
    one = flaxen.load(tmp_path / "a")
    with pytest.raises(InputError, match="a T5 encoder cannot generate text by itself"):
        one.generate([[5]])
    with pytest.raises(InputError, match="a T5 encoder has no output head"):
        one.logits([[5]], [[0]])


def test_rows_name_every_leaf_once() -> None:
    umt5 = Config(bias_per_layer=True, family="umt5")
    for config in (Config(), umt5, Config(attention="transient-global", family="longt5")):
        rows = t5_encoder.rows(config)
        assert sorted(row.ours for row in rows) == sorted(leaves(T5Encoder(config)))
        assert t5_encoder.read_config(t5_encoder.write_config(config, "float32"), None) == config


def test_flops_are_those_of_the_encoder() -> None:
    config = Config()
    assert 0 < flops(config, 100) < t5.flops(config, 100, 1)
