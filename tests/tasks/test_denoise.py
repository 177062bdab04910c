"""Span corruption: batches depend only on their step, evaluation covers each example once, and no text is lost."""

import math
import re
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest

from flaxen import families
from flaxen.data.corpus import Corpus
from flaxen.data.span_corruption import restore
from flaxen.data.store import Tokens, open_corpus
from flaxen.data.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer
from flaxen.data.vocabulary import train_bpe
from flaxen.errors import InputError
from flaxen.models.t5 import T5, Config
from flaxen.nn.loss import Sums
from flaxen.nn.param import initialise
from flaxen.tasks.denoise import Denoise
from flaxen.tasks.objective import DenoiseObjective
from flaxen.tasks.task import Batch
from flaxen.train.loop import evaluate
from flaxen.train.step import scorer

TINY = Config(vocab_size=384, d_model=16, d_head=8, d_ff=24, n_layers=1, n_decoder_layers=1, n_heads=2)
OBJECTIVE = DenoiseObjective(input_length=32, mean_span=3.0)
BYTES = ByteTokenizer()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("denoise") / "text.txt"
    path.write_text("\n".join(topics[name] for name in sorted(topics))[:24_000], encoding="ascii", errors="ignore")
    return path


def corpus(text: Path, tokenizer: Tokenizer) -> tuple[Tokens, Tokens]:
    return open_corpus(Corpus((str(text),), validation_percent=10.0, cache=text.parent / "cache"), tokenizer)


@pytest.fixture(scope="module")
def task(text: Path) -> Denoise:
    return Denoise(families.T5, TINY, OBJECTIVE, BYTES, *corpus(text, BYTES), 7)


def assert_same(left: Batch, right: Batch) -> None:
    assert left.keys() == right.keys() == {"input_ids", "labels"}
    for name, array in left.items():
        np.testing.assert_array_equal(array, right[name])


def raw(task: Denoise, batch: Batch) -> list[str]:
    """The original texts of the rows."""
    sides = zip(batch["input_ids"], batch["labels"])
    return [BYTES.decode(restore(*both, BYTES.sentinels, BYTES.eos_id).tolist()) for both in sides]


def test_batch_depends_only_on_seed_and_step(task: Denoise, text: Path) -> None:
    again = Denoise(families.T5, TINY, OBJECTIVE, ByteTokenizer(), *corpus(text, BYTES), 7)
    for step in (0, 1, 5000):
        batch = task.batch(step, 12)
        assert batch["input_ids"].shape == (12, task.lengths.inputs)
        assert batch["labels"].shape == (12, task.lengths.targets)
        assert_same(batch, task.batch(step, 12))
        assert_same(batch, again.batch(step, 12))
        for rows in (slice(0, 5), slice(5, 12), slice(3, 4), slice(12, 12)):
            assert_same(task.batch(step, 12, rows), {name: array[rows] for name, array in batch.items()})
    other = Denoise(families.T5, TINY, OBJECTIVE, BYTES, *corpus(text, BYTES), 8)
    assert raw(task, task.batch(0, 12)) != raw(other, other.batch(0, 12))


