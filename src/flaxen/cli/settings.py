"""Where a model starts from, and all settings of a run."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tyro

from flaxen.cli.recipe import from_dict
from flaxen.data.captions import Captions
from flaxen.data.corpus import Corpus
from flaxen.data.pairs import Pairs
from flaxen.data.streams import Streamed
from flaxen.errors import InputError
from flaxen.tasks.objective import CaptionObjective, LanguageObjective, Objective, PairObjective, Writing
from flaxen.train.run import read_config
from flaxen.train.settings import LoRA, Optimizer, Schedule, Tracking, Training


@dataclass(frozen=True)
class Start:
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

    model: Start
    out: Path
    """Directory of the run. The same command goes on where it stopped, however it stopped."""
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
    objective: Objective = field(default_factory=Objective)


@dataclass(frozen=True)
class Seq2SeqSettings(Settings):
    """Everything that a run on pairs of texts depends on."""

    task: tyro.conf.Suppress[Literal["seq2seq"]] = "seq2seq"
    data: Pairs = field(default_factory=Pairs)
    objective: PairObjective = field(default_factory=PairObjective)
    writing: Writing = field(default_factory=Writing)


FINE_TUNING: Any = field(default_factory=lambda: Optimizer(name="adamw", learning_rate=5e-5))


@dataclass(frozen=True)
class CaptionSettings(Settings):
    """Everything that a run on pictures and captions depends on."""

    optimizer: Optimizer = FINE_TUNING
    task: tyro.conf.Suppress[Literal["caption"]] = "caption"
    data: Captions = field(default_factory=Captions)
    objective: CaptionObjective = field(default_factory=CaptionObjective)
    writing: Writing = field(default_factory=Writing)


PRE_TRAINING: Any = field(default_factory=lambda: Optimizer(name="adamw"))


@dataclass(frozen=True)
class LanguageSettings(Settings):
    """Everything that a run of a language model depends on."""

    optimizer: Optimizer = PRE_TRAINING
    task: tyro.conf.Suppress[Literal["language"]] = "language"
    data: Streamed = field(default_factory=Streamed)
    objective: LanguageObjective = field(default_factory=LanguageObjective)


TASKS: dict[str, type[Settings]] = {
    "denoise": DenoiseSettings,
    "seq2seq": Seq2SeqSettings,
    "caption": CaptionSettings,
    "language": LanguageSettings,
}


def of_run(directory: Path) -> Settings:
    """The settings that a run directory records."""
    values = read_config(directory)
    name = values.get("task", "denoise")
    if name not in TASKS:
        raise InputError(f"{directory} is a run of task {name!r}; there are {', '.join(TASKS)}")
    return from_dict(TASKS[name], values, str(directory / "config.toml"))
