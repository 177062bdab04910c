"""flaxen eval TASK MODEL --data.validation …"""

import dataclasses
import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from flaxen.data.captions import Captions
from flaxen.data.corpus import Corpus
from flaxen.data.pairs import Pairs
from flaxen.data.streams import Streamed
from flaxen.generate.options import Options
from flaxen.tasks.objective import CaptionObjective, LanguageObjective, Objective, PairObjective, Writing

if TYPE_CHECKING:
    from flaxen.cli.build import Beginning


@dataclass(frozen=True)
class Eval:
    """What all evaluations are told."""

    model: tyro.conf.Positional[str]
    """Checkpoint directory or hub id."""
    adapter: str | None = None
    """Directory of a LoRA adapter to add to it."""
    tokenizer: str | None = None
    """Directory or hub id of a tokenizer, or `bytes`. Default: the checkpoint's."""
    batch_size: int = 16
    examples: int | None = None
    """Evaluate on the first so many examples. Default: all."""
    compute: Literal["float32", "bfloat16"] = "float32"

    def begin(self) -> "Beginning":
        from flaxen.cli.build import start
        from flaxen.cli.settings import Start
        from flaxen.errors import InputError

        if self.batch_size < 1:
            raise InputError(f"--batch-size must be positive, got {self.batch_size}")
        if self.examples is not None and self.examples < 1:
            raise InputError(f"--examples must be positive, got {self.examples}; leave it out for all")
        return start(Start(init=self.model, tokenizer=self.tokenizer, compute=self.compute))

    def weights(self) -> Any:
        from flaxen.pretrained import load

        return load(self.model, compute=self.compute, adapter=self.adapter).model

    def measure(self, task: Any, model: Any) -> dict[str, float]:
        from flaxen.train.loop import evaluate
        from flaxen.train.step import scorer

        return evaluate(task, scorer(task), model, self.batch_size, self.examples)

    def places(self, data: Any) -> Any:
        """With files to validate on, nothing else is read."""
        return dataclasses.replace(data, train=data.validation) if data.validation and not data.dataset else data


def chosen(options: Options, given: set[str], longest: int, generation: dict[str, Any]) -> Options:
    """What was not typed is left to the checkpoint's own defaults; but the length, to the targets' limit."""
    from flaxen.generate.options import make_options

    typed = {f.name: getattr(options, f.name) for f in dataclasses.fields(Options) if f.name in given}
    return make_options({"max_new_tokens": longest} | typed, generation)


@dataclass(frozen=True)
class EvalDenoise(Eval):
    """Loss, perplexity and accuracy of a checkpoint on held-out text, exact whatever the batch size."""

    data: Corpus = field(default_factory=Corpus)
    objective: Objective = field(default_factory=Objective)
    batch_size: int = 32
    seed: int = 0
    """Of the holes; the seed of a training run gives that run's."""

    def run(self, given: set[str]) -> None:
        from flaxen.data.store import open_corpus
        from flaxen.errors import InputError
        from flaxen.tasks.denoise import Denoise

        begin = self.begin()
        parts = open_corpus(self.places(self.data), begin.tokenizer)
        task = Denoise(begin.config, self.objective, begin.tokenizer, *parts, self.seed)
        if not task.validation_examples:
            raise InputError(f"the validation text is shorter than one example of {task.lengths.raw} tokens; add text")
        values = self.measure(task, self.weights())
        n = min(task.validation_examples, self.examples or task.validation_examples)
        print(f"{n:,} examples, {n * task.lengths.targets:,} target tokens", file=sys.stderr)
        print(json.dumps(values))