def test_epoch_has_each_example_once(task: Denoise) -> None:
    size = 16
    steps = -(-task.examples // size)
    batches = [task.batch(step, size) for step in range(steps)]
    rows = [row for batch in batches for row in raw(task, batch)][: task.examples]
    text = task._train.rows(np.arange(task.examples) * task.lengths.raw, task.lengths.raw)
    assert sorted(rows) == sorted(BYTES.decode(row.tolist()) for row in text)


def test_noise_differs_by_step_and_from_evaluation(text: Path) -> None:
    """Five examples, used for both training and validation, are masked differently each time."""
    _, held = corpus(text, BYTES)
    lengths = Denoise(families.T5, TINY, OBJECTIVE, BYTES, held, held, 7).lengths
    few = Tokens(held.store, held.first, held.first + 5 * lengths.raw)
    task = Denoise(families.T5, TINY, OBJECTIVE, BYTES, few, few, 7)
    assert (task.examples, task.validation_examples) == (5, 5)

    def by_text(batch: Batch) -> dict[str, bytes]:
        return dict(zip(raw(task, batch), (row.tobytes() for row in batch["input_ids"])))

    (evaluation,) = task.evaluation(5)
    seen = [by_text(evaluation), *(by_text(task.batch(step, 5)) for step in range(4))]
    assert all(inputs.keys() == seen[0].keys() for inputs in seen)
    for name in seen[0]:
        assert len({inputs[name] for inputs in seen}) == len(seen)


@pytest.mark.parametrize("limit", [None, 10])
def test_evaluation_has_each_example_once(limit: int | None, task: Denoise) -> None:
    """The masked spans are the same for any batch size; filler rows, without labels, complete the last batch."""
    assert task.validation_examples > 10
    n = limit or task.validation_examples
    expected = task._validation.rows(np.arange(n) * task.lengths.raw, task.lengths.raw)
    first: Batch = {}
    for size in (1, 3, 64, 3):
        batches = list(task.evaluation(size, limit))
        assert len(batches) == -(-n // size)
        assert {len(batch["labels"]) for batch in batches} == {size}
        batch_arrays = {name: np.concatenate([batch[name] for batch in batches]) for name in ("input_ids", "labels")}
        assert (batch_arrays["labels"][n:] == -1).all()
        assert (batch_arrays["labels"][:n] >= 0).all()
        batch_arrays = {name: array[:n] for name, array in batch_arrays.items()}
        assert_same(batch_arrays, first or batch_arrays)
        first = batch_arrays
    assert raw(task, first) == [BYTES.decode(row.tolist()) for row in expected]


def test_evaluation_does_not_depend_on_the_batch_size(task: Denoise) -> None:
    """Tolerance 1e-6: only the order of additions differs."""
    model, score = initialise(T5(TINY), 0), scorer(task)
    results = [evaluate(task, score, model, size) for size in (1, 3, 64)]
    for values in results[1:]:
        assert values == pytest.approx(results[0], rel=1e-6)


def test_bits_per_byte_only_for_bytes(task: Denoise, text: Path, tmp_path: Path) -> None:
    sums = Sums(*map(np.float64, (30.0, 5.0, 20.0)))
    assert task.metrics(sums) == {
        "loss": 1.5, "perplexity": math.exp(1.5), "accuracy": 0.25, "bits_per_byte": 1.5 / math.log(2)
    }  # fmt: skip
    assert task.metrics(Sums(*map(np.float64, (1e6, 0.0, 1.0))))["perplexity"] < math.inf
    pieces = bpe(text, tmp_path)
    assert "bits_per_byte" not in Denoise(families.T5, TINY, OBJECTIVE, pieces, *corpus(text, pieces), 0).metrics(sums)


def bpe(text: Path, directory: Path, sentinels: int = 20) -> Tokenizer:
    for name, content in train_bpe([text.read_text()], 300 + sentinels, sentinels).items():
        (directory / name).write_bytes(content)
    tokenizer = load_tokenizer(directory)
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_formatted_example_restores_the_original(kind: str, text: Path, tmp_path: Path) -> None:
    """The original is part of the corpus; joining input and target at their numbered sentinels restores it."""
    tokenizer = ByteTokenizer() if kind == "bytes" else bpe(text, tmp_path)
    task = Denoise(families.T5, TINY, OBJECTIVE, tokenizer, *corpus(text, tokenizer), 3)
    corpus_text = text.read_text().replace("\n", "")
    assert task.lengths.spans > 1
    for row in range(8):
        original, inputs, targets = task.format_example(task.batch(0, 8), row).values()
        assert original in corpus_text
        for side in (inputs, targets):
            assert re.findall(" ‹(.*?)› ", side) == [str(number) for number in range(task.lengths.spans)]
        unmasked, masked = (re.split(" ‹.*?› ", side) for side in (inputs, targets))
        assert unmasked.pop() == masked.pop(0) == ""  # nothing after the last sentinel, nothing before the first
        assert "".join(part for pair in zip(unmasked, masked) for part in pair) == original


def test_masked_spans_are_longer_for_bytes(text: Path, tmp_path: Path) -> None:
    usual, pieces = DenoiseObjective(512), bpe(text, tmp_path, sentinels=100)
    assert Denoise(families.T5, TINY, usual, BYTES, *corpus(text, BYTES), 0).lengths.spans == round(568 * 0.15 / 20)
    assert Denoise(families.T5, TINY, usual, pieces, *corpus(text, pieces), 0).lengths == (568, 85, 28, 512, 114)


def test_unsuitable_text_and_tokenizers_are_refused(text: Path, tmp_path: Path) -> None:
    train, validation = corpus(text, BYTES)
    short = Tokens(train.store, 0, 10)
    with pytest.raises(InputError, match="training text has 10 tokens, fewer than the 34 of one example"):
        Denoise(families.T5, TINY, OBJECTIVE, BYTES, short, validation, 0)
    assert Denoise(families.T5, TINY, OBJECTIVE, BYTES, train, short, 0).validation_examples == 0
    with pytest.raises(InputError, match="have 127 masked spans, but the tokenizer has only 100 sentinels"):
        Denoise(families.T5, TINY, DenoiseObjective(256, noise_density=0.5, mean_span=1.0), BYTES, train, validation, 0)
    bare = bpe(text, tmp_path, sentinels=0)
    with pytest.raises(InputError, match="the tokenizer has no sentinels"):
        Denoise(families.T5, TINY, OBJECTIVE, bare, train, validation, 0)
