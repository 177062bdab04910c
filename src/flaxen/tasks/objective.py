"""Objectives: settings of each task's loss (lengths, span corruption, label smoothing, z-loss) and its evaluation."""

from dataclasses import dataclass
from typing import Any, Literal

from flaxen.errors import InputError
from flaxen.generate.options import Options, make_options


@dataclass(frozen=True)
class DenoiseObjective:
    """Span corruption, the pre-training objective of T5. Target lengths follow from the input length."""

    input_length: int = 512
    """Number of input tokens per example; ByT5 was pre-trained with 1024."""
    noise_density: float = 0.15
    """Fraction of tokens to mask, above 0 and below 1."""
    mean_span: float | None = None
    """Mean length of a masked span, in tokens. Default: 3, or 20 for ByT5."""
    z_loss: float = 0.0
    """Weight of the z-loss log²(Z), where Z is the softmax denominator; keeps logits from drifting. 1e-4 is common with
    bfloat16."""


@dataclass(frozen=True)
class Seq2SeqObjective:
    """Sequence-to-sequence training: generate the target of each source."""

    source_length: int = 512
    """Maximum number of tokens per source, including the end token."""
    target_length: int = 128
    """Maximum number of tokens per target, including the end token."""
    long: Literal["truncate", "error"] = "truncate"
    """What to do with pairs longer than source_length or target_length: truncate them and report how many, or stop with
    an error."""
    batching: Literal["grouped", "packed"] = "grouped"
    """How batches are formed.
    grouped: pairs of similar length share a batch.
    packed: each of the training.batch_size rows holds several pairs that do not attend to each other."""
    shapes: int = 4
    """Number of different lengths that sources are padded to when pairs of similar length share a batch; targets have
    half as many. More lengths mean less padding but more compilations."""
    label_smoothing: float = 0.0
    """Label smoothing: probability mass spread over all tokens, at least 0 and below 1."""
    z_loss: float = 0.0
    """Weight of the z-loss log²(Z), where Z is the softmax denominator; keeps logits from drifting. 1e-4 is common with
    bfloat16."""

    def __post_init__(self) -> None:
        if self.source_length < 2 or self.target_length < 2 or self.shapes < 1:
            lengths = f"{self.source_length}, {self.target_length} and {self.shapes}"
            raise InputError(
                "objective.source_length and objective.target_length must be at least 2, "
                f"and objective.shapes at least 1, got {lengths}"
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
    """Number of validation examples to generate for, taken from the start of the data; 0 evaluates only the loss."""
    batch_size: int = 16
    """Number of examples per batch for generation."""
    num_beams: int = 1
    """Number of beams for beam search; 1 means greedy search."""
    length_penalty: float = 1.0
    """Length penalty for beam search: beam scores are divided by length to this power; values above 0 favour longer
    outputs."""
    no_repeat_ngram_size: int = 0
    """Never generate the same n-gram of this many tokens twice; 0 disables the check."""
    max_new_tokens: int | None = None
    """Maximum number of generated tokens, including the end token. Default: the maximum length of
    targets or captions in training."""

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
    For pixels, it must be a multiple of the number of values per image."""
    update: int | None = None
    """Number of tokens of each sequence that one training step processes; must divide objective.length. Memory carries
    over from step to step within a sequence. Default: the whole sequence."""
    commit: float = 1e-4
    """Weight of the commitment loss, the distance between keys and their codes (Transformer-VQ only)."""
    normalise: Literal["tokens", "positions"] = "tokens"
    """What the loss is averaged over: tokens, or all positions including padding, as in the original Transformer-VQ."""
    codebooks: Literal["random", "data"] = "random"
    """How to initialise codebooks: randomly, as in the original, or by k-means on the first batch (Transformer-VQ
    only)."""
    continued: bool = False
    """Evaluate without resetting the model's memory between sequences. Each row of an evaluation batch reads a
    contiguous part of the data as one long sequence; with batch size 1, all the data."""

    def __post_init__(self) -> None:
        update = self.length if self.update is None else self.update
        if self.length < 1 or update < 1 or self.length % update:
            raise InputError(
                "objective.length must be a multiple of objective.update, and both must be positive, "
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
    """Maximum number of tokens per caption, including the end token; longer captions are truncated."""
    lowercase: bool = False
    """Convert captions to lower case, as Hugging Face's run_image_captioning_flax.py does."""
    label_smoothing: float = 0.0
    """Label smoothing: probability mass spread over all tokens, at least 0 and below 1."""
    z_loss: float = 0.0
    """Weight of the z-loss log²(Z), where Z is the softmax denominator; keeps logits from drifting. 1e-4 is common with
    bfloat16."""

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
