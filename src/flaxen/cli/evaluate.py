"""flaxen eval denoise MODEL --data.validation …"""

import dataclasses
import json
import sys
from dataclasses import dataclass, field
from typing import Literal

import tyro

from flaxen.data.corpus import Corpus
from flaxen.tasks.objective import Objective


@dataclass(frozen=True)
class EvalDenoise:
    """Loss, perplexity and accuracy of a checkpoint on held-out text, exact whatever the batch size."""

    model: tyro.conf.Positional[str]
    """Checkpoint directory or hub id."""
    data: Corpus = field(default_factory=Corpus)
    objective: Objective = field(default_factory=Objective)
    tokenizer: str | None = None
    """Directory or hub id of a tokenizer, or `bytes`. Default: the checkpoint's."""
    batch_size: int = 32
    examples: int | None = None
    """Evaluate on the first so many examples. Default: all."""
    seed: int = 0
    """Of the holes; the seed of a training run gives that run's."""
    compute: Literal["float32", "bfloat16"] = "float32"

    def run(self, given: set[str]) -> None:
        from flaxen.cli.build import start
        from flaxen.cli.settings import Start
        from flaxen.data.store import open_corpus
        from flaxen.errors import InputError
        from flaxen.pretrained import load
        from flaxen.tasks.denoise import Denoise
        from flaxen.train.loop import evaluate
        from flaxen.train.step import scorer

        if self.batch_size < 1:
            raise InputError(f"--batch-size must be positive, got {self.batch_size}")
        config, tokenizer, _ = start(Start(init=self.model, tokenizer=self.tokenizer, compute=self.compute))
        data = self.data
        if data.validation and not data.dataset:  # then nothing else is read
            data = dataclasses.replace(data, train=data.validation)
        task = Denoise(config, self.objective, tokenizer, *open_corpus(data, tokenizer), self.seed)
        if not task.validation_examples:
            raise InputError(f"the validation text is shorter than one example of {task.lengths.raw} tokens; add text")
        model = load(self.model, compute=self.compute).model
        values = evaluate(task, scorer(task), model, self.batch_size, self.examples)
        n = min(task.validation_examples, self.examples or task.validation_examples)
        print(f"{n:,} examples, {n * task.lengths.targets:,} target tokens", file=sys.stderr)
        print(json.dumps(values))
