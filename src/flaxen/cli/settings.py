"""Where a model starts from, and all settings of a run."""

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
    """The model: a checkpoint, or a preset or config.json with random weights."""

    init: str | None = None
    """Checkpoint directory or hub id to start from."""
    preset: str | None = None
    """Start from random weights: t5-small, t5-v1_1-base, mt5-small, byt5-small, vq-mini, … (`flaxen info PRESET`); for
    a captioner, two of them: vit-mini+gpt2-mini."""
    config: Path | None = None
    """Start from random weights: a config.json of Hugging Face."""
    fields: tuple[str, ...] = ()
    """Changes to the preset's configuration, as name=value: d_model=256 n_layers=4 attention=full."""
    tokenizer: str | None = None
    """Directory or hub id of a tokenizer, or `bytes`. Default: the checkpoint's; `bytes` for ByT5 and VQ presets."""
    compute: Literal["float32", "bfloat16"] = "float32"
    """Of the products. Weights, optimizer state, norms, softmax and loss stay in float32."""
    dropout: float | None = None
    """Default: the checkpoint's or the preset's (T5's have 0.1; T5 1.1, mT5 and ByT5 were pre-trained with 0)."""
    image_size: int | None = None
    """Of the pictures that a captioner sees, if not the checkpoint's: its positions are interpolated."""
    remat: bool = False
    """Keep only the layers' inputs for the backward pass: less memory, a fifth more time."""

    def __post_init__(self) -> None:
        if sum(one is not None for one in (self.init, self.preset, self.config)) != 1:
            raise InputError(
                "name one start of the model: model.init, model.preset or model.config "
                "(to leave out what a recipe names: --model.preset None)"
            )
        if self.image_size is not None and self.image_size < 1:
            raise InputError(f"model.image_size must be positive, got {self.image_size}")
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise InputError(f"model.dropout must be at least 0 and below 1, got {self.dropout}")


@dataclass(frozen=True)
class Settings:
    """What runs of all tasks depend on."""

    model: ModelSettings
    out: Path
    """Directory of the run. The same command goes on where it stopped, however it stopped."""
    task: tyro.conf.Suppress[str] = ""
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    lora: LoRA = field(default_factory=LoRA)
    training: Training = field(default_factory=Training)
    tracking: Tracking = field(default_factory=Tracking)


@dataclass(frozen=True)
class DenoiseSettings(Settings):
    """Everything that a denoising run depends on."""

    task: tyro.conf.Suppress[Literal["denoise"]] = "denoise"
    data: Corpus = field(default_factory=Corpus)
    objective: DenoiseObjective = field(default_factory=DenoiseObjective)


@dataclass(frozen=True)
class Seq2SeqSettings(Settings):
    """Everything that a run on pairs of texts depends on."""

    task: tyro.conf.Suppress[Literal["seq2seq"]] = "seq2seq"
    data: Pairs = field(default_factory=Pairs)
    objective: Seq2SeqObjective = field(default_factory=Seq2SeqObjective)
    generation: EvalGeneration = field(default_factory=EvalGeneration)


FINE_TUNING: Any = field(default_factory=lambda: Optimizer(name="adamw", learning_rate=5e-5))


@dataclass(frozen=True)
class CaptionSettings(Settings):
    """Everything that a run on pictures and captions depends on."""

    optimizer: Optimizer = FINE_TUNING
    task: tyro.conf.Suppress[Literal["caption"]] = "caption"
    data: Captions = field(default_factory=Captions)
    objective: CaptionObjective = field(default_factory=CaptionObjective)
    generation: EvalGeneration = field(default_factory=EvalGeneration)


PRE_TRAINING: Any = field(default_factory=lambda: Optimizer(name="adamw"))


@dataclass(frozen=True)
class LanguageSettings(Settings):
    """Everything that a run of a language model depends on."""

    optimizer: Optimizer = PRE_TRAINING
    task: tyro.conf.Suppress[Literal["language"]] = "language"
    data: LanguageData = field(default_factory=LanguageData)
    objective: LanguageObjective = field(default_factory=LanguageObjective)


@dataclass(frozen=True)
class Evaluation:
    """What every evaluation is asked for."""

    batch_size: int = 16
    """Examples computed together; it changes no result."""
    examples: int | None = None
    """Evaluate on the first so many examples. Default: all."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise InputError(f"--batch-size must be positive, got {self.batch_size}")
        if self.examples is not None and self.examples < 1:
            raise InputError(f"--examples must be positive, got {self.examples}; leave it out for all")


@dataclass(frozen=True)
class DenoiseEvaluation(Evaluation):
    """Loss, perplexity and accuracy of a checkpoint on held-out text, exact whatever the batch size."""

    data: Corpus = field(default_factory=Corpus)
    objective: DenoiseObjective = field(default_factory=DenoiseObjective)
    batch_size: int = 32
    """Examples computed together; it changes no result."""
    seed: int = 0
    """Seed of the masked spans; the seed of a training run gives that run's."""


@dataclass(frozen=True)
class Seq2SeqEvaluation(Evaluation):
    """Loss of a checkpoint on pairs of texts, and ROUGE, BLEU, chrF and exact match of what it generates."""

    data: Pairs = field(default_factory=Pairs)
    objective: Seq2SeqObjective = field(default_factory=Seq2SeqObjective)
    out: Path | None = None
    """Write id, prediction and reference of every pair to this .jsonl file."""
    loss_only: bool = False
    """Generate nothing."""
    options: Annotated[Options, tyro.conf.arg(name="")] = field(default_factory=Options)

    @property
    def generation(self) -> EvalGeneration:
        """How training would generate: not asked for here."""
        return EvalGeneration()


@dataclass(frozen=True)
class CaptionEvaluation(Evaluation):
    """Loss of a captioner on images, and CIDEr, BLEU, ROUGE and exact match of the captions it generates."""

    data: Captions = field(default_factory=Captions)
    objective: CaptionObjective = field(default_factory=CaptionObjective)
    out: Path | None = None
    """Write image, prediction and references of every image to this .jsonl file."""
    sheet: Path | None = None
    """Write a page with the images and their captions to this .html file."""
    loss_only: bool = False
    """Generate nothing."""
    options: Annotated[Options, tyro.conf.arg(name="")] = field(default_factory=Options)

    @property
    def generation(self) -> EvalGeneration:
        """How training would generate: not asked for here."""
        return EvalGeneration()


@dataclass(frozen=True)
class LanguageEvaluation(Evaluation):
    """Loss of a language model in nats, bits per byte or per dimension, and word perplexity."""

    data: LanguageData = field(default_factory=LanguageData)
    objective: LanguageObjective = field(default_factory=LanguageObjective)
    split: Literal["validation", "test"] = "validation"
    """Which part of the data to evaluate on."""
