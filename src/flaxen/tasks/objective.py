"""What tasks can be told."""

from dataclasses import dataclass
from typing import Any, Literal

from flaxen.errors import InputError
from flaxen.generate.options import Options, make_options


@dataclass(frozen=True)
class DenoiseObjective:
    """Span corruption. Lengths of examples and targets follow from `input_length`."""

    input_length: int = 512
    """Tokens that the model reads; ByT5 uses 1024."""
    noise_density: float = 0.15
    """Share of the text that is cut out."""
    mean_span: float | None = None
    """Mean length of what is cut out at one place. Default 3 tokens; 20 bytes for ByT5."""
    z_loss: float = 0.0
    """Weight of log²(Z), which keeps logits from drifting; 1e-4 is usual with bfloat16."""


@dataclass(frozen=True)
class Seq2SeqObjective:
    """Learning to write the target of each source."""

    source_length: int = 512
    """Most tokens that the model reads; a longer source is cut."""
    target_length: int = 128
    """Most tokens that it writes; a longer target is cut."""
    long: Literal["truncate", "error"] = "truncate"
    """Pairs beyond these limits: cut them and say how many, or refuse them."""
    batching: Literal["grouped", "packed"] = "grouped"
    """Pairs of like lengths together; or several pairs to a row of source_length, blind to each other. A batch then
    has training.batch_size rows, each with several pairs."""
    shapes: int = 4
    """Lengths of sources to pad to when grouped (and half as many of targets): each shape is compiled once."""
    label_smoothing: float = 0.0
    """Share of the probability that is wanted for all tokens alike instead of the label."""
    z_loss: float = 0.0
    """Weight of log²(Z), which keeps logits from drifting; 1e-4 is usual with bfloat16."""

    def __post_init__(self) -> None:
        if self.source_length < 2 or self.target_length < 2 or self.shapes < 1:
            lengths = f"{self.source_length}, {self.target_length} and {self.shapes}"
            raise InputError(f"source_length and target_length must be at least 2 and shapes 1, got {lengths}")
        if not 0 <= self.label_smoothing < 1 or self.z_loss < 0:
            raise InputError(
                f"smoothing is a share below 1 and z_loss not negative, got {self.label_smoothing}, {self.z_loss}"
            )

    @property
    def longest(self) -> int:
        """Tokens of the longest output."""
        return self.target_length


@dataclass(frozen=True)
class EvalGeneration:
    """What the model writes for validation sources at each evaluation, to be scored and read."""

    examples: int = 100
    """Write for so many validation pairs, the first ones; 0 measures the loss alone."""
    batch_size: int = 16
    """Sources computed together."""
    num_beams: int = 1
    """Beams of beam search; 1 is greedy search."""
    length_penalty: float = 1.0
    """Beam scores are sums of log-probabilities over length ** this."""
    no_repeat_ngram_size: int = 0
    """Write no sequence of so many tokens twice; 0 turns it off."""
    max_new_tokens: int | None = None
    """Default: the longest target, objective.target_length or objective.length."""

    def __post_init__(self) -> None:
        if self.examples < 0 or self.batch_size < 1:
            raise InputError(
                "generation.examples must be at least 0 and generation.batch_size at least 1, "
                f"got {self.examples} and {self.batch_size}"
            )

    def options(self, longest: int) -> Options:
        """Of generation."""
        given: dict[str, Any] = {"max_new_tokens": self.max_new_tokens or longest, "num_beams": self.num_beams}
        if self.num_beams > 1:
            given["length_penalty"] = self.length_penalty
        if self.no_repeat_ngram_size:
            given["no_repeat_ngram_size"] = self.no_repeat_ngram_size
        return make_options(given)


@dataclass(frozen=True)
class LanguageObjective:
    """Predicting what comes next."""

    length: int = 2048
    """Tokens of a sequence: what is remembered is forgotten behind it. For pictures, all numbers of one."""
    update: int | None = None
    """Tokens of an update: a sequence is trained on in so many at a time. Default: the whole sequence."""
    commit: float = 1e-4
    """Weight of the distance of keys to their codes."""
    normalise: Literal["tokens", "positions"] = "tokens"
    """The loss is a mean over real tokens; or over padding too, as in the original."""
    codebooks: Literal["random", "data"] = "random"
    """Start codebooks as noise, as the original does, or by k-means over the keys of the first batch."""
    continued: bool = False
    """Evaluate with the state carried from sequence to sequence. Each row of an evaluation batch reads its share of the
    data as one text: with a batch size of 1, all of it is one."""

    def __post_init__(self) -> None:
        update = self.length if self.update is None else self.update
        if self.length < 1 or update < 1 or self.length % update:
            raise InputError(
                f"objective.length={self.length} must be a multiple of objective.update={update}, and both positive"
            )
        if self.commit < 0:
            raise InputError(f"objective.commit must not be negative, got {self.commit}")

    @property
    def chunk(self) -> int:
        return self.length if self.update is None else self.update


@dataclass(frozen=True)
class CaptionObjective:
    """Learning to write the captions of pictures."""

    length: int = 64
    """Most tokens of a caption, its end included; a longer one is cut."""
    lowercase: bool = False
    """Captions in lower case, as the old script had them."""
    label_smoothing: float = 0.0
    """Share of the probability that is wanted for all tokens alike instead of the label."""
    z_loss: float = 0.0
    """Weight of log²(Z), which keeps logits from drifting; 1e-4 is usual with bfloat16."""

    def __post_init__(self) -> None:
        if self.length < 2:
            raise InputError(f"objective.length must be at least 2, got {self.length}")
        if not 0 <= self.label_smoothing < 1 or self.z_loss < 0:
            raise InputError(
                f"smoothing is a share below 1 and z_loss not negative, got {self.label_smoothing}, {self.z_loss}"
            )

    @property
    def longest(self) -> int:
        """Tokens of the longest output."""
        return self.length
