"""GPT-2 as the language-modelling task trains it: its `LanguageModel` (flaxen.tasks.language)."""

from typing import Any

from jax import Array
from jaxtyping import Bool, Int

from flaxen.models.gpt2 import GPT2, Config, flops
from flaxen.nn.loss import Sums

__all__ = ["adapt_config", "check", "flops", "has_codebooks", "initial_carry", "language_loss", "notes", "prepare"]

# Settings of the objective that say what to carry or how to quantise: nothing here does either.
UNUSED = ("update", "continued", "commit", "codebooks")


def adapt_config(config: Config, objective: Any, image: tuple[int, ...], training: bool) -> Config:
    """Nothing of the configuration depends on the data."""
    if image:
        raise ValueError("a GPT-2 predicts text or bytes; for pixels, train a Transformer-VQ")
    return config


def check(config: Config, objective: Any) -> None:
    """ValueError if a model with this configuration cannot be trained so."""
    if config.cross:
        raise ValueError("this GPT-2 has cross-attention, the decoder of a captioner; it is no language model alone")
    if objective.length > config.n_positions:
        raise ValueError(
            f"objective.length={objective.length} is more than the model's {config.n_positions} positions; set "
            f"--objective.length {config.n_positions}, or less"
        )
    for name in UNUSED:
        default = objective.length if name == "update" else getattr(type(objective), name)
        given = objective.chunk if name == "update" else getattr(objective, name)
        if given != default:
            raise ValueError(
                f"objective.{name}={given} is for a Transformer-VQ: a GPT-2 reads each row alone and has no codebooks; "
                f"leave objective.{name} out"
            )


def notes(config: Config) -> list[str]:
    return [f"each row is read alone, from position 0: at most {config.n_positions:,} tokens are seen at once"]


def has_codebooks(config: Config) -> bool:
    return False


def initial_carry(config: Config, rows: int) -> None:
    """Nothing is carried from row to row."""


def language_loss(
    model: GPT2,
    inputs: Int[Array, "B T"],
    labels: Int[Array, "B T"],
    fresh: Bool[Array, "B"],
    carry: None,
    key: Array | None,
    objective: Any,
) -> tuple[Sums, None]:
    return model.loss(inputs, labels, key=key)[1], None


def prepare(model: GPT2, inputs: Int[Array, "B T"], key: Array, objective: Any) -> GPT2:
    """The model that training starts from."""
    return model
