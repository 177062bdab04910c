"""Settings of training and evaluation, as dataclasses whose fields are flags and TOML keys."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from flaxen.data.captions import Captions
from flaxen.data.corpus import Corpus
from flaxen.data.pairs import Pairs
from flaxen.data.streams import LanguageData
from flaxen.errors import InputError
from flaxen.generate.options import Options
from flaxen.tasks.objective import (
    CaptionObjective,
    DenoiseObjective,
    EvalGeneration,
    LanguageObjective,
    Seq2SeqObjective,
)
from flaxen.train.settings import LoRA, Optimizer, Schedule, Tracking, Training


@dataclass(frozen=True)
class ModelSettings:
    """Model to train: a checkpoint, or a preset or config.json with random weights."""

    init: str | None = None
    """Checkpoint directory or Hugging Face hub id to start from. Default: random weights."""
    preset: str | None = None
    """Preset configuration for a new model with random weights: t5-small, t5-v1_1-base, byt5-small, vq-mini, …; for a
    captioner, two presets joined by '+', such as vit-mini+gpt2-mini. `flaxen info PRESET` describes one. Default:
    none."""
    config: Path | None = None
    """Hugging Face config.json for a new model with random weights. Default: none."""
    fields: tuple[str, ...] = ()
    """Changes to the model's configuration, as name=value, such as d_model=256 n_layers=4 attention=full."""
    tokenizer: str | None = None
    """Directory or hub id of a tokenizer, or `bytes` for raw bytes. Default: the checkpoint's tokenizer, or `bytes` for
    ByT5 and VQ presets."""
    compute: Literal["float32", "bfloat16"] = "float32"
    """Data type of matrix products. Weights, optimizer state, norms, softmax and loss stay in float32."""
    dropout: float | None = None
    """Dropout rate, at least 0 and below 1; T5 1.1, mT5 and ByT5 were pre-trained with 0. Default: the rate in the
    model's configuration, 0.1 for T5."""
    image_size: int | None = None
    """Height and width of the images a captioner reads, in pixels; position embeddings are interpolated to match.
    Default: the model's image size."""
    remat: bool = False
    """Rematerialise: store only the input of each layer and recompute the rest in the backward pass (gradient
    checkpointing). Saves memory but takes about a fifth longer."""

    def __post_init__(self) -> None:
        if sum(start is not None for start in (self.init, self.preset, self.config)) != 1:
            raise InputError(
                "exactly one of model.init, model.preset and model.config is required "
                "(to unset one that a recipe sets: --model.preset None)"
            )
        if self.image_size is not None and self.image_size < 1:
            raise InputError(f"model.image_size must be at least 1, got {self.image_size}")
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise InputError(f"model.dropout must be at least 0 and below 1, got {self.dropout}")


@dataclass(frozen=True)
class Settings:
    """Training settings shared by all tasks."""

    model: ModelSettings
    out: Path
    """Directory of the run. If training is interrupted, rerun the command to resume."""
    task: tyro.conf.Suppress[str] = ""
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    lora: LoRA = field(default_factory=LoRA)
    training: Training = field(default_factory=Training)
    tracking: Tracking = field(default_factory=Tracking)


@dataclass(frozen=True)
class DenoiseSettings(Settings):
    """Settings of `flaxen train denoise`."""

    task: tyro.conf.Suppress[Literal["denoise"]] = "denoise"
    data: Corpus = field(default_factory=Corpus)
    objective: DenoiseObjective = field(default_factory=DenoiseObjective)


@dataclass(frozen=True)
class Seq2SeqSettings(Settings):
    """Settings of `flaxen train seq2seq`."""

    task: tyro.conf.Suppress[Literal["seq2seq"]] = "seq2seq"
    data: Pairs = field(default_factory=Pairs)
    objective: Seq2SeqObjective = field(default_factory=Seq2SeqObjective)
    generation: EvalGeneration = field(default_factory=EvalGeneration)


FINE_TUNING: Any = field(default_factory=lambda: Optimizer(name="adamw", learning_rate=5e-5))


