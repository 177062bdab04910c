"""T5 encoders: hidden states equal transformers', checkpoints load and save, alone and in diffusion models."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from commands import command
from conftest import GATED, SMALL, random_batch, randomise_weights
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
    model = randomise_weights(getattr(transformers, f"{name}EncoderModel")(config).eval())
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
    loaded = flaxen.load(tmp_path / "theirs")
    assert loaded.family is families.T5_ENCODER
    ids, valid, _ = random_batch(97)
    expected = torch_states(model, ids, valid)[valid]
    np.testing.assert_allclose(states(loaded, ids, valid)[valid], expected, rtol=0, atol=2e-5 * np.abs(expected).max())
    loaded.save(tmp_path / "ours")
    kind = type(model)
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["architectures"] == [kind.__name__]
    np.testing.assert_array_equal(
        torch_states(kind.from_pretrained(tmp_path / "ours").eval(), ids, valid)[valid], expected
    )
    reloaded = flaxen.load(tmp_path / "ours")
    assert reloaded.config == loaded.config
    for path, leaf in leaves(loaded.model).items():
        np.testing.assert_array_equal(leaf, leaves(reloaded.model)[path])
    assert (
        load_file(tmp_path / "ours" / "model.safetensors").keys()
        == load_file(tmp_path / "theirs" / "model.safetensors").keys()
    )


def test_architecture_in_config_decides_that_it_is_an_encoder(tmp_path: Path) -> None:
    """Text encoders of diffusion models are stored in float16, with fields of a decoder in config.json."""
    model = make_encoder("T5", tmp_path / "flux" / "text_encoder_2").half()
    model.save_pretrained(tmp_path / "flux" / "text_encoder_2")
    path = tmp_path / "flux" / "text_encoder_2" / "config.json"
    fields = {"is_encoder_decoder": True, "num_decoder_layers": 24, "tie_word_embeddings": False, "output_past": True}
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    loaded = flaxen.load(tmp_path / "flux", subfolder="text_encoder_2")
    assert loaded.tokenizer is None
    assert {str(leaf.dtype) for leaf in leaves(loaded.model).values()} == {"float32"}
    ids, valid, _ = random_batch(97)
    expected = torch_states(model.float(), ids, valid)[valid]
    np.testing.assert_allclose(states(loaded, ids, valid)[valid], expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_tokenizer_is_found_next_to_the_text_encoder(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.T5Config(**{**SMALL, "vocab_size": 384})
    transformers.T5EncoderModel(config).save_pretrained(tmp_path / "text_encoder_3")
    transformers.ByT5Tokenizer().save_pretrained(tmp_path / "tokenizer_3")
    loaded = flaxen.load(tmp_path, subfolder="text_encoder_3")
    assert loaded.tokenizer is not None
    assert flaxen.load(tmp_path / "text_encoder_3").tokenizer is not None
    loaded.save(tmp_path / "alone")
    assert flaxen.load(tmp_path / "alone").tokenizer is not None
    done = command("info", tmp_path, "--subfolder", "text_encoder_3")
    assert done.code == 0, done.err
    assert "ByteTokenizer" in done.out
    with pytest.raises(
        InputError, match=r"no subfolder 'text_encoder_2' \(did you mean 'text_encoder_3'\?\); available"
    ):
        flaxen.load(tmp_path, subfolder="text_encoder_2")


def test_only_the_subfolder_is_downloaded_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[tuple[str, list[str]]] = []

    def download(name: str, allow_patterns: list[str]) -> str:
        requests.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    make_encoder("T5", tmp_path / "text_encoder_2")
    flaxen.load("someone/diffusion", subfolder="text_encoder_2")
    ((name, patterns),) = requests
    assert name == "someone/diffusion"
    assert {pattern.split("/")[0] for pattern in patterns} == {"text_encoder_2", "tokenizer_2"}


def test_alternative_embedding_name_and_leftover_decoder_tensors_are_accepted(tmp_path: Path) -> None:
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


def test_encoder_rejects_generation_and_logits(tmp_path: Path) -> None:
    make_encoder("T5", tmp_path / "a")
    encoder = flaxen.load(tmp_path / "a")
    with pytest.raises(InputError, match="a T5 encoder cannot generate text by itself"):
        encoder.generate([[5]])
    with pytest.raises(InputError, match="a T5 encoder has no output head"):
        encoder.logits([[5]], [[0]])


def test_rows_name_every_leaf_once() -> None:
    umt5 = Config(bias_per_layer=True, family="umt5")
    for config in (Config(), umt5, Config(attention="transient-global", family="longt5")):
        rows = t5_encoder.rows(config)
        assert sorted(row.ours for row in rows) == sorted(leaves(T5Encoder(config)))
        assert t5_encoder.read_config(t5_encoder.write_config(config, "float32"), None) == config


def test_flops_are_less_than_the_full_model_s() -> None:
    config = Config()
    assert 0 < flops(config, 100) < t5.flops(config, 100, 1)
