"""LoRA adapters in PEFT's format, read and written; compared with peft and PyTorch, run live."""

import copy
import json
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import peft as theirs
import pytest
import torch
import transformers
from conftest import SMALL, Reference, make_reference, random_batch, randomise_weights
from safetensors.numpy import load_file, save_file
from vision_models import close, make_gpt2, make_pair, make_vit, pixels

import flaxen
from flaxen import atomic_directory, families, manifest
from flaxen.errors import InputError
from flaxen.hf import peft
from flaxen.hf.weightmap import Row
from flaxen.models.captioner import Captioner
from flaxen.models.gpt2 import GPT2
from flaxen.models.vit import ViT
from flaxen.train import lora
from flaxen.train.settings import LoRA

RANK, ALPHA = 3, 5.0
IDS, VALID, LABELS = random_batch(97, rows=3, source=17, target=7)
DECODER, PIXELS = np.maximum(LABELS, 1), pixels()


def make_longt5(directory: Path) -> Reference:
    torch.manual_seed(0)
    config = transformers.LongT5Config(
        **SMALL, encoder_attention_type="transient-global", local_radius=3, global_block_size=4
    )
    model = randomise_weights(transformers.LongT5ForConditionalGeneration(config).eval())
    model.save_pretrained(directory)
    return Reference(model, directory)


MODELS: dict[str, Callable[[Path], Reference]] = {
    "t5": lambda directory: make_reference("t5-1.1", directory),
    "t5-1.0": lambda directory: make_reference("t5-1.0", directory),
    "longt5": make_longt5,
    "gpt2": make_gpt2,
    "vit": make_vit,
    "captioner": lambda directory: make_pair(directory, width=24),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Any]]:
    """A fresh PyTorch model and ours by name; each is created once."""
    cache: dict[str, tuple[Any, Any]] = {}

    def get(name: str) -> tuple[Any, Any]:
        if name not in cache:
            reference = MODELS[name](tmp_path_factory.mktemp(name))
            cache[name] = reference.model, flaxen.load(reference.directory).model
        # peft inserts its layers into the model in place: copy it.
        return copy.deepcopy(cache[name][0]), cache[name][1]

    return get


# These programs run only once or twice: skipping optimisations halves the time to compile them.
fast_jit = partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
)


@fast_jit
def ours(model: Any) -> jax.Array:
    if isinstance(model, ViT):
        return model(jnp.asarray(PIXELS))
    if isinstance(model, GPT2):
        return model.logits(jnp.asarray(IDS))
    if isinstance(model, Captioner):
        return model.logits(jnp.asarray(PIXELS), jnp.asarray(DECODER))
    return model.logits(jnp.asarray(IDS), jnp.asarray(DECODER), jnp.asarray(VALID))


def torch_outputs(model: Any) -> np.ndarray:
    kind, images = model.config.model_type, torch.tensor(PIXELS)
    ids, decoder, mask = (torch.tensor(array).long() for array in (IDS, DECODER, VALID))
    with torch.no_grad():
        if kind == "vit":
            return model(pixel_values=images).last_hidden_state.numpy()
        if kind == "gpt2":
            return model(input_ids=ids).logits.numpy()
        if kind == "vision-encoder-decoder":
            return model(pixel_values=images, decoder_input_ids=decoder).logits.numpy()
        return model(input_ids=ids, attention_mask=mask, decoder_input_ids=decoder).logits.numpy()


def noisy(model: Any, targets: tuple[str, ...] = (), rank: int = RANK) -> lora.Adapter:
    """Make an adapter whose `up` is random instead of 0."""
    draw = np.random.default_rng(3)
    initial = lora.initial_adapter(model, LoRA(rank, targets=targets), 1)

    def up(factors: Any) -> Any:
        return jax.device_put(draw.normal(0, 0.3, factors["up"].shape).astype(np.float32))

    return {path: {"down": factors["down"], "up": up(factors)} for path, factors in initial.items()}


