"""Embeddings equal those of transformers and sentence-transformers, in any batch."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from conftest import SMALL, Reference, randomise_weights
from safetensors.numpy import load_file

import flaxen
from flaxen.errors import InputError
from flaxen.pretrained.embedding import Embedder

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from sentence_transformers import SentenceTransformer, models

TEXTS = [
    "A small test.",
    "Grüße, 世界",
    "",
    "One text that is a good deal longer than the others of its batch.",
]
TOLERANCE = 2e-5  # relative to the largest value


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder over bytes, with a tokenizer."""
    directory = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(0)
    model = transformers.T5EncoderModel(transformers.T5Config(**{**SMALL, "vocab_size": 384}))
    randomise_weights(model).save_pretrained(directory)
    transformers.ByT5Tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def sentence_t5(encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[SentenceTransformer, Path]:
    """A model like sentence-T5 and GTR: mean pooling, a dense layer without bias, normalisation, a length limit."""
    directory = tmp_path_factory.mktemp("sentence") / "model"
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = models.Transformer(str(encoder), max_seq_length=40)
        dense = models.Dense(32, 24, bias=False, activation_function=torch.nn.Identity())
        model = SentenceTransformer(
            modules=[first, models.Pooling(32, "mean"), dense, models.Normalize()], device="cpu"
        )
        model.save(str(directory))
    return model, directory


def close(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE * np.abs(theirs).max())


def torch_states(directory: Path) -> list[np.ndarray]:
    """Hidden states [T, D] of each text, computed one by one without padding."""
    model = transformers.T5EncoderModel.from_pretrained(directory).eval()
    tokenizer = transformers.ByT5Tokenizer()
    with torch.no_grad():
        return [model(torch.tensor([tokenizer(text).input_ids])).last_hidden_state[0].numpy() for text in TEXTS]


def test_every_pooling_equals_transformers(encoder: Path) -> None:
    pretrained, states = flaxen.load(encoder), torch_states(encoder)
    close(pretrained.embed(TEXTS), np.stack([state.mean(axis=0) for state in states]))
    close(pretrained.embed(TEXTS, "max"), np.stack([state.max(axis=0) for state in states]))
    close(pretrained.embed(TEXTS, "first"), np.stack([state[0] for state in states]))
    np.testing.assert_array_equal(pretrained.embed(TEXTS, "cls"), pretrained.embed(TEXTS, "first"))
    for ours, theirs in zip(pretrained.embed(TEXTS, "none"), states, strict=True):
        close(ours, theirs)
    means = np.stack([state.mean(axis=0) for state in states])
    close(pretrained.embed(TEXTS, normalise=True), means / np.linalg.norm(means, axis=1, keepdims=True))


def test_full_t5_embeds_with_its_encoder(byt5: Path) -> None:
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(byt5).eval()
    ids = transformers.ByT5Tokenizer()("A text")["input_ids"]
    with torch.no_grad():
        theirs = model.get_encoder()(torch.tensor([ids])).last_hidden_state[0].mean(dim=0).numpy()
    close(flaxen.load(byt5).embed("A text")[0], theirs)
    np.testing.assert_array_equal(flaxen.load(byt5).embed([ids]), flaxen.load(byt5).embed("A text"))


def test_peft_adapter_is_merged(encoder: Path, tmp_path: Path) -> None:
    import peft

    base = transformers.T5EncoderModel.from_pretrained(encoder).eval()
    torch.manual_seed(2)
    config = peft.LoraConfig(task_type="FEATURE_EXTRACTION", r=2, target_modules=["q", "v"], init_lora_weights=False)
    adapted = peft.get_peft_model(base, config).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    ids = transformers.ByT5Tokenizer()("A text")["input_ids"]
    with torch.no_grad():
        theirs = adapted(torch.tensor([ids])).last_hidden_state[0].mean(dim=0).numpy()
    ours = flaxen.load(encoder, adapter=tmp_path / "adapter").embed("A text")[0]
    close(ours, theirs)
    assert np.abs(ours - flaxen.load(encoder).embed("A text")[0]).max() > 0.01


def test_bfloat16_is_close_to_float32(encoder: Path) -> None:
    low, exact = (flaxen.load(encoder, dtype=dtype).embed(TEXTS) for dtype in ("bfloat16", "float32"))
    assert low.dtype == np.float32
    assert np.abs(low - exact).max() < 0.05 * np.abs(exact).max()


def test_embedding_does_not_depend_on_padding_or_batch(encoder: Path) -> None:
    pretrained = flaxen.load(encoder)
    expected = np.concatenate([pretrained.embed(text) for text in TEXTS * 3])
    for batch_size in (1, 3, 5, 16):
        embeddings = pretrained.embed(TEXTS * 3, batch_size=batch_size)
        np.testing.assert_allclose(embeddings, expected, rtol=0, atol=1e-6)
    assert pretrained.embed([]).shape == (0, 32)


def test_sentence_t5_equals_sentence_transformers(sentence_t5: tuple[SentenceTransformer, Path]) -> None:
    model, directory = sentence_t5
    pretrained = flaxen.load(directory)
    assert Embedder(pretrained).length == 40
    theirs = model.encode(TEXTS)
    assert theirs.shape == (4, 24)
    with pytest.warns(UserWarning, match="1 of 4 texts were truncated to 40 tokens"):
        close(pretrained.embed(TEXTS), theirs)
    raw = model.encode(TEXTS[:2], output_value="token_embeddings")
    for ours, state in zip(pretrained.embed(TEXTS[:2], "none"), raw, strict=True):
        close(ours, state.numpy())
    norms = np.linalg.norm(pretrained.embed(TEXTS[:2], normalise=False), axis=1)
    assert np.abs(norms - 1).max() > 0.01


def test_sentence_t5_round_trip_is_exact(sentence_t5: tuple[SentenceTransformer, Path], tmp_path: Path) -> None:
    model, directory = sentence_t5
    pretrained = flaxen.load(directory)
    pretrained.save(tmp_path / "ours")
    reloaded = flaxen.load(tmp_path / "ours")
    np.testing.assert_array_equal(reloaded.embed(TEXTS[:2]), pretrained.embed(TEXTS[:2]))
    np.testing.assert_array_equal(
        load_file(tmp_path / "ours" / "2_Dense" / "model.safetensors")["linear.weight"],
        load_file(directory / "2_Dense" / "model.safetensors")["linear.weight"],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = SentenceTransformer(str(tmp_path / "ours"), device="cpu")
    np.testing.assert_array_equal(again.encode(TEXTS), model.encode(TEXTS))


@pytest.fixture
def copy(sentence_t5: tuple[SentenceTransformer, Path], tmp_path: Path) -> Path:
    """A directory that a test may modify, with modules.json in the format of older versions."""
    flaxen.load(sentence_t5[1]).save(tmp_path / "copy")
    return tmp_path / "copy"


def edit(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_encoder_subfolder_tanh_max_pooling_and_default_prompt(copy: Path) -> None:
    """A layout unlike our own: the encoder in a subfolder, a Tanh activation, max pooling, and a default prompt."""
    listed = json.loads((copy / "modules.json").read_text())
    listed[0]["path"] = "0_Transformer"
    (copy / "modules.json").write_text(json.dumps(listed))
    edit(copy / "2_Dense" / "config.json", activation_function="torch.nn.modules.activation.Tanh")
    edit(copy / "1_Pooling" / "config.json", pooling_mode_mean_tokens=False, pooling_mode_max_tokens=True)
    prompts = {"prompts": {"query": "query: "}, "default_prompt_name": "query"}
    (copy / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    edit(copy / "sentence_bert_config.json", max_seq_length=10)
    (copy / "0_Transformer").mkdir()
    for path in list(copy.iterdir()):
        if path.is_file() and path.name not in ("modules.json", "config_sentence_transformers.json"):
            path.rename(copy / "0_Transformer" / path.name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = SentenceTransformer(str(copy), device="cpu").encode(TEXTS[:3])
    with pytest.warns(UserWarning, match="2 of 3 texts were truncated to 10 tokens"):
        close(flaxen.load(copy).embed(TEXTS[:3]), theirs)


@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        ("1_Pooling", {"pooling_mode_weightedmean_tokens": True}, r"pooling mean \+ weightedmean is not supported"),
        ("1_Pooling", {"pooling_mode": "lasttoken"}, "pooling lasttoken is not supported; supported: one of mean"),
        ("2_Dense", {"activation_function": "torch.nn.modules.activation.Mish"}, "activation 'Mish' is not supported"),
        ("2_Dense", {"use_residual": True}, "use_residual=True is not supported"),
        ("2_Dense", {"in_feature": 3}, r"unknown field in_feature=3 \(did you mean 'in_features'"),
        ("2_Dense", {"out_features": 5}, r"expected the tensors .*\(5, 32\).*got .*\(24, 32\)"),
        (".", {"do_lower_case": True}, "do_lower_case, which is not supported"),
    ],
    ids=str,
)
def test_unsupported_module_settings_are_rejected(copy: Path, file: str, fields: dict, message: str) -> None:
    edit(copy / ("sentence_bert_config.json" if file == "." else f"{file}/config.json"), **fields)
    with pytest.raises(InputError, match=message):
        flaxen.load(copy)


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        (["Transformer", "Pooling", "CNN"], "module 'CNN' is not supported"),
        (["Transformer", "Dense", "Pooling"], "expected the modules Transformer, Pooling"),
        (["Pooling"], "expected the modules Transformer, Pooling"),
    ],
    ids=str,
)
def test_unsupported_module_lists_are_rejected(copy: Path, kinds: list[str], message: str) -> None:
    entries = [{"idx": i, "name": str(i), "path": "", "type": f"x.{kind}"} for i, kind in enumerate(kinds)]
    (copy / "modules.json").write_text(json.dumps(entries))
    with pytest.raises(InputError, match=message):
        flaxen.load(copy)


def test_truncated_text_keeps_its_end_token(encoder: Path) -> None:
    pretrained = flaxen.load(encoder)
    assert Embedder(pretrained).length is None  # ByT5's tokenizer has no limit
    ids = pretrained.tokenizer.encode("abcdefgh")
    with pytest.warns(UserWarning, match="1 of 2 texts were truncated to 5 tokens"):
        embeddings = pretrained.embed(["abcdefgh", "ab"], length=5)
    np.testing.assert_allclose(embeddings[0], pretrained.embed([[*ids[:4], ids[-1]]])[0], rtol=0, atol=1e-6)


def test_invalid_inputs_are_rejected(encoder: Path, t5_reference: Reference) -> None:
    pretrained = flaxen.load(encoder)
    for given, message in (
        ({"pooling": "median"}, "pooling must be one of mean, first, cls, max, none, got 'median'"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"length": 0}, "length must be at least 1"),
    ):
        with pytest.raises(InputError, match=message):
            pretrained.embed(["a"], **given)
    with pytest.raises(InputError, match="text 1 has no tokens"):
        pretrained.embed([[5], []])
    with pytest.raises(InputError, match="wrap it in a list"):
        pretrained.embed([5, 6])
    with pytest.raises(InputError, match="no tokenizer"):
        flaxen.load(t5_reference.directory).embed("text")
    from flaxen.models.gpt2 import Config

    gpt2 = flaxen.create(Config(vocab_size=40, n_positions=8, d_model=16, n_layers=1, n_heads=2, pad_id=0, start_id=0))
    with pytest.raises(InputError, match="a GPT-2 has no text encoder"):
        gpt2.embed([[5]])
