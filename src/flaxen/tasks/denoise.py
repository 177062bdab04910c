"""Span corruption: the model reads a text with masked spans and generates the masked tokens. T5's pre-training task."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from jax import Array

from flaxen.data.order import examples
from flaxen.data.span_corruption import corrupt, lengths, restore
from flaxen.data.store import Tokens, open_corpus
from flaxen.data.tokenizers import ByteTokenizer, Tokenizer
from flaxen.errors import InputError
from flaxen.nn.loss import Sums
from flaxen.tasks.objective import DenoiseObjective
from flaxen.tasks.task import Batch, ModelFamily, Setup, Task

EVALUATION = 2**62  # step number of the validation noise, larger than any training step


class Denoise(Task):
    """Span corruption. An example is a row of tokens cut from the concatenated documents."""

    def __init__(
        self,
        family: ModelFamily,
        config: Any,
        objective: DenoiseObjective,
        tokenizer: Tokenizer,
        train: Tokens,
        validation: Tokens,
        seed: int,
    ):
        # ByT5 masks longer spans, because a byte is shorter than a token.
        mean_span = objective.mean_span or (20.0 if isinstance(tokenizer, ByteTokenizer) else 3.0)
        self.lengths = lengths(objective.input_length, objective.noise_density, mean_span)
        self.config, self.tokenizer, self.objective, self.seed = config, tokenizer, objective, seed
        if not tokenizer.sentinels:
            raise InputError(
                "the tokenizer has no sentinels (<extra_id_0>, <extra_id_1>, …), which replace the masked spans; "
                "use a T5 tokenizer or train one with `flaxen vocab`"
            )
        if self.lengths.spans > len(tokenizer.sentinels):
            raise InputError(
                f"inputs of {objective.input_length} tokens have {self.lengths.spans} masked spans, but the tokenizer "
                f"has only {len(tokenizer.sentinels)} sentinels; reduce objective.input_length "
                "or increase objective.mean_span"
            )
        self.examples, self.validation_examples = len(train) // self.lengths.raw, len(validation) // self.lengths.raw
        if not self.examples:
            raise InputError(
                f"the training text has {len(train):,} tokens, fewer than the {self.lengths.raw} of one example; "
                "add text or reduce objective.input_length"
            )
        self._train, self._validation = train, validation
        self.tokens = self.lengths.inputs + self.lengths.targets
        # The backward pass takes twice the operations of the forward pass.
        self.flops = 3 * family.flops(config, self.lengths.inputs, self.lengths.targets)

    @classmethod
    def open(
        cls, setup: Setup, settings: Any, seed: int, split: str = "validation", training: bool = True
    ) -> "Denoise":
        train, validation = open_corpus(settings.data, setup.tokenizer)
        return cls(setup.family, setup.config, settings.objective, setup.tokenizer, train, validation, seed)

    def batch(self, step: int, size: int, rows: slice = slice(None)) -> Batch:
        first, last, _ = rows.indices(size)
        numbers = examples(step, (first, last - first), size, self.examples, self.seed)
        return self._corrupt(self._train, numbers, (self.seed, step), first)

    def evaluation(self, size: int, limit: int | None = None) -> Iterator[Batch]:
        """Iterate over the validation examples. Their masked spans never change, so that evaluations are comparable."""
        n = min(self.validation_examples, limit or self.validation_examples)
        for first in range(0, n, size):
            # The noise of a row depends on its number, here that of the example, so it is the same for every batch
            # size.
            batch = self._corrupt(
                self._validation, np.arange(first, min(first + size, n)), (self.seed, EVALUATION), first
            )
            fill = size - len(batch["labels"])
            yield {
                name: np.pad(array, ((0, fill), (0, 0)), constant_values=-1 if name == "labels" else 0)
                for name, array in batch.items()
            }

    def loss(self, model: Any, batch: dict[str, Array], carry: None, key: Array | None) -> tuple[Sums, None]:
        # The z-loss is part of the training loss only; evaluation reports the plain cross-entropy.
        z_loss = self.objective.z_loss if key is not None else 0.0
        return model.loss(batch["input_ids"], batch["labels"], z_loss=z_loss, key=key)[1], None

    def further_metrics(self, loss: float) -> dict[str, float]:
        return {"bits_per_byte": loss / math.log(2)} if isinstance(self.tokenizer, ByteTokenizer) else {}

    @property
    def fingerprint(self) -> dict[str, Any]:
        parts = {"training_data": self._train, "validation_data": self._validation}
        names = {name: f"{p.store.digest}[{p.first}:{p.last}]" for name, p in parts.items()}
        return names | {"example": self.lengths._asdict()}

    def notes(self, size: int) -> list[str]:
        n = self.lengths
        return [
            f"{self.examples:,} training and {self.validation_examples:,} validation examples of {n.raw} tokens; each "
            f"has {n.noise} tokens in {n.spans} masked span(s): {n.inputs} input tokens, {n.targets} target tokens"
        ]

    def format_example(self, batch: Batch, row: int) -> dict[str, str]:
        """Format an example as text: the original, the model's input and its target."""
        inputs, labels = batch["input_ids"][row], batch["labels"][row]
        raw = restore(inputs, labels, self.tokenizer.sentinels, self.tokenizer.eos_id)
        text = self.tokenizer.decode(raw.tolist())
        return {"text": text, "input": self._decode_spans(inputs), "target": self._decode_spans(labels)}

    def vocabulary(self) -> str:
        first = ", ".join(map(str, self.tokenizer.sentinels[:3]))
        return super().vocabulary().replace(" ids;", f" ids, sentinels {first}, …;")

    def why_no_validation(self) -> str:
        return f" (an example has {self.lengths.raw} tokens)"

    def describe_evaluated(self, limit: int | None, skipped: int) -> str:
        n = min(self.validation_examples, limit or self.validation_examples)
        return f"{n:,} examples, {n * self.lengths.targets:,} target tokens"

    def _decode_spans(self, ids: np.ndarray) -> str:
        """Decode with the sentinels shown as ‹0›, ‹1›, …: ByT5's, for example, are bytes that never occur in text."""
        text, number, sentinels = "", 0, self.tokenizer.sentinels
        piece: list[int] = []
        for id in ids.tolist():
            if number < self.lengths.spans and id == sentinels[number]:
                text, piece, number = f"{text}{self.tokenizer.decode(piece)} ‹{number}› ", [], number + 1
            else:
                piece.append(id)
        return text + self.tokenizer.decode(piece)

    def _corrupt(self, tokens: Tokens, numbers: np.ndarray, key: tuple[int, int], first_row: int) -> Batch:
        """Mask spans in the examples with these numbers. The noise of a row depends on `key` and its row number."""
        raw = tokens.rows(numbers * self.lengths.raw, self.lengths.raw)
        inputs, labels = corrupt(raw, self.lengths, self.tokenizer.sentinels, self.tokenizer.eos_id, key, first_row)
        return {"input_ids": inputs, "labels": labels}
