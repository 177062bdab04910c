"""flaxen eval TASK MODEL --data.validation …"""

import dataclasses
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from flaxen.data.corpus import Corpus
from flaxen.data.pairs import Pairs
from flaxen.generate.options import Options
from flaxen.tasks.objective import Objective, PairObjective, Writing


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


@dataclass(frozen=True)
class EvalSeq2Seq:
    """Loss of a checkpoint on pairs of texts; and what it writes, scored: ROUGE, BLEU, chrF, exact match."""

    model: tyro.conf.Positional[str]
    """Checkpoint directory or hub id."""
    data: Pairs = field(default_factory=Pairs)
    objective: PairObjective = field(default_factory=PairObjective)
    out: Path | None = None
    """Write id, prediction and reference of every pair to this .jsonl file."""
    loss_only: bool = False
    """Do not let it write."""
    tokenizer: str | None = None
    """Directory or hub id of a tokenizer, or `bytes`. Default: the checkpoint's."""
    batch_size: int = 16
    examples: int | None = None
    """Evaluate on the first so many pairs. Default: all."""
    compute: Literal["float32", "bfloat16"] = "float32"
    options: Annotated[Options, tyro.conf.arg(name="")] = field(default_factory=Options)

    def run(self, given: set[str]) -> None:
        from flaxen.cli.build import start
        from flaxen.cli.settings import Start
        from flaxen.data.pair_store import open_pairs
        from flaxen.errors import InputError
        from flaxen.generate.options import make_options
        from flaxen.pretrained import load
        from flaxen.tasks.seq2seq import Seq2Seq
        from flaxen.train.loop import evaluate
        from flaxen.train.step import scorer

        if self.batch_size < 1:
            raise InputError(f"--batch-size must be positive, got {self.batch_size}")
        config, tokenizer, generation = start(Start(init=self.model, tokenizer=self.tokenizer, compute=self.compute))
        data = self.data
        if data.validation and not data.dataset:  # then nothing else is read
            data = dataclasses.replace(data, train=data.validation)
        # What was not typed is left to the checkpoint's own defaults; but the length, to the targets' limit.
        typed = {f.name: getattr(self.options, f.name) for f in dataclasses.fields(Options) if f.name in given}
        options = make_options({"max_new_tokens": self.objective.target_length} | typed, generation)
        train, validation = open_pairs(data, tokenizer)
        task = Seq2Seq(config, self.objective, Writing(), tokenizer, train, validation, 0)
        if not task.validation_pairs:
            raise InputError("there is no pair to evaluate on; name a file with --data.validation")
        model = load(self.model, compute=self.compute).model
        values = evaluate(task, scorer(task), model, self.batch_size, self.examples)
        if not self.loss_only:
            values |= task.write(model, options, self.out, self.batch_size, self.examples)
        n = min(task.validation_pairs, self.examples or task.validation_pairs)
        print(f"{n:,} pairs", file=sys.stderr)
        print(json.dumps(values))
