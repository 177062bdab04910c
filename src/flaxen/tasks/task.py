"""What the trainer and the commands know of a task: batches, a loss, metrics, and what to tell a person."""

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jax import Array

from flaxen.data.images import ImageProcessor
from flaxen.data.tokenizers import Tokenizer
from flaxen.errors import InputError
from flaxen.nn.loss import Sums

Batch = dict[str, np.ndarray]  # arrays with the examples first


@runtime_checkable
class ModelFamily(Protocol):
    """What tasks know of an architecture; `flaxen.families.Family` has it."""

    name: str
    flops: Callable[..., float]  # (config, lengths …) -> operations of one forward pass
    decoder: Any  # a generate.search.Decoder class


@dataclass(frozen=True)
class Setup:
    """What a task is opened with: the model but for its weights, and what belongs to it."""

    family: Any  # a ModelFamily
    config: Any
    tokenizer: Tokenizer
    generation_config: dict[str, Any]  # generation_config.json of the checkpoint it starts from
    processor: ImageProcessor | None = None  # of images


class Task(ABC):
    """Joins a model to data. Batches are pure functions of (seed, step, row), so any step can be repeated."""

    examples: int  # of training: an epoch
    validation_examples: int
    tokens: int  # of an example, in and out, for the display of speed
    flops: float  # of the matmuls in the training of one example
    generation_metrics: tuple[str, ...] = ()  # the names of what `generate_and_score_sample` measures
    config: Any  # of the model, as the data asks for it
    tokenizer: Tokenizer

    @classmethod
    def open(cls, setup: Setup, settings: Any, seed: int, split: str = "validation", training: bool = True) -> "Task":
        """The task on the data that `settings` name (their `data`, `objective`, …), evaluated on `split`. Without
        `training`, nothing but the evaluation is asked for."""
        raise InputError(f"{cls.__name__} opens no data by itself")

    # What the trainer calls.

    @abstractmethod
    def batch(self, step: int, size: int, rows: slice = slice(None)) -> Batch:
        """Training batch number `step` of `size` examples, or those `rows` of it."""

    @abstractmethod
    def evaluation(self, size: int, limit: int | None = None) -> Iterator[Batch]:
        """All validation examples, or the first `limit`, once; the last batch is filled up with rows without labels."""

    @abstractmethod
    def loss(self, model: Any, batch: dict[str, Array], carry: Any, key: Array | None) -> tuple[Sums, Any]:
        """Sums over the labels of a batch, and what is carried on; noise from `key`, none without."""

    def carry(self, rows: int) -> Any:
        """The initial carry of so many rows: what a batch passes on to the next; None if nothing. Rows first."""
        return None

    def divisor(self, batch: dict[str, Array]) -> int | None:
        """What the gradient of a training batch's loss is divided by, if not by the number of its labels."""
        return None

    def metrics(self, sums: Sums) -> dict[str, float]:
        """Exact means out of sums."""
        loss = float(sums.loss / sums.weight)
        means = {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "accuracy": float(sums.correct / sums.weight)}
        return means | self.further_metrics(loss)

    def further_metrics(self, loss: float) -> dict[str, float]:
        """What else follows from the mean loss, such as bits per byte."""
        return {}

    def generate_and_score_sample(self, model: Any, path: Path, skipped: set[str] | None = None) -> dict[str, float]:
        """Generate for the first validation examples, write the outputs to `path`, return their `generation_metrics`.

        Examples that cannot be read are reported once: their names are added to `skipped`."""
        return {}

    def prepare_model(self, model: Any) -> Any:
        """The model that training starts from, given the initial one."""
        return model

    def skipped_examples(self, batch: Batch, part: str = "training") -> list[str]:
        """What of a batch is skipped, and why."""
        return []

    # What the commands call.

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What a run on this data cannot be resumed without: digests and sizes, as JSON."""
        return {}

    def notes(self, size: int) -> list[str]:
        """What a person should know of the data before it is trained on in batches of `size`."""
        return []

    def evaluation_notes(self, size: int) -> list[str]:
        """What a person should know of the data before it is evaluated on."""
        return []

    def format_example(self, batch: Batch, row: int) -> dict[str, str]:
        """An example as text: what the model reads, what it should generate."""
        return {}

    def vocabulary(self) -> str:
        """The tokenizer beside the model's table, for people."""
        return f"tokenizer: {self.tokenizer.size:,} ids; model: {self.config.vocab_size:,} rows"

    def why_no_validation(self) -> str:
        """Why there may be no validation example, for a message."""
        return ""

    def describe_evaluated(self, limit: int | None, skipped: int) -> str:
        """What was evaluated on, in words: all validation examples or the first `limit`, but for those skipped."""
        return f"{min(self.validation_examples, limit or self.validation_examples) - skipped:,} examples"

    def generate_and_score(
        self,
        model: Any,
        options: Any,
        batch_size: int,
        limit: int | None,
        path: Path | None = None,
        sheet: Path | None = None,
        skipped: set[str] | None = None,
    ) -> dict[str, float]:
        """Scores of what the model generates for the first `limit` validation examples; `path` and `sheet` get it."""
        return {}


def report_skipped(problems: Sequence[str], known: set[str]) -> None:
    """Say what is skipped, once."""
    for problem in problems:
        if problem not in known:
            known.add(problem)
            print(problem, file=sys.stderr)
