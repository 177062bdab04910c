"""Image captioning: a ViT encodes the image, a GPT-2 with cross-attention generates the caption."""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from flaxen.models import gpt2, vit
from flaxen.nn import param
from flaxen.nn.layers import Linear
from flaxen.nn.loss import Sums
from flaxen.tree import map_leaves


@dataclass(frozen=True)
class Config:
    """Configurations of the encoder and the decoder. If their widths differ, a linear projection connects them."""

    encoder: vit.Config
    decoder: gpt2.Config

    def __post_init__(self) -> None:
        if not self.decoder.cross:
            raise ValueError("the decoder of a captioner requires cross=True, because it attends to the image")

    def for_vocabulary(self, size: int, pad_id: int, eos_id: int) -> "Config":
        """Adapt to a tokenizer's vocabulary. Captions begin with the padding token, like T5's outputs."""
        decoder = self.decoder.for_vocabulary(size, pad_id, eos_id)
        return dataclasses.replace(self, decoder=dataclasses.replace(decoder, start_id=pad_id))

    # Properties that generation and the trainer read from any model's configuration.
    @property
    def vocab_size(self) -> int:
        return self.decoder.vocab_size

    @property
    def pad_id(self) -> int:
        return self.decoder.pad_id

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self.decoder.eos_ids

    @property
    def start_id(self) -> int:
        return self.decoder.start_id

    @property
    def compute(self) -> str:
        return self.decoder.compute


class Captioner(nnx.Module):
    """A ViT-GPT-2 captioner: pixels [B, C, height, width] and token ids in, logits of the caption out."""

    def __init__(self, config: Config):
        encoder, decoder = config.encoder, config.decoder
        self.encoder = vit.ViT(encoder)
        self.decoder = gpt2.GPT2(decoder)
        differ = encoder.d_model != decoder.d_model
        self.bridge = Linear((encoder.d_model,), (decoder.d_model,), decoder.std, bias=True) if differ else None
        self.config = config

    def encode(self, pixels: Float[Array, "B C height width"], key: Array | None = None) -> Float[Array, "B S D"]:
        """Encode images to the vectors that the decoder attends to."""
        x = self.encoder(pixels, key)
        return x if self.bridge is None else self.bridge(x)

    def logits(self, pixels: Float[Array, "B C height width"], decoder_ids: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        return self.decoder.logits(decoder_ids, self.encode(pixels))

    def loss(
        self,
        pixels: Float[Array, "B C height width"],
        labels: Int[Array, "B T"],
        *,
        smoothing: float = 0.0,
        z_loss: float = 0.0,
        key: Array | None = None,
    ) -> tuple[Float[Array, ""], Sums]:
        """Mean loss over non-negative labels, and the loss sums. Decoder inputs are the labels shifted right by one."""
        keys = (None, None) if key is None else tuple(jax.random.split(key))
        filled = jnp.where(labels >= 0, labels, self.config.pad_id)
        shifted = jnp.pad(filled[:, :-1], ((0, 0), (1, 0)), constant_values=self.config.start_id)
        source = self.encode(pixels, keys[0])
        return self.decoder.loss(shifted, labels, source, smoothing=smoothing, z_loss=z_loss, key=keys[1])


def join(encoder: vit.Config, decoder: gpt2.Config) -> Config:
    """Configure a captioner with this encoder and decoder."""
    return Config(encoder, dataclasses.replace(decoder, cross=True))


def with_config(model: Captioner, config: Config) -> Captioner:
    """Rebuild the model with another configuration; if the image size changes, the position embeddings are resized."""
    if model.config.encoder.image_size != config.encoder.image_size:
        encoder = vit.resized(model.encoder, config.encoder.image_size)
        model = map_leaves(lambda path, leaf: leaf, model)  # a shallow copy, so that the caller's model stays unchanged
        model.encoder = encoder
    return param.with_config(model, config)


def flops(config: Config, length: int) -> float:
    """Floating-point operations of the matmuls in the forward pass for one image and caption."""
    rows, columns = config.encoder.grid
    patches = 1 + rows * columns  # including the class token
    bridge = patches * config.encoder.d_model * config.decoder.d_model
    between = 2.0 * bridge if config.encoder.d_model != config.decoder.d_model else 0.0
    return vit.flops(config.encoder) + between + gpt2.flops(config.decoder, length, patches)
