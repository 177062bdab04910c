"""What the trainer knows of a task: batches, a loss, and the names of what it measures."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jax import Array

from flaxen.nn.loss import Sums

Batch = dict[str, np.ndarray]  # arrays with the examples first


@runtime_checkable
class Task(Protocol):
    """Joins a model to data. Batches are pure functions of (seed, step, row), so any step can be made again."""

    examples: int  # of training: an epoch
    tokens: int  # of an example, in and out, for the display of speed
    flops: float  # of the products in the training of one example
    scores: tuple[str, ...]  # the names of what `written` measures

    def batch(self, step: int, size: int, rows: slice = slice(None)) -> Batch:
        """Training batch number `step` of `size` examples, or those `rows` of it."""

    def evaluation(self, size: int, limit: int | None = None) -> Iterator[Batch]:
        """All validation examples, or the first `limit`, once; the last batch is filled up with rows without labels."""

    def carry(self, rows: int) -> Any:
        """What a batch of so many rows leaves to the next one, before there was any; None if nothing. Rows first."""

    def loss(self, model: Any, batch: dict[str, Array], carry: Any, key: Array | None) -> tuple[Sums, Any]:
        """Sums over the labels of a batch, and what is carried on; noise from `key`, none without."""

    def divisor(self, batch: dict[str, Array]) -> int | None:
        """What the gradient of a training batch's loss is divided by, if not by the number of its labels."""

    def metrics(self, sums: Sums) -> dict[str, float]:
        """Exact means out of sums."""

    def written(self, model: Any, path: Path) -> dict[str, float]:
        """Let the model write for validation examples, to the file `path`; `scores` of it. Nothing without scores."""