@contextmanager
def ignore_fan_in_fan_out_warning(both: bool) -> Iterator[None]:
    """peft has a single fan_in_fan_out for the layers of ViT and GPT-2, which need different ones, and warns if both
    are targeted."""
    with warnings.catch_warnings():
        if both:
            warnings.filterwarnings("ignore", "fan_in_fan_out is set to")
        yield


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("t5", ()),
        ("t5", ("*.attention.[qk]", "*.o", "*.mlp.*", "decoder.*.cross.v")),
        ("t5", ("*",)),
        ("longt5", ("*",)),
        ("gpt2", ()),
        ("gpt2", ("*",)),
        ("vit", ()),
        ("vit", ("*",)),
        ("captioner", ("*",)),
        ("captioner", ()),
        ("captioner", ("bridge", "encoder.*")),
        ("captioner", ("decoder.*.cross.kv",)),
    ],
)
def test_written_adapter_loads_in_peft_with_equal_outputs(
    models: Any, name: str, targets: tuple[str, ...], tmp_path: Path
) -> None:
    torch_model, model = models(name)
    adapter = noisy(model, targets)
    write(adapter, model, RANK, ALPHA, tmp_path / "adapter", "some/base")
    both = name == "captioner" and len({path.startswith("decoder.") for path in adapter}) == 2
    with ignore_fan_in_fan_out_warning(both):
        loaded = theirs.PeftModel.from_pretrained(torch_model, str(tmp_path / "adapter")).eval()
        result = loaded.load_adapter(str(tmp_path / "adapter"), "again")
    assert result.missing_keys == result.unexpected_keys == []

    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    halves = {key: value for key, value in loaded.named_parameters() if ".lora_" in key and ".default." in key}
    assert {re.sub(r"base_model\.model\.|\.lora_.*", "", key) for key in halves} == set(config["target_modules"])
    assert len(halves) == 2 * len(config["target_modules"])
    assert all(value.abs().min() > 0 for value in halves.values())

    expected = torch_outputs(loaded)
    assert np.abs(np.asarray(ours(model)) - expected).max() > 0.05 * np.abs(expected).max()
    close(ours(lora.merge(model, adapter, ALPHA / RANK)), expected, 2e-5)
    if targets == ("*",):  # each choice is a program of its own to compile
        close(ours(lora.attach(model, adapter, ALPHA / RANK)), expected, 2e-5)


@pytest.mark.parametrize("name", MODELS)
def test_every_linear_layer_has_a_peft_name(models: Any, name: str) -> None:
    """Otherwise a run would fail at the end, when its adapter is saved."""
    torch_model, model = models(name)
    names, inside = peft.modules(rows(model)), dict(torch_model.named_modules())
    assert names.keys() == dict(lora.linears(model)).keys()
    assert all(now.format(i=1) in inside for now, _ in names.values())


def save_peft_adapter(torch_model: Any, directory: Path, both: bool = False, **config: Any) -> Any:
    """Save a peft adapter with noise in both factors, and return the adapted model."""
    torch.manual_seed(2)
    lora_config = theirs.LoraConfig(**{"r": 4, "lora_alpha": 6, "init_lora_weights": False} | config)
    with ignore_fan_in_fan_out_warning(both):
        adapted = theirs.get_peft_model(torch_model, lora_config).eval()
    adapted.save_pretrained(str(directory))
    return adapted


def rows(model: Any) -> list[Row]:
    return families.of_model(model).format.rows(model.config, None)


def write(adapter: lora.Adapter, model: Any, rank: int, alpha: float, directory: Path, base: str | None) -> None:
    peft.write(adapter, rows(model), families.of_model(model).peft_task, rank, alpha, directory, base)


def read(directory: Path, model: Any) -> lora.Adapter:
    return peft.read(directory, rows(model), dict(lora.linears(model)))


def check_merged(model: Any, adapter: lora.Adapter, expected: np.ndarray) -> None:
    """The merged model has the expected outputs, and the base model does not."""
    assert np.abs(np.asarray(ours(model)) - expected).max() > 1e-2 * np.abs(expected).max()
    close(ours(lora.merge(model, adapter, 1.0)), expected, 2e-5)


