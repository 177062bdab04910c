"""What a training run can be told: frozen dataclasses that are flags, recipe files and the run's own record."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from flaxen.errors import InputError

# What each optimizer can be told beside its learning rate, and what it takes if it is told nothing.
OPTIONS: dict[str, dict[str, float]] = {
    "adamw": {"b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 0.0},
    "adamw-rms": {"b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 0.0},
    "adafactor": {"weight_decay": 0.0},
    "lion": {"b1": 0.9, "b2": 0.99, "weight_decay": 0.0},
    "muon": {"momentum": 0.95, "b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 0.0},
}
RATES = {"adamw": 1e-3, "adamw-rms": 2e-2, "adafactor": 1e-2, "lion": 1e-4, "muon": 1e-3}


@dataclass(frozen=True)
class Schedule:
    """How the learning rate moves. Each begins with a linear warmup."""

    name: Literal["linear", "cosine", "inverse-sqrt", "constant", "warmup-stable-decay"] = "cosine"
    """After the warmup: straight or cosine to the floor; peak · sqrt(warmup / step); flat; or flat and, in the last
    `decay` of the run, straight to the floor."""
    warmup: int | None = None
    """Steps from nothing to the peak. Default: a fiftieth of the run."""
    floor: float = 0.0
    """Share of the peak that is left at the end (linear, cosine, warmup-stable-decay)."""
    decay: float = 0.1
    """Share of the run in which warmup-stable-decay decays."""
    steps: int | None = None
    """Steps that it takes, if not the whole run; the rest is trained at the floor."""
    reference: bool = False
    """As the original Transformer-VQ: the first step of the warmup has rate 0; floor 0.1 is its own."""

    def __post_init__(self) -> None:
        if self.warmup is not None and self.warmup < 0:
            raise InputError(f"schedule.warmup must not be negative, got {self.warmup}")
        if not 0 <= self.floor <= 1 or not 0 < self.decay <= 1:
            raise InputError(f"schedule.floor and decay are shares in 0 … 1, got {self.floor} and {self.decay}")
        if self.name == "inverse-sqrt" and self.warmup == 0 and not self.reference:
            raise InputError(
                "schedule.name inverse-sqrt falls from the end of the warmup; schedule.warmup must not be 0"
            )


@dataclass(frozen=True)
class Optimizer:
    """Which direction an update takes, and how far."""

    name: Literal["adamw", "adamw-rms", "adafactor", "lion", "muon"] = "adamw-rms"
    """adamw-rms is AdamW whose update of a weight is scaled by that weight's root mean square."""
    learning_rate: float | None = None
    """Peak. Default: adamw 1e-3, adamw-rms 2e-2, adafactor 1e-2, lion 1e-4, muon 1e-3."""
    weight_decay: float | None = None
    """Decoupled, not on norms and relative biases. Default 0."""
    b1: float | None = None
    """Decay of the first moment (adamw, adamw-rms, lion, muon's Adam). Default 0.9."""
    b2: float | None = None
    """Decay of the second moment. Default 0.999; lion 0.99."""
    eps: float | None = None
    """Added to the root of the second moment. Default 1e-8."""
    momentum: float | None = None
    """Of muon. Default 0.95."""
    clip: float = 1.0
    """Largest norm of the gradient; a longer one is shortened to it. 0 turns it off."""
    codebook: float = 0.99
    """Of Transformer-VQ: how much of a codebook's running means each update keeps."""
    restart: float = 0.0
    """Of Transformer-VQ: a code whose running count falls below this takes half of a full one's keys. 0: never."""
    reference: bool = False
    """As the original Transformer-VQ: weight decay is not scaled by the rate; lion's momentum is in bfloat16."""
    freeze: tuple[str, ...] = ()
    """Weights that stay as they are, as globs over their paths: 'embedding.*', 'encoder.*'; a wrong one lists them."""

    def __post_init__(self) -> None:
        for name in ("weight_decay", "b1", "b2", "eps", "momentum"):
            if getattr(self, name) is not None and name not in OPTIONS[self.name]:
                known = ", ".join(OPTIONS[self.name])
                raise InputError(f"optimizer {self.name} has no {name} (it has {known}); leave optimizer.{name} out")
        if self.peak <= 0 or self.clip < 0:
            raise InputError(f"learning_rate must be positive and clip not negative, got {self.peak}, {self.clip}")
        if not 0 <= self.codebook < 1 or self.restart < 0:
            raise InputError(
                f"optimizer.codebook is a share below 1 and restart not negative, got {self.codebook}, {self.restart}"
            )

    def resolved(self) -> "Optimizer":
        """Every number said, so that a record of it does not depend on today's defaults."""
        options: dict[str, Any] = {name: self.option(name) for name in OPTIONS[self.name]}
        return dataclasses.replace(self, learning_rate=self.peak, **options)

    @property
    def peak(self) -> float:
        return RATES[self.name] if self.learning_rate is None else self.learning_rate

    def option(self, name: str) -> float:
        given = getattr(self, name)
        return OPTIONS[self.name][name] if given is None else given


