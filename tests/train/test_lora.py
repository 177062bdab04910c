"""LoRA adapters: attached, merged, and trained with the model frozen."""

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import random_batch
from vision_models import close

from flaxen import families
from flaxen.errors import InputError
from flaxen.models import captioner, gpt2, vit
from flaxen.models.captioner import Captioner
from flaxen.models.gpt2 import GPT2
from flaxen.models.t5 import T5, Config
from flaxen.models.vit import ViT
from flaxen.nn.loss import Sums
from flaxen.nn.param import initialise
from flaxen.tasks.task import Task
from flaxen.train import lora
from flaxen.train.settings import LoRA, Optimizer, Schedule, Training
from flaxen.train.step import Stepper
from flaxen.tree import leaves, size

TINY = Config(
    vocab_size=50, d_model=16, d_head=4, d_ff=24, n_layers=2, n_decoder_layers=1, n_heads=2, gated=True, dropout=0.0
)  # fmt: skip
VISION = vit.Config(image_size=(16, 16), patch_size=(8, 8), d_model=12, d_ff=20, n_layers=2, n_heads=2, pooler="tanh")
DECODER = gpt2.Config(
    vocab_size=50, n_positions=16, d_model=16, d_ff=24, n_layers=2, n_heads=2, cross=True, dropout=0.0,
    embedding_dropout=0.0, attention_dropout=0.0, std=0.2, pad_id=0, eos_ids=(1,), start_id=0,
)  # fmt: skip
DECODER_ONLY = dataclasses.replace(DECODER, cross=False)
CAPTIONER = captioner.Config(VISION, DECODER)
IDS, VALID, LABELS = random_batch(50, rows=4, source=9, target=7)
SOURCE = np.random.default_rng(2).normal(size=(4, 5, 16)).astype(np.float32)
RANK, SCALE, STEPS = 3, 0.7, 30


def build(config: Any) -> Any:
    return initialise(families.of_config(config).model(config), 0)


def random_adapter(model: Any, *targets: str) -> lora.Adapter:
    """A random adapter whose `up` is not 0."""
    draw = np.random.default_rng(3)
    started = lora.initial_adapter(model, LoRA(RANK, targets=targets), 1)

    def up(factors: Any) -> Any:
        return jax.device_put(draw.normal(0, 0.3, factors["up"].shape).astype(np.float32))

    return {path: {"down": factors["down"], "up": up(factors)} for path, factors in started.items()}


@jax.jit
def logits(model: Any) -> jax.Array:
    decoder = jnp.maximum(jnp.asarray(LABELS), 0)
    if isinstance(model, GPT2):
        return model.logits(decoder, jnp.asarray(SOURCE) if model.config.cross else None)
    return model.logits(jnp.asarray(IDS), decoder, jnp.asarray(VALID))


@partial(jax.jit, static_argnums=0)
def loss_and_gradient(combine: Any, model: Any, adapter: lora.Adapter) -> tuple[jax.Array, lora.Adapter]:
    ids, labels = jnp.asarray(IDS[:, : LABELS.shape[1]]), jnp.asarray(LABELS)
    source = jnp.asarray(SOURCE) if model.config.cross else None
    return jax.value_and_grad(lambda adapter: combine(model, adapter, SCALE).loss(ids, labels, source)[0])(adapter)


@pytest.mark.parametrize("config", [TINY, DECODER], ids=["t5", "gpt2"])
def test_initial_adapter_changes_nothing(config: Any) -> None:
    model = build(config)
    attached = lora.attach(model, lora.initial_adapter(model, LoRA(RANK, targets=("*",)), 0), SCALE)
    np.testing.assert_array_equal(logits(attached), logits(model))


def test_initial_adapter_depends_only_on_seed_and_path() -> None:
    abstract = Captioner(CAPTIONER)
    every, some = (lora.initial_adapter(abstract, LoRA(4, targets=globs), 5) for globs in (("*",), ("decoder.*.o",)))
    assert some.keys() == {"decoder.layers.attention.o", "decoder.layers.cross.o"}
    for path, factors in some.items():
        np.testing.assert_array_equal(factors["down"], every[path]["down"])
    from_weights = lora.initial_adapter(build(CAPTIONER), LoRA(4, targets=("*",)), 5)
    jax.tree.map(np.testing.assert_array_equal, from_weights, every)
    other = lora.initial_adapter(abstract, LoRA(4, targets=("*",)), 6)
    rows = {
        np.asarray(factors["down"]).reshape(-1)[:8].tobytes()
        for adapter in (every, other)
        for factors in adapter.values()
    }
    assert len(rows) == 2 * len(every)


