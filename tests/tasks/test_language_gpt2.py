"""Language modelling with GPT-2: loss and gradients equal those of transformers, and rows are independent."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from ids import Ids
from vision_models import gradients as torch_gradients
from vision_models import make_gpt2, same_gradients

import flaxen
from flaxen.data.stream_store import Splits, TextSize
from flaxen.data.tokenizers import ByteTokenizer
from flaxen.errors import InputError
from flaxen.hf import gpt2 as hf_gpt2
from flaxen.hf import weightmap
from flaxen.models import gpt2_language, vq_language
from flaxen.models.gpt2 import GPT2, Config
from flaxen.nn.loss import Sums
from flaxen.nn.param import initialise
from flaxen.tasks.language import Language, LanguageModel
from flaxen.tasks.objective import LanguageObjective
from flaxen.tasks.task import Task
from flaxen.train import lora
from flaxen.train.accumulate import value_and_grad
from flaxen.train.settings import LoRA, Optimizer, Schedule, Training
from flaxen.train.step import Stepper
from flaxen.tree import leaves

LENGTH, TOKENS = 24, 205
CONFIG = Config(
    vocab_size=97, n_positions=32, d_model=32, d_ff=48, n_layers=2, n_heads=4, std=0.2, pad_id=1, eos_ids=(1,),
    start_id=1, dropout=0.0, embedding_dropout=0.0, attention_dropout=0.0,
)  # fmt: skip


class Words(Ids):
    """A text with three bytes per token and four tokens per word."""

    def measured(self) -> TextSize:
        return TextSize(len(self), len(self) / 4, 3 * len(self))


def task(config: Config = CONFIG, length: int = LENGTH, **objective: Any) -> Language:
    stream = Words(np.random.default_rng(0).integers(2, 97, TOKENS).astype(np.int32))
    opened = Splits({"train": stream, "validation": stream}, ())
    return Language(
        gpt2_language, config, LanguageObjective(length, **objective), ByteTokenizer.plain(), opened, seed=7
    )


def sums(language: Language, model: GPT2, batches: Iterator[Any]) -> Sums:
    score = jax.jit(lambda model, batch: language.loss(model, batch, None, None)[0])
    return jax.tree.map(lambda *a: sum(a), *[score(model, batch) for batch in batches])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_loss_and_every_gradient_equal_torch(accumulate: int, tmp_path: Path) -> None:
    reference = make_gpt2(tmp_path / "torch")
    model = flaxen.load(reference.directory).model
    language = task(model.config)
    (batch,) = (batch for batch in language.evaluation(4) if (batch["labels"] == -1).any())  # with padding
    ids = torch.tensor(np.concatenate([batch["inputs"][:, :1], np.maximum(batch["labels"], 0)], axis=1)).long()
    labels = torch.tensor(np.concatenate([batch["inputs"][:, :1], batch["labels"]], axis=1)).long()
    out = reference.model(ids, labels=torch.where(labels < 0, -100, labels))  # transformers shifts the labels itself
    out.loss.backward()

    run = jax.jit(lambda model, batch: value_and_grad(language.loss, model, batch, accumulate))
    loss, _, gradient, carry = run(model, jax.device_put(batch))
    assert carry is None
    np.testing.assert_allclose(float(loss), out.loss.item(), rtol=1e-5)
    named = weightmap.save(gradient, hf_gpt2.rows(model.config))
    same_gradients(named, torch_gradients(reference.model, tmp_path / "gradients"))


def test_batch_depends_only_on_step_and_rows() -> None:
    """Rows start with the start token, and every token is a label once per epoch."""
    one, other = task(), task()
    assert isinstance(one, Task)
    batches = [one.batch(step, 3) for step in range(3)]
    for step in (2, 0, 1):
        for name, array in other.batch(step, 3, slice(1, 3)).items():
            np.testing.assert_array_equal(array, batches[step][name][1:3])
    assert one.sequences == one.examples == 9
    for batch in batches:
        assert batch["fresh"].all()
        assert (batch["inputs"][:, 0] == CONFIG.start_id).all()
        inside = batch["labels"][:, :-1] >= 0
        np.testing.assert_array_equal(batch["inputs"][:, 1:][inside], batch["labels"][:, :-1][inside])
    labels = np.concatenate([batch["labels"] for batch in batches]).reshape(-1)
    np.testing.assert_array_equal(np.sort(labels[labels >= 0]), np.sort(one.train.ids))


def test_metrics_do_not_depend_on_the_batch_size() -> None:
    language, model = task(), initialise(GPT2(CONFIG), 0)
    results = [language.metrics(sums(language, model, language.evaluation(size))) for size in (1, 4, 9)]
    for metrics in results:
        assert metrics == pytest.approx(results[0], rel=1e-5)
    loss = results[0]["loss"]
    assert results[0]["perplexity"] == pytest.approx(math.exp(loss))
    assert results[0]["bits_per_byte"] == pytest.approx(loss / 3 / math.log(2))
    assert results[0]["word_perplexity"] == pytest.approx(math.exp(4 * loss), rel=1e-5)


def test_dropout_depends_only_on_the_key() -> None:
    language = task(replace(CONFIG, dropout=0.3))
    model, batch = initialise(GPT2(language.config), 0), jax.device_put(language.batch(0, 2))
    loss = jax.jit(lambda model, key: language.loss(model, batch, None, key)[0].loss)
    keys = [None, *jax.random.split(jax.random.key(0))]
    losses = [float(loss(model, key)) for key in keys]
    assert len(set(losses)) == 3
    assert losses == [float(loss(model, key)) for key in keys]


def test_adapter_training_lowers_the_loss() -> None:
    """The initial adapter changes nothing, training lowers the loss, and the merged model has the same loss."""
    language, model = task(), initialise(GPT2(CONFIG), 0)
    settings = LoRA(rank=2)
    adapter = lora.initial_adapter(GPT2(CONFIG), settings, 0)
    assert set(adapter) == {"layers.attention.qkv"}
    before = float(sums(language, model, language.evaluation(9)).loss)
    attached = lora.attach(model, adapter, settings.scale)
    assert float(sums(language, attached, language.evaluation(9)).loss) == pytest.approx(before, rel=1e-6)

    def whole(trained: Any, base: Any) -> Any:
        return lora.attach(base, trained, settings.scale)

    stepper = Stepper(
        language, Optimizer("adamw", learning_rate=3e-2), Schedule("constant", 0), Training(steps=8, batch_size=9),
        whole, base=lambda: model,
    )  # fmt: skip
    state = stepper.init_state(adapter)
    assert state.carry is None
    for step in range(8):
        state, _ = stepper.update(state, jax.device_put(language.batch(step, 9)))
    after = float(sums(language, lora.attach(model, state.model, settings.scale), language.evaluation(9)).loss)
    assert after < 0.99 * before
    merged = lora.merge(model, state.model, settings.scale)
    assert float(sums(language, merged, language.evaluation(9)).loss) == pytest.approx(after, rel=1e-5)


def test_no_preparation_and_no_carry() -> None:
    language, model = task(), initialise(GPT2(CONFIG), 0)
    assert language.carry(3) is None
    for path, leaf in leaves(language.prepare_model(model)).items():
        assert leaf is leaves(model)[path]
    assert language.flops == 3 * gpt2_language.flops(CONFIG, LENGTH)
    assert any("32 tokens" in note for note in language.notes(4))


@pytest.mark.parametrize(
    ("config", "objective", "message"),
    [
        ({}, {"length": 33}, r"objective.length=33 exceeds the model's 32 positions; set --objective.length 32"),
        ({}, {"update": 8}, r"objective.update=8 has no effect with a GPT-2.*remove objective.update"),
        ({}, {"continued": True}, "objective.continued"),
        ({}, {"commit": 1e-3}, "objective.commit"),
        ({}, {"codebooks": "data"}, "objective.codebooks"),
        ({"cross": True}, {}, "cross-attention"),
    ],
)
def test_unsupported_objectives_are_refused(config: dict[str, Any], objective: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        task(replace(CONFIG, **config), **objective)
    task(update=LENGTH)  # the default, so it is accepted


def test_both_architectures_are_language_models() -> None:
    """Both modules implement the protocol, so that families can refer to them."""
    for architecture in (gpt2_language, vq_language):
        assert isinstance(architecture, LanguageModel)
    assert not gpt2_language.has_codebooks(CONFIG)
    assert jnp.isfinite(gpt2_language.flops(CONFIG, 8))