CONV = {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("t5", {"target_modules": ["q", "v"]}),
        ("t5", {"target_modules": ["q", "o", "wi_1", "wo"], "use_rslora": True, "lora_dropout": 0.2}),
        (
            "t5",
            {"target_modules": ["q", "wo"], "rank_pattern": {"decoder.block.1.layer.0.SelfAttention.q": 7, "wo": 2}},
        ),
        (
            "t5",
            {
                "target_modules": ["k", "v"],
                "rank_pattern": {r"encoder.*\.k": 9},
                "use_rslora": True,
                "task_type": "SEQ_2_SEQ_LM",
            },
        ),
        ("t5", {"target_modules": ["v"], "layers_to_transform": [1], "layers_pattern": "block"}),
        ("t5", {"target_modules": "all-linear"}),
        ("longt5", {"target_modules": r"encoder.*\.[kv]"}),
        ("gpt2", {**CONV, "task_type": "CAUSAL_LM"}),
        ("gpt2", {**CONV, "layers_to_transform": 0, "layers_pattern": "h"}),
        ("vit", {"target_modules": ["q_proj", "v_proj", "fc2"]}),
        ("vit", {"target_modules": ["projection", "o_proj"], "rank_pattern": {"projection": 5}}),
        ("captioner", {"target_modules": "all-linear", "both": True}),
    ],
)
def test_adapter_saved_by_peft_loads_with_equal_outputs(
    models: Any, name: str, config: dict[str, Any], tmp_path: Path
) -> None:
    torch_model, model = models(name)
    adapted = save_peft_adapter(torch_model, tmp_path, **config)
    check_merged(model, read(tmp_path, model), torch_outputs(adapted))


def test_adapter_of_a_bare_gpt2_is_read(models: Any, tmp_path: Path) -> None:
    torch_model, model = models("gpt2")
    save_peft_adapter(torch_model.transformer, tmp_path, **CONV)
    assert all(".transformer." not in key for key in load_file(tmp_path / peft.WEIGHTS))
    check_merged(model, read(tmp_path, model), torch_outputs(torch_model))


def test_module_names_of_transformers_4_are_read(models: Any, tmp_path: Path) -> None:
    torch_model, model = models("captioner")
    adapted = save_peft_adapter(
        torch_model, tmp_path, both=True, target_modules=r"encoder\.layers.*_proj|.*fc[12]|.*pooler.dense"
    )
    renamed = {}
    for key, tensor in load_file(tmp_path / peft.WEIGHTS).items():
        for old, new in (
            ("encoder.layer.", "layers."),
            ("attention.attention.query", "attention.q_proj"),
            ("attention.attention.key", "attention.k_proj"),
            ("attention.attention.value", "attention.v_proj"),
            ("attention.output.dense", "attention.o_proj"),
            ("intermediate.dense", "mlp.fc1"),
            ("output.dense", "mlp.fc2"),
        ):
            key = key.replace(new, old)
        renamed[key] = tensor
    assert "base_model.model.encoder.encoder.layer.1.attention.attention.value.lora_A.weight" in renamed
    save_file(renamed, tmp_path / peft.WEIGHTS)
    check_merged(model, read(tmp_path, model), torch_outputs(adapted))


def test_round_trip_is_exact_with_the_scale_folded_into_up(models: Any, tmp_path: Path) -> None:
    for name in ("t5", "vit", "captioner"):
        model = models(name)[1]
        adapter = noisy(model, ("*",))
        write(adapter, model, RANK, ALPHA, tmp_path / name, None)
        again = read(tmp_path / name, model)
        assert again.keys() == adapter.keys()
        for path, factors in adapter.items():
            np.testing.assert_array_equal(again[path]["down"], factors["down"])
            np.testing.assert_allclose(again[path]["up"], factors["up"] * (ALPHA / RANK), rtol=1e-6)


