"""Sequence-to-sequence: the model reads a source text and generates its target. Used to fine-tune T5 and LongT5."""

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from jax import Array

from flaxen.atomic import atomic_file
from flaxen.data.order import examples
from flaxen.data.pair_store import Groups, PairLengths, PairTokens, fitting, open_pairs, pack, shapes
from flaxen.data.pairs import Pair
from flaxen.data.tokenizers import Tokenizer
from flaxen.errors import InputError
from flaxen.generate.batches import batches
from flaxen.generate.options import Options
from flaxen.generate.run import Generator
from flaxen.generate.search import prepare
from flaxen.metrics import text
from flaxen.nn.loss import Sums
from flaxen.tasks.objective import EvalGeneration, Seq2SeqObjective
from flaxen.tasks.task import Batch, ModelFamily, Setup, Task

SIDES = ("source", "target")


class Seq2Seq(Task):
    """Fine-tuning on pairs. An example is a pair or, when packed, a row of pairs that do not attend to each other."""

    def __init__(
        self,
        family: ModelFamily,
        config: Any,
        objective: Seq2SeqObjective,
        generation: EvalGeneration,
        tokenizer: Tokenizer,
        train: PairTokens,
        validation: PairTokens,
        seed: int,
    ):
        self.family, self.config, self.objective, self.generation = family, config, objective, generation
        self.tokenizer, self.seed = tokenizer, seed
        self.limits = PairLengths(objective.source_length, objective.target_length)
        self._train, self._validation = train, validation
        if not len(train):
            raise InputError(f"{train.source.name} has no pairs left for training; add pairs")
        lengths = self._clip_lengths(train, "training")
        self._validation_lengths = self._clip_lengths(validation, "validation")
        # XLA compiles a step for each combination of source and target length, so targets get half as many lengths.
        self.shapes = tuple(
            shapes(side, count) for side, count in zip(lengths.T, (objective.shapes, -(-objective.shapes // 2)))
        )
        self.packed = pack(lengths, self.limits) if objective.batching == "packed" else None
        self._groups = Groups(lengths, seed)
        self.examples = len(self.packed or train)
        self.pairs, self.validation_examples = len(train), len(validation)
        self.tokens = round(lengths.sum() / self.examples)
        # FLOPs of a pair of mean length: slightly below the mean FLOPs, because attention is quadratic in the length.
        mean = lengths.mean(axis=0).round().astype(int).tolist()
        self.flops = 3 * family.flops(config, *mean) * len(train) / self.examples
        self.generation_metrics: tuple[str, ...] = text.NAMES if generation.examples and len(validation) else ()

        self._options = generation.options(self.limits.target)
        # Read now, so that errors in the data appear immediately and not at the first evaluation.
        self._references = self._read_pairs(generation.examples) if self.generation_metrics else []

    @classmethod
    def open(
        cls, setup: Setup, settings: Any, seed: int, split: str = "validation", training: bool = True
    ) -> "Seq2Seq":
        train, validation = open_pairs(settings.data, setup.tokenizer)
        options = (settings.objective, settings.generation, setup.tokenizer)
        return cls(setup.family, setup.config, *options, train, validation, seed)

    def _clip_lengths(self, part: PairTokens, name: str) -> np.ndarray:
        """Return source and target lengths [pairs, 2], clipped to the limits; or raise an error for longer pairs."""
        over = part.lengths > np.array(self.limits)
        if over.any() and self.objective.long == "error":
            number = int(np.flatnonzero(over.any(axis=1))[0])
            side = int(np.flatnonzero(over[number])[0])
            raise InputError(
                f"{part.source.name}: the {SIDES[side]} of {name} pair {number + 1} has {part.lengths[number, side]:,} "
                f"tokens, more than objective.{SIDES[side]}_length={self.limits[side]} (in total, "
                f"{over.any(axis=1).sum():,} pairs are too long); "
                "increase the limit, or truncate them with --objective.long truncate"
            )
        return np.minimum(part.lengths, np.array(self.limits))

    def notes(self, size: int) -> list[str]:
        notes = [f"{self.pairs:,} training pairs, {self.validation_examples:,} validation pairs"]
        if self.packed is not None:
            notes[0] += f"; {self.examples:,} rows of {self.limits.source} + {self.limits.target} tokens"
        for part, name in ((self._train, "training"), (self._validation, "validation")):
            for side, limit, n in zip(SIDES, self.limits, (part.lengths > np.array(self.limits)).sum(axis=0)):
                if n:
                    notes.append(f"truncated {n:,} of {len(part):,} {name} {side}s to {limit:,} tokens")
        notes.append(f"{100 * self.padding(size):.1f} % of the tokens processed are padding")
        return notes

    def padding(self, size: int, batches: int = 64) -> float:
        """Fraction of padding in the first `batches` batches, or in one epoch if that is shorter."""
        real = total = 0
        for step in range(min(batches, -(-self.examples // size))):
            for name, batch in self.batch(step, size).items():
                if name in ("segments", "target_segments"):
                    real, total = real + int((batch > 0).sum()), total + batch.size
        return 1 - real / total

    def batch(self, step: int, size: int, rows: slice = slice(None)) -> Batch:
        if self.packed is not None:
            first, last, _ = rows.indices(size)
            numbers = examples(step, (first, last - first), size, self.examples, self.seed)
            return self._pad_rows(self._train, [self.packed[i] for i in numbers], self.limits)
        numbers = self._groups.batch(step, size)
        lengths = self._groups.lengths[numbers].max(axis=0)
        return self._pad_rows(self._train, [[i] for i in numbers[rows].tolist()], self._shape(lengths))

    def evaluation(self, size: int, limit: int | None = None) -> Iterator[Batch]:
        """Iterate over the validation pairs, never packed, so that metrics do not depend on `batching`."""
        n = min(self.validation_examples, limit or self.validation_examples)
        # Sorted by source length, to reduce padding.
        order = np.argsort(self._validation_lengths[:n, 0], kind="stable")
        for first in range(0, n, size):
            numbers = order[first : first + size]
            shape = self._shape(self._validation_lengths[numbers].max(axis=0))
            yield self._pad_rows(
                self._validation, [[i] for i in numbers.tolist()] + [[]] * (size - len(numbers)), shape
            )

    def loss(self, model: Any, batch: dict[str, Array], carry: None, key: Array | None) -> tuple[Sums, None]:
        # Label smoothing and z-loss are part of the training loss only; evaluation reports the plain cross-entropy.
        label_smoothing, z_loss = (
            (self.objective.label_smoothing, self.objective.z_loss) if key is not None else (0.0, 0.0)
        )
        segments, targets = batch["segments"], batch["target_segments"]
        # With one pair per row a mask suffices, and attention is cheaper with it than with numbered segments.
        masks = (segments, targets) if self.packed is not None else (segments > 0, None)
        options = {"smoothing": label_smoothing, "z_loss": z_loss, "key": key}
        return model.loss(batch["input_ids"], batch["labels"], *masks, **options)[1], None

    def generate_and_score_sample(self, model: Any, path: Path, skipped: set[str] | None = None) -> dict[str, float]:
        if not self.generation_metrics:
            return {}
        sizes = (self.generation.batch_size, self.generation.examples)
        return self.generate_and_score(model, self._options, *sizes, path, None)

    def generate_and_score(
        self,
        model: Any,
        options: Options,
        batch_size: int,
        limit: int | None,
        path: Path | None = None,
        sheet: Path | None = None,
        skipped: set[str] | None = None,
    ) -> dict[str, float]:
        """Generate targets for the first `limit` validation pairs, save them to `path` and return their metrics."""
        n = min(self.validation_examples, limit or self.validation_examples)
        prompts = [self._validation.pair(i, self.limits)[0].tolist() for i in range(n)]
        eos = self.config.eos_ids if options.eos_token_id is None else options.eos_token_id
        generator = Generator(prepare(self.family.decoder, model), options, self.config.pad_id, eos)
        outputs = generator.outputs(batches(prompts, batch_size, self.config.pad_id))
        # Outputs arrive grouped by length, not in the order of the prompts.
        texts = {output.prompt: self.tokenizer.decode(output.tokens) for output in outputs}
        predictions = [texts[i] for i in range(n)]
        pairs = self._references[:n] if n <= len(self._references) else self._read_pairs(n)
        if path is not None:
            with atomic_file(path) as file:
                for pair, prediction in zip(pairs, predictions):
                    line = {"id": pair.id, "prediction": prediction, "reference": pair.target}
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
        return text.score(predictions, [pair.target for pair in pairs])

    def _read_pairs(self, n: int) -> list[Pair]:
        """Read the first `n` validation pairs as original text, because decoding tokens may not restore it exactly."""
        first = self._validation.first
        return list(islice(self._validation.source.pairs(), first, first + n))

    def format_example(self, batch: Batch, row: int) -> dict[str, str]:
        """Format the pairs of a row as text: the model's input and its target."""

        def decode(ids: np.ndarray, segments: np.ndarray) -> str:
            texts = (ids[segments == i].tolist() for i in range(1, segments.max() + 1))
            return " ┃ ".join(map(self.tokenizer.decode, texts))

        return {
            "input": decode(batch["input_ids"][row], batch["segments"][row]),
            "target": decode(batch["labels"][row], batch["target_segments"][row]),
        }

    def describe_evaluated(self, limit: int | None, skipped: int) -> str:
        return super().describe_evaluated(limit, skipped).replace("examples", "pairs")

    @property
    def fingerprint(self) -> dict[str, Any]:
        return {"training_data": self._train.name, "validation_data": self._validation.name, "examples": self.examples}

    def _shape(self, lengths: np.ndarray) -> PairLengths:
        """Return the lengths to pad a batch to: a training shape, or the limit for longer validation pairs."""
        padded = [
            fitting(int(length), (*sizes, max(limit, int(length))))
            for length, sizes, limit in zip(lengths, self.shapes, self.limits)
        ]
        return PairLengths(*padded)

    def _pad_rows(self, part: PairTokens, rows: Sequence[Sequence[int]], shape: PairLengths) -> Batch:
        """Concatenate the pairs of each row and pad to `shape`. Segments number the pairs from 1; 0 is padding."""
        names = (("input_ids", "segments"), ("labels", "target_segments"))
        batch = {name: np.zeros((len(rows), n), np.int32) for pair, n in zip(names, shape) for name in pair}
        # From 0 to -1: padding is not a label.
        batch["labels"] -= 1
        for row, numbers in enumerate(rows):
            at = [0, 0]
            for segment, number in enumerate(numbers, 1):
                for side, tokens in enumerate(part.pair(int(number), self.limits)):
                    place = slice(at[side], at[side] + len(tokens))
                    batch[names[side][0]][row, place], batch[names[side][1]][row, place] = tokens, segment
                    at[side] += len(tokens)
        return batch
