"""Language modelling: predict the next token of a long sequence of text, bytes or pixels, with memory across chunks.

The task is independent of the model: it needs a `LanguageModel`, which modules of flaxen.models implement.
"""

import math
from collections.abc import Iterator
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Int

from flaxen.data.order import examples
from flaxen.data.stream_store import Splits, Stream, TextSize, open_streams, pieces
from flaxen.data.tokenizers import ByteTokenizer, Tokenizer
from flaxen.errors import InputError
from flaxen.nn.loss import Sums
from flaxen.tasks.objective import LanguageObjective
from flaxen.tasks.task import Batch, Setup, Task


@runtime_checkable
class LanguageConfig(Protocol):
    """The fields of a model's configuration that the task reads."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def pad_id(self) -> int: ...
    @property
    def start_id(self) -> int:
        """Id of the input token before the first token of a sequence."""

    @property
    def eos_ids(self) -> tuple[int, ...]: ...


@runtime_checkable
class LanguageModel(Protocol):
    """What the task needs from an architecture: functions of its configuration or of a model.

    Modules that define functions with these names implement it: flaxen.models.vq_language and
    flaxen.models.gpt2_language.
    """

    def adapt_config(self, config: Any, objective: LanguageObjective, image: tuple[int, ...], training: bool) -> Any:
        """Adapt the configuration to the data; `image` is the shape of its images, () for text and bytes.

        Raises a ValueError if the model cannot be trained on such data.
        """

    def check(self, config: Any, objective: LanguageObjective) -> None:
        """Raise a ValueError if this configuration cannot be trained or evaluated with the objective."""

    def notes(self, config: Any) -> list[str]:
        """Facts about the model to print before a run."""

    def flops(self, config: Any, length: int) -> float:
        """Floating-point operations of the matmuls in the forward pass for one sequence."""

    def has_codebooks(self, config: Any) -> bool:
        """Whether the model has codebooks, so that their settings have an effect."""

    def initial_carry(self, config: Any, rows: int) -> Any:
        """Return the initial carry: the memory passed from chunk to chunk, with rows on the first axis; or None."""

    def language_loss(
        self,
        model: Any,
        inputs: Int[Array, "B T"],
        labels: Int[Array, "B T"],
        fresh: Bool[Array, "B"],
        carry: Any,
        key: Array | None,
        objective: LanguageObjective,
    ) -> tuple[Sums, Any]:
        """Return the loss sums over non-negative labels, and the carry for the next chunk.

        Rows that are `fresh` start with empty memory. If `key` is given, there is noise such as dropout, and the sums
        are those of the training loss.
        """

    def prepare_model(self, model: Any, inputs: Int[Array, "B T"], key: Array, objective: LanguageObjective) -> Any:
        """Return the model to start training from, e.g. with codebooks initialised from some of the data."""


class Language(Task):
    """Language modelling. Each sequence is trained on in chunks, one training step per chunk; an example is a chunk."""

    def __init__(
        self,
        architecture: LanguageModel,
        config: LanguageConfig,
        objective: LanguageObjective,
        tokenizer: Tokenizer,
        data: Splits,
        seed: int,
        split: str = "validation",
    ):
        try:
            architecture.check(config, objective)
        except ValueError as error:
            raise InputError(str(error)) from None
        if data.shape and objective.length % math.prod(data.shape):
            raise InputError(
                f"objective.length={objective.length} must be a multiple of {math.prod(data.shape)}, the number "
                f"of values in an image of shape {data.shape}"
            )
        self.architecture, self.objective, self.tokenizer, self.data = architecture, objective, tokenizer, data
        self.config: Any = config
        self.seed, self.split = seed, split
        self.train, self.held = data.splits["train"], data.splits[split]
        for name, stream in (("train", self.train), (split, self.held)):
            self._check_ids(name, stream)
        self.chunks = objective.length // objective.chunk
        self.sequences = -(-len(self.train) // objective.length)
        self.examples = self.sequences * self.chunks
        self.validation_examples = -(-len(self.held) // objective.length)
        self.tokens, self.flops = objective.chunk, 3 * architecture.flops(config, objective.chunk)

    @classmethod
    def open(
        cls, setup: Setup, settings: Any, seed: int, split: str = "validation", training: bool = True
    ) -> "Language":
        data, objective, architecture = settings.data, settings.objective, setup.family.language
        opened = open_streams(data, setup.tokenizer)
        if data.kind != "text" and not isinstance(setup.tokenizer, ByteTokenizer):
            raise InputError(
                f"data.kind {data.kind} reads raw bytes, but this model has a tokenizer with a vocabulary; remove "
                "--model.tokenizer, or use --data.kind text"
            )
        try:
            config = architecture.adapt_config(setup.config, objective, opened.shape, training)
        except ValueError as error:
            raise InputError(str(error)) from None
        return cls(architecture, config, objective, setup.tokenizer, opened, seed, split)

    def describe_evaluated(self, limit: int | None, skipped: int) -> str:
        return super().describe_evaluated(limit, skipped).replace("examples", "sequences")

    def _check_ids(self, name: str, stream: Stream) -> None:
        """Raise an InputError if token ids at the start or end of the data are outside the model's vocabulary."""
        if name == "train" and not len(stream):
            raise InputError("the training data is empty; add files with --data.train")
        if not len(stream):
            return
        n = min(len(stream), 1 << 16)
        largest = max(int(stream.rows(np.array([start]), n).max()) for start in (0, len(stream) - n))
        if largest >= self.config.vocab_size:
            raise InputError(
                f"the {name} data contains token id {largest}, but the model's largest id is "
                f"{self.config.vocab_size - 1}; use a matching tokenizer"
            )

    def batch(self, step: int, size: int, rows: slice = slice(None)) -> Batch:
        first, last, _ = rows.indices(size)
        # Consecutive steps read consecutive chunks of the same sequences.
        number, chunk = divmod(step, self.chunks)
        sequences = examples(number, (first, last - first), size, self.sequences, self.seed)
        return self._chunk(self.train, sequences * self.objective.length, chunk)

    def _chunk(self, stream: Stream, starts: np.ndarray, chunk: int, fresh: bool | None = None) -> Batch:
        """Return one chunk of the sequences at these starts.

        By default only the first chunk of a sequence starts with empty memory.
        """
        c, length = self.config, self.objective.chunk
        at = starts + chunk * length
        fresh = chunk == 0 if fresh is None else fresh
        inner = np.full(len(at), not fresh)
        inputs, targets = pieces(stream, at, inner, length, c.start_id, c.pad_id)
        # Padding is recognised by position, not by id: some vocabularies pad with the end token, a valid label.
        labels = np.where(at[:, None] + np.arange(length) >= len(stream), -1, targets)
        return {"inputs": inputs, "labels": labels, "fresh": ~inner}

    def evaluation(self, size: int, limit: int | None = None) -> Iterator[Batch]:
        """Iterate over the sequences in order, each starting with empty memory.

        With `objective.continued`, each row of the batch reads its own contiguous part of the data as one text.
        """
        n = min(self.validation_examples, limit or self.validation_examples)
        length = self.objective.length
        if self.objective.continued:
            # Row i reads sequences i · rounds to (i + 1) · rounds - 1, one after the other.
            rounds = -(-n // size)
            starts = np.arange(size) * rounds * length
            for number in range(rounds * self.chunks):
                batch = self._chunk(self.held, starts, number, fresh=number == 0)
                batch["labels"][starts // length + number // self.chunks >= n] = -1
                yield batch
            return
        for first in range(0, n, size):
            numbers = first + np.arange(size)
            for chunk in range(self.chunks):
                batch = self._chunk(self.held, numbers * length, chunk)
                batch["labels"][numbers >= n] = -1
                yield batch

    def carry(self, rows: int) -> Any:
        return self.architecture.initial_carry(self.config, rows)

    def loss(self, model: Any, batch: dict[str, Array], carry: Any, key: Array | None) -> tuple[Sums, Any]:
        inputs, labels, fresh = batch["inputs"], batch["labels"], batch["fresh"]
        return self.architecture.language_loss(model, inputs, labels, fresh, carry, key, self.objective)

    def divisor(self, batch: dict[str, Array]) -> int | None:
        return batch["labels"].size if self.objective.normalise == "positions" else None

    def further_metrics(self, loss: float) -> dict[str, float]:
        if self.data.shape:
            return {"bits_per_dim": loss / math.log(2)}
        nats = loss * self.measure.tokens
        values = {"bits_per_byte": nats / self.measure.bytes / math.log(2)}
        if self.measure.words:
            # math.exp overflows a float above 709.
            values["word_perplexity"] = math.exp(min(nats / self.measure.words, 700.0))
        return values

    @cached_property
    def measure(self) -> TextSize:
        """Size of the validation text in tokens, words and bytes; if there is none, of the training text."""
        return (self.held if len(self.held) else self.train).measured()

    @property
    def fingerprint(self) -> dict[str, Any]:
        return {"training_data": self.train.identity, "validation_data": self.held.identity}

    def notes(self, size: int) -> list[str]:
        kind = f"{self.objective.length:,} tokens, {self.chunks} training step(s) of {self.objective.chunk:,}"
        return [
            f"{self.sequences:,} training and {self.validation_examples:,} {self.split} sequences of {kind} each",
            *self.architecture.notes(self.config),
        ]

    def evaluation_notes(self, size: int) -> list[str]:
        return self.notes(size)

    def format_example(self, batch: Batch, row: int) -> dict[str, str]:
        inputs, labels = batch["inputs"][row], batch["labels"][row]
        if self.data.shape:
            numbers = " ".join(map(str, inputs[1:33].tolist()))
            return {"input": f"{len(inputs):,} pixels of shape {self.data.shape}: {numbers} …"}
        text = self.tokenizer.decode(np.maximum(labels, 0).tolist())
        return {"input": self.tokenizer.decode(inputs.tolist()), "target": text}

    def prepare_model(self, model: Any) -> Any:
        inputs = jnp.asarray(self.batch(0, min(8, self.sequences))["inputs"])
        return self.architecture.prepare_model(model, inputs, jax.random.key(self.seed), self.objective)
