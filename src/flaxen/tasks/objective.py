"""Objectives: settings of each task's loss (lengths, span corruption, label smoothing, z-loss) and its evaluation."""

from dataclasses import dataclass
from typing import Any, Literal

from flaxen.errors import InputError
from flaxen.generate.options import Options, make_options


@dataclass(frozen=True)
class DenoiseObjective:
    """Span corruption, the pre-training objective of T5. Target lengths follow from the input length."""

    input_length: int = 512
    """Number of input tokens per example; ByT5 uses 1024."""
    noise_density: float = 0.15
    """Fraction of the tokens that is masked, 0 to 1."""
    mean_span: float | None = None
    """Mean length of a masked span. Default: 3 tokens; 20 bytes for ByT5."""
    z_loss: float = 0.0
    """Weight of the z-loss log²(Z), which keeps the logits from drifting; 1e-4 is common with bfloat16."""


@dataclass(frozen=True)
class Seq2SeqObjective:
    """Sequence-to-sequence training: generate the target of each source."""

    source_length: int = 512
    """Maximum number of tokens of a source, including its end token."""
    target_length: int = 128
    """Maximum number of tokens of a target, including its end token."""
    long: Literal["truncate", "error"] = "truncate"
    """Pairs longer than source_length or target_length: truncate them and report how many, or stop with an error."""
    batching: Literal["grouped", "packed"] = "grouped"
    """How batches are formed.
    grouped: pairs of similar length share a batch.
    packed: each of the training.batch_size rows holds several pairs that do not attend to each other."""
    shapes: int = 4
    """Number of source lengths to pad to when grouped, and half as many target lengths; each shape compiles once."""
    label_smoothing: float = 0.0
    """Label smoothing: probability mass spread over all tokens, at least 0 and below 1."""
    z_loss: float = 0.0
    """Weight of the z-loss log²(Z), which keeps the logits from drifting; 1e-4 is common with bfloat16."""

    def __post_init__(self) -> None:
        if self.source_length < 2 or self.target_length < 2 or self.shapes < 1:
            lengths = f"{self.source_length}, {self.target_length} and {self.shapes}"
            raise InputError(
                f"objective.source_length and target_length must be at least 2, and shapes at least 1, got {lengths}"
            )
        if not 0 <= self.label_smoothing < 1 or self.z_loss < 0:
            raise InputError(
                "objective.label_smoothing must be at least 0 and below 1, and objective.z_loss at least 0, "
                f"got {self.label_smoothing} and {self.z_loss}"
            )

    @property
    def longest(self) -> int:
        """Maximum number of tokens in an output."""
        return self.target_length


@dataclass(frozen=True)
class EvalGeneration:
    """Text generation at each evaluation: its outputs are scored and saved."""

    examples: int = 100
    """Number of validation examples to generate for, taken from the start; 0 evaluates the loss only."""
    batch_size: int = 16
    """Number of examples generated together."""
    num_beams: int = 1
    """Number of beams of beam search; 1 is greedy search."""
    length_penalty: float = 1.0
    """Length penalty of beam search: a beam's log-probability is divided by its length to this power."""
    no_repeat_ngram_size: int = 0
    """Never generate the same n-gram of this many tokens twice; 0 disables the check."""
    max_new_tokens: int | None = None
    """Maximum number of generated tokens. Default: objective.target_length or objective.length."""

    def __post_init__(self) -> None:
        if self.examples < 0 or self.batch_size < 1:
            raise InputError(
                "generation.examples must be at least 0 and generation.batch_size at least 1, "
                f"got {self.examples} and {self.batch_size}"
            )

    def options(self, longest: int) -> Options:
        """Generation options for outputs of at most `longest` tokens."""
        given: dict[str, Any] = {"max_new_tokens": self.max_new_tokens or longest, "num_beams": self.num_beams}
        if self.num_beams > 1:
            given["length_penalty"] = self.length_penalty
        if self.no_repeat_ngram_size:
            given["no_repeat_ngram_size"] = self.no_repeat_ngram_size
        return make_options(given)


@dataclass(frozen=True)
class LanguageObjective:
    """Language modelling: predict the next token."""

    length: int = 2048
    """Sequence length in tokens; the model's memory is reset after each sequence.
    For images, a multiple of the number of values of one image."""
    update: int | None = None
    """Number of tokens per training step, a divisor of length; memory carries over between the steps of a sequence.
    Default: the whole sequence."""
    commit: float = 1e-4
    """Weight of the commitment loss, the distance between keys and their codes (Transformer-VQ only)."""
    normalise: Literal["tokens", "positions"] = "tokens"
    """What the loss is averaged over: tokens, or all positions including padding, as in the original Transformer-VQ."""
    codebooks: Literal["random", "data"] = "random"
    """Initialise codebooks randomly, as the original does, or by k-means over the first batch (Transformer-VQ)."""
    continued: bool = False
    """Evaluate without resetting the model's memory between sequences.
    Each row of an evaluation batch reads a contiguous part of the data as one text; with batch size 1, all of it."""

    def __post_init__(self) -> None:
        update = self.length if self.update is None else self.update
        if self.length < 1 or update < 1 or self.length % update:
            raise InputError(
                "objective.length must be a multiple of objective.update, and both positive, "
                f"got {self.length} and {update}"
            )
        if self.commit < 0:
            raise InputError(f"objective.commit must be at least 0, got {self.commit}")

    @property
    def chunk(self) -> int:
        """Number of tokens of a sequence per training step."""
        return self.length if self.update is None else self.update


@dataclass(frozen=True)
class CaptionObjective:
    """Image captioning: generate the caption of an image."""

    length: int = 64
    """Maximum number of tokens of a caption, including its end token; longer captions are truncated."""
    lowercase: bool = False
    """Convert captions to lower case, as the old training script did."""
    label_smoothing: float = 0.0
    """Label smoothing: probability mass spread over all tokens, at least 0 and below 1."""
    z_loss: float = 0.0
    """Weight of the z-loss log²(Z), which keeps the logits from drifting; 1e-4 is common with bfloat16."""

    def __post_init__(self) -> None:
        if self.length < 2:
            raise InputError(f"objective.length must be at least 2, got {self.length}")
        if not 0 <= self.label_smoothing < 1 or self.z_loss < 0:
            raise InputError(
                "objective.label_smoothing must be at least 0 and below 1, and objective.z_loss at least 0, "
                f"got {self.label_smoothing} and {self.z_loss}"
            )

    @property
    def longest(self) -> int:
        """Maximum number of tokens in an output."""
        return self.length