def test_bfloat16_adapter_is_read(models: Any, tmp_path: Path) -> None:
    model = models("t5")[1]
    adapter = noisy(model)
    write(adapter, model, RANK, float(RANK), tmp_path, None)
    file = tmp_path / peft.WEIGHTS
    save_file({key: array.astype(ml_dtypes.bfloat16) for key, array in load_file(file).items()}, file)
    again = read(tmp_path, model)
    for path, factors in adapter.items():
        np.testing.assert_array_equal(again[path]["up"], factors["up"].astype(jnp.bfloat16).astype(jnp.float32))


def test_gradients_equal_pefts(models: Any, tmp_path: Path) -> None:
    torch_model, model = models("t5")
    adapter = noisy(model, ("*.attention.[qv]", "*.cross.o", "*.mlp.wi"))
    write(adapter, model, RANK, ALPHA, tmp_path / "adapter", None)
    loaded = theirs.PeftModel.from_pretrained(torch_model, str(tmp_path / "adapter"), is_trainable=True).eval()
    ids, mask, labels = (torch.tensor(array).long() for array in (IDS, VALID, LABELS))
    out = loaded(input_ids=ids, attention_mask=mask, labels=labels)
    out.loss.backward()

    @fast_jit
    def value_and_gradient(adapter: lora.Adapter, model: Any) -> tuple[jax.Array, lora.Adapter]:
        def loss(adapter: lora.Adapter) -> jax.Array:
            attached = lora.attach(model, adapter, ALPHA / RANK)
            return attached.loss(jnp.asarray(IDS), jnp.asarray(LABELS), jnp.asarray(VALID))[0]

        return jax.value_and_grad(loss)(adapter)

    value, gradient = value_and_gradient(adapter, model)
    np.testing.assert_allclose(float(value), out.loss.item(), rtol=1e-5)
    write(gradient, model, RANK, ALPHA, tmp_path / "gradient", None)
    gradients = load_file(tmp_path / "gradient" / peft.WEIGHTS)
    expected = {
        key.replace(".default", ""): value.grad.numpy()
        for key, value in loaded.named_parameters()
        if value.grad is not None
    }
    assert gradients.keys() == expected.keys()
    for key, array in gradients.items():
        close(array, expected[key], 1e-4)


def write_with_config(model: Any, directory: Path, **changes: Any) -> Path:
    """Write one of our adapters with changes to its adapter_config.json."""
    write(noisy(model), model, RANK, ALPHA, directory, None)
    config = json.loads((directory / peft.CONFIG).read_text())
    (directory / peft.CONFIG).write_text(json.dumps(config | changes))
    return directory


@pytest.mark.parametrize(
    "config",
    [
        {"use_dora": True},
        {"bias": "all"},
        {"bias": "lora_only"},
        {"modules_to_save": ["final_layer_norm"]},
        {"alpha_pattern": {"q": 3}},
        {"init_lora_weights": "pissa"},
        {"init_lora_weights": "olora"},
        {"trainable_token_indices": [1, 2]},
    ],
)
def test_unsupported_lora_variants_are_rejected_by_name(models: Any, config: dict[str, Any], tmp_path: Path) -> None:
    torch_model, model = models("t5")
    save_peft_adapter(torch_model, tmp_path, target_modules=["q"], **config)
    with pytest.raises(InputError, match=next(iter(config))):
        read(tmp_path, model)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3' is not supported; only 'LORA' is"),
        ({"lora_bias": True}, "lora_bias"),
        ({"kasa_config": {"beta": 1e-4}}, "kasa_config"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"lora_alpha": "big"}, "lora_alpha must be a number, got 'big'"),
    ],
)
def test_unsupported_config_values_are_rejected_by_name(
    models: Any, config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = models("t5")[1]
    with pytest.raises(InputError, match=message):
        read(write_with_config(model, tmp_path / "adapter", **config), model)


def test_adapter_of_another_model_is_rejected(models: Any, tmp_path: Path) -> None:
    t5, gpt2 = models("t5")[1], models("gpt2")[1]
    with pytest.raises(InputError, match=r"does not have: decoder\.block\.0.* and \d+ more"):
        read(write_with_config(t5, tmp_path / "t5"), gpt2)
    wide = flaxen.create(flaxen.models.t5.Config(vocab_size=97, d_model=48, d_head=8, d_ff=48, n_layers=2)).model
    with pytest.raises(
        InputError, match=r"of encoder\.layers\.attention\.q have shapes \(3, 32\) and \(32, 3\).*\(3, 48\)"
    ):
        read(tmp_path / "t5", wide)
    deep = flaxen.create(flaxen.models.t5.Config(vocab_size=97, d_model=32, d_head=8, d_ff=48, n_heads=4)).model
    write_with_config(deep, tmp_path / "deep")
    with pytest.raises(InputError, match=r"does not have: decoder\.block\.2"):
        read(tmp_path / "deep", t5)


def edit_tensors(directory: Path, change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]) -> Path:
    save_file(change(load_file(directory / peft.WEIGHTS)), directory / peft.WEIGHTS)
    return directory


