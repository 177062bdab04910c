"""GPT-2 as a `LanguageModel`: the functions that the language-modelling task needs (flaxen.tasks.language)."""

from typing import Any

from jax import Array
from jaxtyping import Bool, Int

from flaxen.models.gpt2 import GPT2, Config, flops
from flaxen.nn.loss import Sums

__all__ = [
    "adapt_config",
    "check",
    "flops",
    "has_codebooks",
    "initial_carry",
    "language_loss",
    "notes",
    "prepare_model",
]

# Settings of the objective for carried state or quantisation, neither of which GPT-2 has.
UNUSED = ("update", "continued", "commit", "codebooks")


def adapt_config(config: Config, objective: Any, image: tuple[int, ...], training: bool) -> Config:
    """Return the configuration unchanged: nothing in it depends on the data."""
    if image:
        raise ValueError("a GPT-2 cannot be trained on pixels, only on text or bytes; train a Transformer-VQ instead")
    return config


def check(config: Config, objective: Any) -> None:
    """Raise a ValueError if a model with this configuration cannot be trained with this objective."""
    if config.cross:
        raise ValueError(
            "this GPT-2 is a captioner's decoder (it has cross-attention) and cannot be trained as a language model"
        )
    if objective.length > config.n_positions:
        raise ValueError(
            f"objective.length={objective.length} exceeds the model's {config.n_positions} positions; set "
            f"--objective.length {config.n_positions} or less"
        )
    for name in UNUSED:
        # `chunk` is `update` or, by default, `length`; an update of the whole length is therefore allowed.
        default = objective.length if name == "update" else getattr(type(objective), name)
        given = objective.chunk if name == "update" else getattr(objective, name)
        if given != default:
            raise ValueError(
                f"objective.{name}={given} has no effect with a GPT-2, which reads each row independently and has no "
                f"codebooks; remove objective.{name}"
            )


def notes(config: Config) -> list[str]:
    """Facts about the model to print before a run."""
    return [f"each row is read independently, from position 0; the context is at most {config.n_positions:,} tokens"]


def has_codebooks(config: Config) -> bool:
    return False


def initial_carry(config: Config, rows: int) -> None:
    """The initial carry: None, because a GPT-2 carries nothing from chunk to chunk."""


def language_loss(
    model: GPT2,
    inputs: Int[Array, "B T"],
    labels: Int[Array, "B T"],
    fresh: Bool[Array, "B"],
    carry: None,
    key: Array | None,
    objective: Any,
) -> tuple[Sums, None]:
    """The loss sums of a batch, and the next carry: None."""
    return model.loss(inputs, labels, key=key)[1], None


def prepare_model(model: GPT2, inputs: Int[Array, "B T"], key: Array, objective: Any) -> GPT2:
    """Return the model unchanged: there are no codebooks to initialise from the data."""
    return model