@dataclass(frozen=True)
class EvalSeq2Seq(Eval):
    """Loss of a checkpoint on pairs of texts; and what it writes, scored: ROUGE, BLEU, chrF, exact match."""

    data: Pairs = field(default_factory=Pairs)
    objective: PairObjective = field(default_factory=PairObjective)
    out: Path | None = None
    """Write id, prediction and reference of every pair to this .jsonl file."""
    loss_only: bool = False
    """Do not let it write."""
    options: Annotated[Options, tyro.conf.arg(name="")] = field(default_factory=Options)

    def run(self, given: set[str]) -> None:
        from flaxen.data.pair_store import open_pairs
        from flaxen.errors import InputError
        from flaxen.tasks.seq2seq import Seq2Seq

        begin = self.begin()
        options = chosen(self.options, given, self.objective.target_length, begin.generation)
        parts = open_pairs(self.places(self.data), begin.tokenizer)
        task = Seq2Seq(begin.config, self.objective, Writing(), begin.tokenizer, *parts, 0)
        if not task.validation_pairs:
            raise InputError("there is no pair to evaluate on; name a file with --data.validation")
        model = self.weights()
        values = self.measure(task, model)
        if not self.loss_only:
            values |= task.write(model, options, self.out, self.batch_size, self.examples)
        print(f"{min(task.validation_pairs, self.examples or task.validation_pairs):,} pairs", file=sys.stderr)
        print(json.dumps(values))


@dataclass(frozen=True)
class EvalCaption(Eval):
    """Loss of a captioner on pictures; and what it writes of them, scored: CIDEr, BLEU, ROUGE, exact match."""

    data: Captions = field(default_factory=Captions)
    objective: CaptionObjective = field(default_factory=CaptionObjective)
    out: Path | None = None
    """Write image, prediction and references of every picture to this .jsonl file."""
    sheet: Path | None = None
    """Write a page with the pictures and their captions to this .html file."""
    loss_only: bool = False
    """Do not let it write."""
    options: Annotated[Options, tyro.conf.arg(name="")] = field(default_factory=Options)

    def run(self, given: set[str]) -> None:
        from flaxen.cli.build import captions_task
        from flaxen.errors import InputError

        begin = self.begin()
        options = chosen(self.options, given, self.objective.length, begin.generation)
        task = captions_task(self.places(self.data), self.objective, Writing(), begin, 0)
        if not task.validation_examples:
            raise InputError("there is no picture to evaluate on; name a file with --data.validation")
        for note in task.notes(self.batch_size):
            print(note, file=sys.stderr)
        model = self.weights()
        values = self.measure(task, model)
        if not self.loss_only:
            values |= task.write(model, options, self.out, self.sheet, self.batch_size, self.examples)
        n = len(task.sets["validation"])
        print(f"{min(n, self.examples or n) - len(task.unreadable):,} pictures", file=sys.stderr)
        print(json.dumps(values))


@dataclass(frozen=True)
class EvalLanguage(Eval):
    """Loss of a Transformer-VQ in nats, bits per byte or per dimension, and word perplexity."""

    data: Streamed = field(default_factory=Streamed)
    objective: LanguageObjective = field(default_factory=LanguageObjective)
    split: Literal["validation", "test"] = "validation"

    def run(self, given: set[str]) -> None:
        from flaxen.cli.build import language_task
        from flaxen.errors import InputError
        from flaxen.models.vq_lm import recast

        training = {f"objective.{name}" for name in ("commit", "normalise", "codebooks")} & given
        if training:
            raise InputError(f"--{min(training)} is of training, and does nothing here; leave it out")
        own = getattr(self.data, self.split)
        if not (own or self.data.train or self.data.dataset):
            raise InputError(f"there is nothing to evaluate on; name files with --data.{self.split}, or --data.train")
        begin = self.begin()
        places = self.data
        if own and not self.data.train and not self.data.dataset:  # then nothing else is read
            places = dataclasses.replace(self.data, train=own)
        if hasattr(begin.config, "block"):  # any that divides an update gives the same numbers
            block = math.gcd(begin.config.block, self.objective.chunk)
            begin = dataclasses.replace(begin, config=dataclasses.replace(begin.config, block=block))
        task = language_task(places, self.objective, begin, 0, self.split)
        if not task.validation_sequences:
            raise InputError(f"there is nothing to evaluate on; name files with --data.{self.split}")
        for note in task.notes(self.batch_size):
            print(note, file=sys.stderr)
        model = recast(self.weights(), task.config)
        print(json.dumps({"split": self.split} | self.measure(task, model)))
