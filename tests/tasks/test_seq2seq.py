"""Packed and grouped batches give the same loss and gradients; evaluation covers each pair once."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxen import families
from flaxen.data.pair_store import open_pairs
from flaxen.data.pairs import Pairs
from flaxen.data.tokenizers import ByteTokenizer
from flaxen.errors import InputError
from flaxen.models.t5 import T5, Config
from flaxen.nn.param import initialise
from flaxen.tasks.objective import EvalGeneration, Seq2SeqObjective
from flaxen.tasks.seq2seq import Seq2Seq
from flaxen.train.accumulate import value_and_grad
from flaxen.train.loop import evaluate
from flaxen.train.step import scorer
from flaxen.tree import leaves

TINY = Config(
    vocab_size=384, d_model=16, d_head=8, d_ff=24, n_layers=1, n_decoder_layers=1, n_heads=2, radius=5, global_block=4,
    dropout=0.0,
)  # fmt: skip
BYTES = ByteTokenizer()
OBJECTIVE = Seq2SeqObjective(source_length=48, target_length=24, shapes=3)
NO_GENERATION = EvalGeneration(examples=0)


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = np.random.default_rng(0)

    def word() -> Any:
        return "".join(draw.choice(list("abcdef"), draw.integers(2, 7)))

    directory = tmp_path_factory.mktemp("pairs")
    rows = []
    for i in range(60):
        words = [word() for _ in range(draw.integers(1, 9))]
        rows.append({"id": f"p{i}", "source": " ".join(words), "target": words[0]})
    (directory / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return directory


def make(
    material: Path, config: Config = TINY, generation: EvalGeneration = NO_GENERATION, **objective: Any
) -> Seq2Seq:
    pairs = Pairs(train=(str(material / "pairs.jsonl"),), validation_percent=20.0, cache=material / "cache")
    settings = dataclasses.replace(OBJECTIVE, **objective)
    return Seq2Seq(families.T5, config, settings, generation, BYTES, *open_pairs(pairs, BYTES), 3)


def texts(task: Seq2Seq, batch: dict[str, np.ndarray]) -> list[tuple[str, str]]:
    """The pairs of a batch, row by row."""
    rows = [task.format_example(batch, row) for row in range(len(batch["labels"]))]
    return [pair for row in rows for pair in zip(row["input"].split(" ┃ "), row["target"].split(" ┃ "))]


@pytest.mark.parametrize("attention", ["full", "local", "transient-global"])
def test_packed_training_equals_separate_training(material: Path, attention: str) -> None:
    """One batch of all packed rows and one of all pairs have the same loss and gradients."""
    config = dataclasses.replace(TINY, attention=attention)
    model = initialise(T5(config), 0)
    packed, grouped = make(material, config, batching="packed"), make(material, config, shapes=1)
    assert packed.examples < grouped.examples
    results = []
    for task in (packed, grouped):
        batch = task.batch(0, task.examples)
        assert sorted(texts(task, batch)) == sorted(texts(grouped, grouped.batch(0, grouped.examples)))
        loss, sums, gradient, _ = jax.jit(lambda model, batch, task=task: value_and_grad(task.loss, model, batch, 1))(
            model, batch
        )
        results.append((float(loss), float(sums.weight), leaves(gradient)))
    (loss, weight, gradient), (other_loss, other_weight, other_gradient) = results
    assert weight == other_weight
    assert loss == pytest.approx(other_loss, rel=1e-6)
    for name, leaf in gradient.items():
        scale = float(jnp.abs(other_gradient[name]).max())
        np.testing.assert_allclose(leaf, other_gradient[name], rtol=0, atol=2e-5 * scale)


def test_grouped_batches_have_few_shapes_and_little_padding(material: Path) -> None:
    task = make(material)
    batches = [task.batch(step, 8) for step in range(40)]
    sizes = {(batch["input_ids"].shape[1], batch["labels"].shape[1]) for batch in batches}
    assert len(sizes) <= 3 * 2
    assert all(n <= 48 and m <= 32 for n, m in sizes)
    assert len({tuple(row) for row in batches[0]["input_ids"].tolist()}) == 8  # no pair twice in a batch
    packed = make(material, batching="packed")
    assert 0 < packed.padding(4) < task.padding(8) + 0.5 < 1
    real = sum((batch[name] > 0).sum() for batch in batches[:6] for name in ("segments", "target_segments"))
    total = sum(batch[name].size for batch in batches[:6] for name in ("segments", "target_segments"))
    assert task.padding(8, 6) == pytest.approx(1 - real / total)
    assert any("padding" in note for note in task.notes(8))


def test_selected_rows_equal_those_of_the_full_batch(material: Path) -> None:
    for batching in ("grouped", "packed"):
        task = make(material, batching=batching)
        full, part = task.batch(5, 8), task.batch(5, 8, slice(2, 5))
        for name, array in part.items():
            np.testing.assert_array_equal(array, full[name][2:5])


@pytest.mark.parametrize("size", [1, 5, 12])
def test_evaluation_does_not_depend_on_batch_size_or_packing(material: Path, size: int) -> None:
    model = initialise(T5(TINY), 0)
    tasks = [make(material), make(material, batching="packed")]
    seen = [pair for batch in tasks[0].evaluation(size) for pair in texts(tasks[0], batch) if pair[0]]
    assert len(seen) == len(set(seen)) == tasks[0].validation_examples == 12
    expected = evaluate(tasks[0], scorer(tasks[0]), model, 12)
    for task in tasks:
        assert evaluate(task, scorer(task), model, size) == pytest.approx(expected, rel=1e-5)
    assert set(expected) == {"loss", "perplexity", "accuracy"}


def test_label_smoothing_affects_training_but_not_evaluation(material: Path) -> None:
    model = initialise(T5(TINY), 0)
    plain, smooth = make(material), make(material, label_smoothing=0.2)
    batch = {name: jnp.asarray(array) for name, array in plain.batch(0, 8).items()}
    key = jax.random.key(0)

    def value(task: Any, key: Any) -> Any:
        return float(task.loss(model, batch, None, key)[0].loss)

    assert value(plain, key) == pytest.approx(value(smooth, None))
    assert value(smooth, key) != pytest.approx(value(plain, key))


def test_generated_text_is_scored_and_saved(material: Path, tmp_path: Path) -> None:
    task = make(material, generation=EvalGeneration(examples=5, num_beams=2, max_new_tokens=6))
    generation_metrics = task.generate_and_score_sample(initialise(T5(TINY), 0), tmp_path / "out.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == [f"p{i}" for i in range(5)]
    assert tuple(generation_metrics) == task.generation_metrics
    rows = [json.loads(line) for line in (material / "pairs.jsonl").read_text().splitlines()]
    assert [line["reference"] for line in lines] == [row["target"] for row in rows[:5]]
    assert make(material).generate_and_score_sample(initialise(T5(TINY), 0), tmp_path / "none") == {}
    assert not (tmp_path / "none").exists()


def test_long_pairs_are_truncated_and_counted_or_refused(material: Path) -> None:
    task = make(material, source_length=16)
    assert any("sources to 16 tokens" in note for note in task.notes(4))
    batch = task.batch(0, 48)
    assert batch["input_ids"].shape[1] == 16
    full = batch["input_ids"][(batch["segments"] > 0).all(axis=1)]
    assert len(full)
    assert (full[:, -1] == BYTES.eos_id).all()
    with pytest.raises(InputError, match=r"the source of training pair \d+ has \d+ tokens, more than objective.source"):
        make(material, source_length=16, long="error")
