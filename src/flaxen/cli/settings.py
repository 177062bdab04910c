"""Where a model starts from, and all settings of a denoising run."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from flaxen.data.corpus import Corpus
from flaxen.errors import InputError
from flaxen.tasks.objective import Objective
from flaxen.train.settings import Optimizer, Schedule, Tracking, Training


@dataclass(frozen=True)
class Start:
    """The model: a checkpoint, or a preset or config.json with random weights."""

    init: str | None = None
    """Checkpoint directory or hub id to start from."""
    preset: str | None = None
    """Start from random weights: t5-small, t5-v1_1-base, mt5-small, byt5-small, … (`flaxen info PRESET`)."""
    config: Path | None = None
    """Start from random weights: a config.json of Hugging Face."""
    tokenizer: str | None = None
    """Directory or hub id of a tokenizer, or `bytes`. Default: the checkpoint's; `bytes` for ByT5 presets."""
    compute: Literal["float32", "bfloat16"] = "float32"
    """Of the products. Weights, optimizer state, norms, softmax and loss stay in float32."""
    dropout: float | None = None
    """Default: the checkpoint's; a preset has 0.1. T5 1.1, mT5 and ByT5 were pre-trained with 0."""
    remat: bool = False
    """Keep only the layers' inputs for the backward pass: less memory, a fifth more time."""

    def __post_init__(self) -> None:
        if sum(one is not None for one in (self.init, self.preset, self.config)) != 1:
            raise InputError(
                "name one start of the model: model.init, model.preset or model.config "
                "(to leave out what a recipe names: --model.preset None)"
            )
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise InputError(f"model.dropout must be at least 0 and below 1, got {self.dropout}")


@dataclass(frozen=True)
class Settings:
    """Everything that a denoising run depends on."""

    out: Path
    """Directory of the run. The same command goes on where it stopped, however it stopped."""
    model: Start
    data: Corpus = field(default_factory=Corpus)
    objective: Objective = field(default_factory=Objective)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    training: Training = field(default_factory=Training)
    tracking: Tracking = field(default_factory=Tracking)
