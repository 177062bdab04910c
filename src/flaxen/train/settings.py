"""Training settings: frozen dataclasses that define the command-line flags, recipe files and a run's config.toml."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from flaxen.errors import InputError

# The options of each optimizer besides the learning rate, with their default values.
OPTIONS: dict[str, dict[str, float]] = {
    "adamw": {"b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 0.0},
    "adamw-rms": {"b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 0.0},
    "adafactor": {"weight_decay": 0.0},
    "lion": {"b1": 0.9, "b2": 0.99, "weight_decay": 0.0},
    "muon": {"momentum": 0.95, "b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 0.0},
}
# Default peak learning rate of each optimizer.
RATES = {"adamw": 1e-3, "adamw-rms": 2e-2, "adafactor": 1e-2, "lion": 1e-4, "muon": 1e-3}


@dataclass(frozen=True)
class Schedule:
    """Learning-rate schedule. Every schedule starts with a linear warmup."""

    name: Literal["linear", "cosine", "inverse-sqrt", "constant", "warmup-stable-decay"] = "cosine"
    """Learning-rate schedule after the warmup. linear and cosine decay to the floor; inverse-sqrt is peak · sqrt(warmup
    / step); constant stays at the peak; warmup-stable-decay stays at the peak, then decays linearly to the floor over a
    final fraction of the run (schedule.decay)."""
    warmup: int | None = None
    """Number of warmup steps, during which the learning rate rises linearly to the peak. Default: a fiftieth of the
    steps."""
    floor: float = 0.0
    """Final learning rate as a fraction of the peak, 0 to 1 (linear, cosine and warmup-stable-decay only)."""
    decay: float = 0.1
    """Fraction of the run, at its end, over which the learning rate decays (warmup-stable-decay only)."""
    steps: int | None = None
    """Number of steps the schedule spans; after that, linear, cosine and warmup-stable-decay stay at the floor.
    Default: the whole run."""
    reference: bool = False
    """Reproduce the original Transformer-VQ schedule, whose first step has learning rate 0. The floor is not
    affected; the original used 0.1."""

    def __post_init__(self) -> None:
        if self.warmup is not None and self.warmup < 0:
            raise InputError(f"schedule.warmup must be at least 0, got {self.warmup}")
        if not 0 <= self.floor <= 1 or not 0 < self.decay <= 1:
            raise InputError(
                "schedule.floor must be between 0 and 1, and schedule.decay above 0 and at most 1, "
                f"got {self.floor} and {self.decay}"
            )
        if self.name == "inverse-sqrt" and self.warmup == 0 and not self.reference:
            raise InputError("schedule.warmup must be at least 1 with schedule.name inverse-sqrt, got 0")


@dataclass(frozen=True)
class Optimizer:
    """Optimizer: update rule, learning rate, gradient clipping and frozen weights."""

    name: Literal["adamw", "adamw-rms", "adafactor", "lion", "muon"] = "adamw-rms"
    """Optimizer. adamw-rms is AdamW with the update of each weight tensor scaled by the tensor's root mean square
    (RMS)."""
    learning_rate: float | None = None
    """Peak learning rate. Default: adamw 1e-3, adamw-rms 2e-2, adafactor 1e-2, lion 1e-4, muon 1e-3."""
    weight_decay: float | None = None
    """Decoupled weight decay, not applied to norms, biases or relative position biases. Default: 0."""
    b1: float | None = None
    """Beta1: decay rate of the first moment (adamw, adamw-rms, Adam part of muon); for lion, weight of the momentum in
    the update. Default: 0.9."""
    b2: float | None = None
    """Beta2: decay rate of the second moment (adamw, adamw-rms, Adam part of muon); for lion, decay rate of the
    momentum. Default: 0.999, or 0.99 for lion."""
    eps: float | None = None
    """Adam's epsilon, added to the square root of the second moment (adamw, adamw-rms, Adam part of muon). Default:
    1e-8."""
    momentum: float | None = None
    """Momentum (muon only). Default: 0.95."""
    clip: float = 1.0
    """Gradient clipping: maximum global norm of the gradient; 0 disables clipping."""
    codebook: float = 0.99
    """Decay rate of the moving averages (EMA) that update the codebooks, at least 0 and below 1 (Transformer-VQ
    only)."""
    restart: float = 0.0
    """Restart threshold: a code whose average count falls below it is replaced with a noisy copy of a frequent code; 0
    disables restarts (Transformer-VQ only)."""
    reference: bool = False
    """Reproduce the original Transformer-VQ optimizer: weight decay is not scaled by the learning rate, and lion's
    momentum is stored in bfloat16 instead of float32."""
    freeze: tuple[str, ...] = ()
    """Weights to freeze, as globs over their paths, such as 'embedding.*' or 'encoder.*'. If a glob matches nothing,
    the error lists all paths."""

    def __post_init__(self) -> None:
        for name in ("weight_decay", "b1", "b2", "eps", "momentum"):
            if getattr(self, name) is not None and name not in OPTIONS[self.name]:
                known = ", ".join(OPTIONS[self.name])
                raise InputError(
                    f"optimizer.{name} has no effect with optimizer.name {self.name}, which has only {known}; remove it"
                )
        if self.peak <= 0 or self.clip < 0:
            raise InputError(
                "optimizer.learning_rate must be positive, and optimizer.clip at least 0, "
                f"got {self.peak} and {self.clip}"
            )
        if not 0 <= self.codebook < 1 or self.restart < 0:
            raise InputError(
                "optimizer.codebook must be at least 0 and below 1, and optimizer.restart at least 0, "
                f"got {self.codebook} and {self.restart}"
            )

    def resolved(self) -> "Optimizer":
        """Fill in all defaults, so that a saved configuration stays valid when the defaults change."""
        options: dict[str, Any] = {name: self.option(name) for name in OPTIONS[self.name]}
        return dataclasses.replace(self, learning_rate=self.peak, **options)

    @property
    def peak(self) -> float:
        """Peak learning rate, given or default."""
        return RATES[self.name] if self.learning_rate is None else self.learning_rate

    def option(self, name: str) -> float:
        """Value of an optimizer option, given or default."""
        given = getattr(self, name)
        return OPTIONS[self.name][name] if given is None else given


@dataclass(frozen=True)
class LoRA:
    """LoRA: train a low-rank update of some weights instead of the weights themselves."""

    rank: int = 0
    """LoRA rank; 0 disables LoRA and trains all weights."""
    alpha: float | None = None
    """LoRA alpha: the low-rank update is scaled by alpha / rank. Default: 2 · rank."""
    targets: tuple[str, ...] = ()
    """Linear layers to adapt, as globs over their paths, such as '*.attention.[qv]' or '*.mlp.*'. Default: query and
    value projections."""

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise InputError(f"lora.rank must be at least 0, got {self.rank}")
        if not self.rank and (self.targets or self.alpha is not None):
            raise InputError(
                "lora.targets and lora.alpha have no effect without lora.rank; set it (8 is common) or remove them"
            )

    @property
    def scale(self) -> float:
        """Factor of the low-rank update: alpha / rank."""
        return 2.0 if self.alpha is None else self.alpha / max(self.rank, 1)


@dataclass(frozen=True)
class Training:
    """Training length, batch size, evaluation and checkpoints."""

    steps: int | None = None
    """Number of training steps. Default: determined by epochs."""
    epochs: float | None = None
    """Number of passes over the training data; cannot be combined with steps. Default: 1, unless steps is given."""
    batch_size: int = 32
    """Number of examples per training step."""
    accumulate: int = 1
    """Gradient accumulation: number of micro-batches that each batch is split into; gives the same update with less
    memory."""
    seed: int = 0
    """Random seed for the initial weights, the order of examples, the spans of span corruption, and dropout."""
    log_every: int = 20
    """Number of steps between log entries with the training loss."""
    eval_every: int = 500
    """Number of steps between evaluations; 0 evaluates only after the last step, which is always evaluated."""
    eval_batch_size: int | None = None
    """Number of examples per evaluation batch. Default: batch_size / accumulate."""
    eval_examples: int | None = None
    """Number of validation examples to evaluate on, taken from the start of the data. Default: all."""
    save_every: int = 500
    """Number of steps between checkpoints; 0 saves only after the last step, which is always saved."""
    keep: int = 2
    """Number of most recent checkpoints to keep; older ones are deleted."""
    keep_best: str | None = None
    """Validation metric that selects the best checkpoint, which is kept and exported to best/.
    Default: off."""
    on_damage: Literal["fallback", "stop"] = "fallback"
    """What to do when the newest checkpoint is damaged: resume from the newest intact one, or stop with an error."""

    def __post_init__(self) -> None:
        if self.steps is not None and self.epochs is not None:
            raise InputError("training.steps cannot be combined with training.epochs; remove one of them")
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
                raise InputError(f"training.{name} must be at least 0, got {getattr(self, name)}")
        if self.batch_size % self.accumulate:
            raise InputError(
                f"training.batch_size={self.batch_size} must be a multiple of training.accumulate={self.accumulate}; "
                "change one of them"
            )

    def length(self, examples: int) -> int:
        """Number of training steps, given the number of training examples."""
        return self.steps or max(1, math.ceil((self.epochs or 1.0) * examples / self.batch_size))

    @property
    def eval_rows(self) -> int:
        """Number of examples per evaluation batch, given or default."""
        return self.eval_batch_size or self.batch_size // self.accumulate


@dataclass(frozen=True)
class Tracking:
    """Experiment trackers that receive the metrics in addition to metrics.jsonl and the console."""

    tensorboard: bool = False
    """Write TensorBoard event files to the run directory (requires flaxen[tensorboard])."""
    wandb: str | None = None
    """Weights & Biases project to log to (requires wandb). Default: off."""
    trackio: str | None = None
    """Trackio project to log to (requires trackio). Default: off."""
    name: str | None = None
    """Name of the run in Weights & Biases or Trackio. Default: the name of the run directory."""
