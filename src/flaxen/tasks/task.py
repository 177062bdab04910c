"""The interface between a task and the trainer or commands: batches, loss, metrics, and notes about its data."""

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

Batch = dict[str, np.ndarray]  # arrays with the examples on their first axis


@runtime_checkable
class ModelFamily(Protocol):
    """What a task needs from an architecture; implemented by `flaxen.families.Family`."""

    name: str
    flops: Callable[..., float]  # (config, lengths …) -> floating-point operations of one forward pass
    decoder: Any  # a generate.search.Decoder class


@dataclass(frozen=True)
class Setup:
    """Everything about a model except its weights: configuration, tokenizer, image processor."""

    family: Any  # a ModelFamily
    config: Any
    tokenizer: Tokenizer
    generation_config: dict[str, Any]  # from the initial checkpoint's generation_config.json
    processor: ImageProcessor | None = None  # for captioning


class Task(ABC):
    """Data combined with a loss. Batches are pure functions of (seed, step, row), so any step can be repeated."""

    examples: int  # number of training examples: one epoch
    validation_examples: int
    tokens: int  # mean input and output tokens per example, to display the speed
    flops: float  # floating-point operations of the matmuls when training on one example
    generation_metrics: tuple[str, ...] = ()  # names of the metrics of `generate_and_score_sample`
    config: Any  # configuration of the model, adapted to the data
    tokenizer: Tokenizer

    @classmethod
    def open(cls, setup: Setup, settings: Any, seed: int, split: str = "validation", training: bool = True) -> "Task":
        """Open the data given by `settings` (`data`, `objective`, …), with `split` for evaluation.

        Without `training`, the task is used for evaluation only.
        """
        raise InputError(f"{cls.__name__} cannot open data from settings")

    # Called by the trainer.

    @abstractmethod
    def batch(self, step: int, size: int, rows: slice = slice(None)) -> Batch:
        """Return the training batch of `size` examples for a step, or only these `rows` of it."""

    @abstractmethod
    def evaluation(self, size: int, limit: int | None = None) -> Iterator[Batch]:
        """Iterate once over the validation examples, or the first `limit`.

        Filler rows, which have no labels, complete the last batch.
        """

    @abstractmethod
    def loss(self, model: Any, batch: dict[str, Array], carry: Any, key: Array | None) -> tuple[Sums, Any]:
        """Return the loss sums over the labels of a batch, and the new carry. A `key` turns on noise, e.g. dropout."""

    def carry(self, rows: int) -> Any:
        """Return the initial carry for a batch of `rows`: the memory passed from one batch to the next, or None.

        Its arrays have the rows on their first axis.
        """
        return None

    def divisor(self, batch: dict[str, Array]) -> int | None:
        """Return the divisor of a training batch's summed loss, or None to divide by the number of labels."""
        return None

    def metrics(self, sums: Sums) -> dict[str, float]:
        """Compute metrics from loss sums."""
        loss = float(sums.loss / sums.weight)
        # math.exp overflows a float above 709.
        means = {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "accuracy": float(sums.correct / sums.weight)}
        return means | self.further_metrics(loss)

    def further_metrics(self, loss: float) -> dict[str, float]:
        """Compute additional metrics from the mean loss, such as bits per byte."""
        return {}

    def generate_and_score_sample(self, model: Any, path: Path, skipped: set[str] | None = None) -> dict[str, float]:
        """Generate outputs for the first validation examples, save them to `path`, and return `generation_metrics`.

        Examples that cannot be read are reported once and added to `skipped`.
        """
        return {}

    def prepare_model(self, model: Any) -> Any:
        """Return the model to start training from, given the initial model."""
        return model

    def skipped_examples(self, batch: Batch, part: str = "training") -> list[str]:
        """Describe the skipped examples of a batch, one line each with the reason."""
        return []

    # Called by the commands.

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Digests and sizes of the data, as JSON; a run can be resumed only if they are the same."""
        return {}

    def notes(self, size: int) -> list[str]:
        """Facts about the data to print before training with batches of `size`."""
        return []

    def evaluation_notes(self, size: int) -> list[str]:
        """Facts about the data to print before an evaluation with batches of `size`."""
        return []

    def format_example(self, batch: Batch, row: int) -> dict[str, str]:
        """Format an example as text: the model's input and its target."""
        return {}

    def vocabulary(self) -> str:
        """Describe the sizes of the tokenizer and of the model's embedding table."""
        return f"tokenizer: {self.tokenizer.size:,} ids; model: {self.config.vocab_size:,} rows"

    def why_no_validation(self) -> str:
        """Hint for the error message if there are no validation examples."""
        return ""

    def describe_evaluated(self, limit: int | None, skipped: int) -> str:
        """Describe what was evaluated: the validation examples or the first `limit`, without those skipped."""
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
        """Generate outputs for the first `limit` validation examples, save to `path` and `sheet`, return metrics."""
        return {}


def report_skipped(problems: Sequence[str], known: set[str]) -> None:
    """Print each problem to standard error once: those in `known` are not repeated, and new ones are added to it."""
    for problem in problems:
        if problem not in known:
            known.add(problem)
            print(problem, file=sys.stderr)
