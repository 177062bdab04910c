"""Language modelling: predict the next token of a long row of text, bytes or pixels, with what came before in mind.

The task knows no model. What it asks of an architecture is `LanguageModel`, which a module of flaxen.models provides.
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
    """What the task reads of a model's configuration."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def pad_id(self) -> int: ...
    @property
    def start_id(self) -> int:
        """What stands before the first token of a sequence."""

    @property
    def eos_ids(self) -> tuple[int, ...]: ...


@runtime_checkable
class LanguageModel(Protocol):
    """What the task knows of an architecture: functions of its configuration or of a model. A module with these names
    will do, such as flaxen.models.vq_language or flaxen.models.gpt2_language."""

    def adapt_config(self, config: Any, objective: LanguageObjective, image: tuple[int, ...], training: bool) -> Any:
        """The configuration for data of this kind; `image` is the shape of its images, () for text and bytes.
        ValueError if a model cannot be trained on it."""

    def check(self, config: Any, objective: LanguageObjective) -> None:
        """ValueError if a model with this configuration cannot be trained or evaluated so."""

    def notes(self, config: Any) -> list[str]:
        """What a user should know of the model before a run."""

    def flops(self, config: Any, length: int) -> float:
        """Floating-point operations of the matmuls in the forward pass of one sequence."""

    def has_codebooks(self, config: Any) -> bool:
        """Whether settings of codebooks mean anything."""

    def initial_carry(self, config: Any, rows: int) -> Any:
        """What is carried from chunk to chunk of a sequence, before the first; None if nothing is. Rows first."""

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
        """Sums over labels that are not negative, and what is carried to the next chunk. Rows that are `fresh` begin
        from nothing. With a key there is noise, and the sums have the gradients to train with."""

    def prepare(self, model: Any, inputs: Int[Array, "B T"], key: Array, objective: LanguageObjective) -> Any:
        """The model that training starts from, given some of the data."""


class Language(Task):
    """A sequence is trained on in chunks, one update for each; an example is a chunk."""

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
                f"objective.length={objective.length} must be a multiple of the {math.prod(data.shape)} numbers of a "
                f"picture of shape {data.shape}"
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
                f"data.kind {data.kind} reads bytes as they are, and this model's tokens are a vocabulary's; leave "
                "--model.tokenizer out, or read the files with --data.kind text"
            )
        try:
            config = architecture.adapt_config(setup.config, objective, opened.shape, training)
        except ValueError as error:
            raise InputError(str(error)) from None
        return cls(architecture, config, objective, setup.tokenizer, opened, seed, split)

    def describe_evaluated(self, limit: int | None, skipped: int) -> str:
        return super().describe_evaluated(limit, skipped).replace("examples", "sequences")

    def _check_ids(self, name: str, stream: Stream) -> None:
        if name == "train" and not len(stream):
            raise InputError("there is nothing to train on: the training data is empty")
        if not len(stream):
            return
        n = min(len(stream), 1 << 16)
        largest = max(int(stream.rows(np.array([at]), n).max()) for at in (0, len(stream) - n))
        if largest >= self.config.vocab_size:
            raise InputError(
                f"the {name} data holds id {largest} and the model's vocabulary ends at {self.config.vocab_size - 1}; "
                "they do not fit"
            )

    def batch(self, step: int, size: int, rows: slice = slice(None)) -> Batch:
        first, last, _ = rows.indices(size)
        number, chunk = divmod(step, self.chunks)
        chosen = examples(number, (first, last - first), size, self.sequences, self.seed)
        return self._chunk(self.train, chosen * self.objective.length, chunk)

    def _chunk(self, stream: Stream, starts: np.ndarray, chunk: int, fresh: bool | None = None) -> Batch:
        """Chunk number `chunk` of the sequences that start there. `fresh` overrides that the first one begins anew."""
        c, length = self.config, self.objective.chunk
        at = starts + chunk * length
        fresh = chunk == 0 if fresh is None else fresh
        inner = np.full(len(at), not fresh)
        inputs, targets = pieces(stream, at, inner, length, c.start_id, c.pad_id)
        # By place and not by id: where a vocabulary pads with its end token, that token is a label like any other.
        labels = np.where(at[:, None] + np.arange(length) >= len(stream), -1, targets)
        return {"inputs": inputs, "labels": labels, "fresh": ~inner}

    def evaluation(self, size: int, limit: int | None = None) -> Iterator[Batch]:
        """Sequences in order, each from nothing; or all as one text for each row of the batch."""
        n = min(self.validation_examples, limit or self.validation_examples)
        length = self.objective.length
        if self.objective.continued:
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
            values["word_perplexity"] = math.exp(min(nats / self.measure.words, 700.0))
        return values

    @cached_property
    def measure(self) -> TextSize:
        """Of what is evaluated on; if there is nothing, of what is trained on."""
        return (self.held if len(self.held) else self.train).measured()

    @property
    def fingerprint(self) -> dict[str, Any]:
        return {"training_data": self.train.identity, "validation_data": self.held.identity}

    def notes(self, size: int) -> list[str]:
        kind = f"{self.objective.length:,} tokens, {self.chunks} update(s) of {self.objective.chunk:,}"
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
            return {"reads": f"{len(inputs):,} pixels of shape {self.data.shape}: {numbers} …"}
        text = self.tokenizer.decode(np.maximum(labels, 0).tolist())
        return {"reads": self.tokenizer.decode(inputs.tolist()), "writes": text}

    def prepare_model(self, model: Any) -> Any:
        inputs = jnp.asarray(self.batch(0, min(8, self.sequences))["inputs"])
        return self.architecture.prepare(model, inputs, jax.random.key(self.seed), self.objective)