def test_damaged_adapter_files_are_reported(models: Any, tmp_path: Path) -> None:
    model = models("t5")[1]
    adapter = write_with_config(model, tmp_path / "adapter")
    first = "base_model.model.encoder.block.0.layer.0.SelfAttention.q.lora_A.weight"
    edit_tensors(adapter, lambda tensors: tensors | {first: tensors[first][:2].copy()})
    with pytest.raises(InputError, match=r"lora_A and lora_B of encoder\.layers\.attention\.q have shapes \(2, 32\)"):
        read(adapter, model)
    edit_tensors(adapter, lambda tensors: tensors | {first: np.zeros((), np.float32)})
    with pytest.raises(InputError, match=r"unexpected tensor .*q\.lora_A\.weight' of shape \(\)"):
        read(adapter, model)
    edit_tensors(adapter, lambda tensors: {key: tensor for key, tensor in tensors.items() if key != first})
    with pytest.raises(InputError, match=r"only lora_B of encoder\.block\.0.*q, expected lora_A"):
        read(adapter, model)
    edit_tensors(adapter, lambda tensors: tensors | {"lm_head.weight": np.zeros((97, 32), np.float32)})
    with pytest.raises(InputError, match=r"unexpected tensor 'lm_head\.weight'"):
        read(adapter, model)
    edit_tensors(adapter, lambda tensors: {})
    with pytest.raises(InputError, match="contains no tensors"):
        read(adapter, model)
    file = write_with_config(model, tmp_path / "again") / peft.WEIGHTS
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(InputError, match="is not a valid safetensors file"):
        read(file.parent, model)
    file.rename(file.with_name("adapter_model.bin"))
    with pytest.raises(InputError, match=r"it contains adapter_model\.bin"):
        read(file.parent, model)
    (file.parent / peft.CONFIG).write_text("{")
    with pytest.raises(InputError, match=r"adapter_config\.json is not valid JSON"):
        read(file.parent, model)


def test_failed_write_leaves_the_old_adapter(models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = models("t5")[1]
    target, adapter = tmp_path / "adapter", noisy(model)
    with pytest.raises(InputError, match=r"ranks 3 and 3, expected 6"):
        write(adapter, model, 6, ALPHA, target, None)
    with pytest.raises(InputError, match=r"targets 'layers\.attention\.qkv', which the model does not have"):
        write(noisy(models("gpt2")[1]), model, RANK, ALPHA, target, None)
    with pytest.raises(InputError, match="the adapter is empty"):
        write({}, model, RANK, ALPHA, target, None)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="full"):
        patch.setattr("safetensors.numpy.save_file", fail)
        write(adapter, model, RANK, ALPHA, target, None)
    assert list(tmp_path.iterdir()) == []

    write(adapter, model, RANK, ALPHA, target, None)
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    assert before.keys() == {peft.CONFIG, peft.WEIGHTS, manifest.NAME}
    with monkeypatch.context() as patch, pytest.raises(OSError, match="full"):
        patch.setattr(atomic_directory, "sync", fail)
        write(adapter, model, RANK, 2 * ALPHA, target, None)
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").touch()
    with pytest.raises(InputError, match="contains files that Flaxen did not write"):
        write(adapter, model, RANK, ALPHA, tmp_path / "notes", None)