def test_initial_adapter_is_uniform_as_in_peft() -> None:
    """Kaiming uniform with a = √5 over all inputs of one layer; `abstract` has the same shapes."""
    model, settings = Captioner(CAPTIONER), LoRA(16, targets=("*",))
    adapter, linears = lora.initial_adapter(model, settings, 0), dict(lora.linears(model))
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), lora.abstract(model, settings))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), adapter) == shapes
    inputs = {"attention.o": 16, "mlp.wo": 24, "patches": 3 * 8 * 8, "bridge": 12}
    for path, factors in adapter.items():
        assert not np.asarray(factors["up"]).any()
        _, sizes, _ = lora.split(path, linears[path])
        n = next((n for end, n in inputs.items() if path.endswith(end) and "encoder.layers" not in path), None)
        assert n is None or n == np.prod(sizes)
        bound = np.prod(sizes) ** -0.5
        largest = np.abs(factors["down"]).max()
        assert 0.95 * bound < largest <= bound
        assert abs(np.std(factors["down"]) / bound - 3**-0.5) < 0.06


@pytest.mark.parametrize(
    ("model", "paths"),
    [
        (
            T5(TINY),
            "encoder.layers.attention.q encoder.layers.attention.v decoder.layers.attention.q "
            "decoder.layers.attention.v decoder.layers.cross.q decoder.layers.cross.v",
        ),
        (GPT2(DECODER_ONLY), "layers.attention.qkv"),
        (ViT(VISION), "layers.attention.q layers.attention.v"),
        (
            Captioner(CAPTIONER),
            "encoder.layers.attention.q encoder.layers.attention.v decoder.layers.attention.qkv "
            "decoder.layers.cross.q decoder.layers.cross.kv",
        ),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_default_targets_are_queries_and_values(model: Any, paths: str) -> None:
    assert lora.targets(model, LoRA(2)).keys() == set(paths.split())


@pytest.mark.parametrize("config", [DECODER, dataclasses.replace(DECODER_ONLY, scan=False)], ids=["cross", "unrolled"])
def test_attached_equals_merged(config: Any) -> None:
    """Logits, loss, and the gradients of both factors."""
    model = build(config)
    adapter = random_adapter(model, "*")
    attached, merged = (logits(combine(model, adapter, SCALE)) for combine in (lora.attach, lora.merge))
    assert np.abs(attached - logits(model)).max() > 0.05 * np.abs(attached).max()
    close(attached, merged, 2e-5)
    (value, ours), (expected, theirs) = (
        loss_and_gradient(combine, model, adapter) for combine in (lora.attach, lora.merge)
    )
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for path, gradient in leaves(ours).items():
        assert np.asarray(gradient).any()
        close(gradient, leaves(theirs)[path], 1e-4)


def test_merge_adds_the_products_and_keeps_other_weights() -> None:
    """The merged weights keep their dtype."""
    model = build(CAPTIONER)
    adapter = random_adapter(model, "decoder.*.o", "bridge")
    before, after = leaves(model), leaves(lora.merge(model, adapter, SCALE))
    for path, leaf in before.items():
        if path.removesuffix(".weight") not in adapter:
            assert after[path] is leaf
    factors = adapter["decoder.layers.cross.o"]
    product = np.einsum("lnhr,lrd->lnhd", factors["down"], factors["up"])
    close(after["decoder.layers.cross.o.weight"] - before["decoder.layers.cross.o.weight"], SCALE * product, 1e-5)
    small = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model)
    merged = leaves(lora.merge(small, adapter, SCALE))
    assert {leaf.dtype for leaf in merged.values()} == {jnp.dtype(jnp.bfloat16)}
    expected = (
        small.bridge.weight[...].astype(jnp.float32) + SCALE * adapter["bridge"]["down"] @ adapter["bridge"]["up"]
    )
    np.testing.assert_array_equal(merged["bridge.weight"], expected.astype(jnp.bfloat16))


class Memorise(Task):
    """A task with a single batch."""

    examples, tokens, flops = 4, 16, 1.0

    def batch(self, step: int, size: int, rows: slice = slice(None)) -> dict[str, np.ndarray]:
        return {"ids": IDS[:, : LABELS.shape[1]], "labels": LABELS}

    def evaluation(self, size: int, limit: int | None = None) -> Iterator[dict[str, np.ndarray]]:
        yield self.batch(0, size)

    def loss(self, model: Any, batch: Any, carry: None, key: jax.Array | None) -> tuple[Sums, None]:
        return model.loss(batch["ids"], batch["labels"], key=key)[1], None


@pytest.mark.parametrize(("accumulate", "rate"), [(1, 0.0), (2, 0.2)])
def test_training_changes_only_the_adapter(accumulate: int, rate: float) -> None:
    config = dataclasses.replace(DECODER_ONLY, dropout=rate, attention_dropout=rate)
    settings, task = LoRA(2, alpha=8.0, targets=("*.attention.*", "*.mlp.w[io]")), Memorise()
    bases = []

    def base() -> GPT2:
        bases.append(build(config))
        return bases[-1]

    stepper = Stepper(
        task,
        Optimizer("adamw", learning_rate=1e-2, weight_decay=0.01),
        Schedule("constant", warmup=0),
        Training(steps=STEPS, batch_size=4, accumulate=accumulate),
        whole=lambda adapter, base: lora.attach(base, adapter, settings.scale),
        merged=lambda adapter, base: lora.merge(base, adapter, settings.scale),
        base=base,
    )
    adapter = lora.initial_adapter(GPT2(config), settings, 0)
    trained, started = size(adapter), leaves(jax.tree.map(np.array, adapter))
    state, batch, losses = stepper.init_state(adapter), task.batch(0, 4), []
    for step in range(STEPS):
        if step == STEPS - 1 and not rate:
            score = task.metrics(stepper.score(state.model, batch)[0])["loss"]
        state, report = stepper.update(state, batch)
        losses.append(task.metrics(report.sums)["loss"])
    assert losses[0] - np.mean(losses[-5:]) > 0.8
    if not rate:
        np.testing.assert_allclose(losses[-1], score, rtol=1e-5)

    assert len(bases) == 1
    expected = leaves(build(config))
    for path, leaf in leaves(stepper.base).items():
        np.testing.assert_array_equal(leaf, expected[path])
    assert trained < size(stepper.base) / 3
    assert leaves(state.model).keys() == started.keys()
    for path, leaf in leaves(state.model).items():
        assert (np.asarray(leaf) != started[path]).any(), path
    assert sum(leaf.size for leaf in jax.tree.leaves(state.optimizer) if leaf.ndim) == 2 * trained  # Adam's moments
    assert size(state.optimizer) - 2 * trained < 4  # its counters
    merged = lora.merge(stepper.base, state.model, settings.scale)
    jax.tree.map(np.testing.assert_array_equal, stepper.model(state.model), merged)


def test_glob_without_match_lists_the_paths() -> None:
    with pytest.raises(InputError, match=r"matches '\*\.query'.*available: .*encoder\.layers\.attention\.q, .*mlp\.wo"):
        lora.abstract(T5(TINY), LoRA(2, targets=("*.q", "*.query")))
    with pytest.raises(InputError, match=r"did you mean 'encoder\.layers\.mlp\.wi'"):
        lora.initial_adapter(T5(TINY), LoRA(2, targets=("encoder.layer.mlp.wi",)), 0)


@pytest.mark.parametrize("combine", [lora.attach, lora.merge])
def test_adapter_of_another_model_is_refused(combine: Any) -> None:
    model = build(TINY)
    with pytest.raises(
        InputError, match=r"adapter targets layers that the model does not have: decoder\.layers\.attention\.qkv"
    ):
        combine(model, random_adapter(build(CAPTIONER), "decoder.*.qkv"), 1.0)
    wide = random_adapter(T5(dataclasses.replace(TINY, d_model=24)), "encoder.*.q")
    message = r"encoder\.layers\.attention\.q has shapes \(\(2, 24, 3\), .* expected \(\(2, 16, 3\), \(2, 3, 2, 4\)\)"
    with pytest.raises(InputError, match=message):
        combine(model, wide, 1.0)
    mismatched = random_adapter(model, "encoder.*.q")
    mismatched["encoder.layers.attention.q"]["up"] = mismatched["encoder.layers.attention.q"]["up"][:, :2]
    with pytest.raises(InputError, match=r"shapes \(\(2, 16, 3\), \(2, 2, 2, 4\)\)"):
        combine(model, mismatched, 1.0)


def test_scale_and_invalid_settings() -> None:
    assert LoRA(8).scale == 2.0
    assert LoRA(8, alpha=4.0).scale == 0.5
    with pytest.raises(InputError, match="must be at least 0"):
        LoRA(-1)
    with pytest.raises(InputError, match=r"no effect without lora\.rank"):
        LoRA(targets=("*",))
