"""The T5 encoder alone: text in, hidden states out. Used for text embeddings and in diffusion models."""

from dataclasses import dataclass

from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from flaxen.models import t5
from flaxen.nn.layers import Embedding


@dataclass(frozen=True)
class Config(t5.Config):
    """T5 configuration. The fields of the decoder and the head are saved with a checkpoint but have no effect."""


class T5Encoder(nnx.Module):
    """A T5 encoder. `valid` is True for real tokens, None if all are real; or segment numbers of packed texts."""

    def __init__(self, config: Config):
        self.embedding = Embedding(config.vocab_size, config.d_model, std=config.factor)
        self.encoder = t5.Stack(config, decoder=False)
        self.config = config

    def encode(
        self, ids: Int[Array, "B S"], valid: t5.Mask | None = None, key: Array | None = None
    ) -> Float[Array, "B S D"]:
        return self.encoder(self.embedding(ids), valid, None, key)


def flops(config: Config, source: int) -> float:
    """Floating-point operations of the matmuls in the forward pass for one example."""
    return t5.encoder_flops(config, source)