@dataclass(frozen=True)
class CaptionSettings(Settings):
    """Settings of `flaxen train caption`."""

    optimizer: Optimizer = FINE_TUNING
    task: tyro.conf.Suppress[Literal["caption"]] = "caption"
    data: Captions = field(default_factory=Captions)
    objective: CaptionObjective = field(default_factory=CaptionObjective)
    generation: EvalGeneration = field(default_factory=EvalGeneration)


PRE_TRAINING: Any = field(default_factory=lambda: Optimizer(name="adamw"))


@dataclass(frozen=True)
class LanguageSettings(Settings):
    """Settings of `flaxen train language`."""

    optimizer: Optimizer = PRE_TRAINING
    task: tyro.conf.Suppress[Literal["language"]] = "language"
    data: LanguageData = field(default_factory=LanguageData)
    objective: LanguageObjective = field(default_factory=LanguageObjective)


@dataclass(frozen=True)
class Evaluation:
    """Evaluation settings shared by all tasks."""

    batch_size: int = 16
    """Number of examples per batch; the metrics do not depend on it."""
    examples: int | None = None
    """Number of examples to evaluate on, taken from the start of the data. Default: all."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise InputError(f"--batch-size must be at least 1, got {self.batch_size}")
        if self.examples is not None and self.examples < 1:
            raise InputError(
                f"--examples must be at least 1, got {self.examples}; remove it to evaluate on all examples"
            )


@dataclass(frozen=True)
class DenoiseEvaluation(Evaluation):
    """Compute the loss, perplexity and accuracy of a T5 model on held-out text with masked spans.

    Example: flaxen eval denoise run/model --data.validation held-out.txt --objective.input-length 512
    """

    data: Corpus = field(default_factory=Corpus)
    objective: DenoiseObjective = field(default_factory=DenoiseObjective)
    batch_size: int = 32
    """Number of examples per batch; the metrics do not depend on it."""
    seed: int = 0
    """Random seed for the masked spans; use the seed of a training run to reproduce its evaluation."""


@dataclass(frozen=True)
class Seq2SeqEvaluation(Evaluation):
    """Compute the loss of a T5 model on source/target pairs, and ROUGE, BLEU, chrF and exact match of its outputs.

    Example: flaxen eval seq2seq run/model --data.validation val.jsonl --data.source article --data.target summary
    """

    data: Pairs = field(default_factory=Pairs)
    objective: Seq2SeqObjective = field(default_factory=Seq2SeqObjective)
    out: Path | None = None
    """Write the id, prediction and reference of every pair to this .jsonl file. Default: off."""
    loss_only: bool = False
    """Compute only the loss, without generating text."""
    options: Annotated[Options, tyro.conf.arg(name="")] = field(default_factory=Options)

    @property
    def generation(self) -> EvalGeneration:
        """Default generation settings, which tasks expect; evaluation uses `options` instead."""
        return EvalGeneration()


@dataclass(frozen=True)
class CaptionEvaluation(Evaluation):
    """Compute the loss of a captioner, and CIDEr, BLEU, ROUGE and exact match of the captions it generates.

    Example: flaxen eval caption run/model --data.validation captions.jsonl --num-beams 4 --sheet captions.html
    """

    data: Captions = field(default_factory=Captions)
    objective: CaptionObjective = field(default_factory=CaptionObjective)
    out: Path | None = None
    """Write the path, prediction and references of every image to this .jsonl file. Default: off."""
    sheet: Path | None = None
    """HTML file (.html) to write, which shows each image with its captions. Default: off."""
    loss_only: bool = False
    """Compute only the loss, without generating text."""
    options: Annotated[Options, tyro.conf.arg(name="")] = field(default_factory=Options)

    @property
    def generation(self) -> EvalGeneration:
        """Default generation settings, which tasks expect; evaluation uses `options` instead."""
        return EvalGeneration()


@dataclass(frozen=True)
class LanguageEvaluation(Evaluation):
    """Compute the loss of a language model in nats and in bits per byte or per dimension, and its word perplexity.

    Example: flaxen eval language run/model --data.train enwik8 --data.kind bytes --split test
    """

    data: LanguageData = field(default_factory=LanguageData)
    objective: LanguageObjective = field(default_factory=LanguageObjective)
    batch_size: int = 16
    """Number of examples per batch; the metrics do not depend on it, except with --objective.continued."""
    split: Literal["validation", "test"] = "validation"
    """Part of the data to evaluate on."""