@dataclass(frozen=True)
class LoRA:
    """Train low-rank additions to some weights instead of the weights."""

    rank: int = 0
    """Of the additions; 0 trains the weights themselves."""
    alpha: float | None = None
    """Additions are scaled by alpha / rank. Default: 2 · rank."""
    targets: tuple[str, ...] = ()
    """Linear maps to add to, as globs over their paths: '*.attention.[qv]', '*.mlp.*'. Default: queries and values."""

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise InputError(f"lora.rank must not be negative, got {self.rank}")
        if not self.rank and (self.targets or self.alpha is not None):
            raise InputError("lora.targets and lora.alpha mean nothing without lora.rank; set it, 8 is usual")

    @property
    def scale(self) -> float:
        return 2.0 if self.alpha is None else self.alpha / max(self.rank, 1)


@dataclass(frozen=True)
class Training:
    """How long, in what portions, and what is kept."""

    steps: int | None = None
    """Updates."""
    epochs: float | None = None
    """Passes over the training data, instead of steps. Default: one."""
    batch_size: int = 32
    """Examples per update."""
    accumulate: int = 1
    """Pieces that a batch is computed in, one after the other: the same update in less memory."""
    seed: int = 0
    """Of the initial weights, the order of examples, their noise, and dropout."""
    log_every: int = 20
    """Steps between records of the training loss."""
    eval_every: int = 500
    """Steps between evaluations; there is one at the end as well. 0: only that one."""
    eval_batch_size: int | None = None
    """Examples per evaluation batch. Default: batch_size / accumulate."""
    eval_examples: int | None = None
    """Evaluate on the first so many validation examples. Default: all."""
    save_every: int = 500
    """Steps between checkpoints; there is one at the end as well. 0: only that one."""
    keep: int = 2
    """Newest checkpoints kept."""
    keep_best: str | None = None
    """Keep the checkpoint where this validation metric was best, and export it as best/: loss, accuracy, rougeL, …"""

    def __post_init__(self) -> None:
        if self.steps is not None and self.epochs is not None:
            raise InputError("give the length of the run either as training.steps or as training.epochs, not both")
        for name in (
            "steps",
            "epochs",
            "batch_size",
            "accumulate",
            "log_every",
            "keep",
            "eval_batch_size",
            "eval_examples",
        ):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise InputError(f"training.{name} must be positive, got {value}")
        for name in ("eval_every", "save_every", "seed"):
            if getattr(self, name) < 0:
                raise InputError(f"training.{name} must not be negative, got {getattr(self, name)}")
        if self.batch_size % self.accumulate:
            raise InputError(
                f"training.batch_size={self.batch_size} cannot be computed in {self.accumulate} equal pieces; "
                "training.accumulate must divide it"
            )

    def length(self, examples: int) -> int:
        """Steps of a run on so many examples."""
        return self.steps or max(1, math.ceil((self.epochs or 1.0) * examples / self.batch_size))

    @property
    def eval_rows(self) -> int:
        return self.eval_batch_size or self.batch_size // self.accumulate


@dataclass(frozen=True)
class Tracking:
    """Where metrics go beside metrics.jsonl and the screen."""

    tensorboard: bool = False
    """Event files in the run directory (needs flaxen[tensorboard])."""
    wandb: str | None = None
    """Weights & Biases project (needs wandb)."""
    trackio: str | None = None
    """Trackio project (needs trackio)."""
    name: str | None = None
    """Of the run there. Default: the name of its directory."""
