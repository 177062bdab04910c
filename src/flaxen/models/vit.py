"""ViT (Vision Transformer): encodes an image, cut into patches, as a sequence of vectors."""

import dataclasses
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from flaxen.nn.attention import Attention
from flaxen.nn.blockwise import Plan
from flaxen.nn.hardware import few_rows_at_a_time
from flaxen.nn.layers import ACTIVATIONS, MLP, LayerNorm, Linear, dropout
from flaxen.nn.param import normal, stacked
from flaxen.nn.stack import run, save_for_backward
from flaxen.tree import leaves, map_leaves


@dataclass(frozen=True)
class Config:
    """ViT configuration. The defaults are those of the checkpoint vit-base-patch16-224."""

    image_size: tuple[int, int] = (224, 224)  # height and width; the position embeddings are for this size
    patch_size: tuple[int, int] = (16, 16)
    n_channels: int = 3
    d_model: int = 768
    d_ff: int = 3072
    n_layers: int = 12
    n_heads: int = 12
    activation: str = "gelu"
    qkv_bias: bool = True
    epsilon: float = 1e-12
    dropout: float = 0.0
    attention_dropout: float = 0.0
    std: float = 0.02  # initial standard deviation of the weights
    pooler: str | None = None  # activation of the pooler, which some checkpoints have and captioning does not use
    pooler_size: int | None = None
    interpolate: bool = False  # accept other image sizes by interpolating the position embeddings
    compute: str = "float32"
    scan: bool = True
    remat: bool = False

    def __post_init__(self) -> None:
        for name in ("n_channels", "d_model", "d_ff", "n_layers", "n_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.d_model % self.n_heads:
            raise ValueError(f"d_model={self.d_model} must be a multiple of n_heads={self.n_heads}")
        if any(image < patch or patch < 1 for image, patch in zip(self.image_size, self.patch_size)):
            raise ValueError(f"image_size must be at least patch_size {self.patch_size}, got {self.image_size}")
        for name in (self.activation, *([self.pooler] if self.pooler else [])):
            if name not in ACTIVATIONS:
                raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {name!r}")
        if self.compute not in ("float32", "bfloat16"):
            raise ValueError(f"compute must be one of float32, bfloat16, got {self.compute!r}")

    @property
    def grid(self) -> tuple[int, int]:
        """Number of rows and columns of patches."""
        return self.image_size[0] // self.patch_size[0], self.image_size[1] // self.patch_size[1]


class Layer(nnx.Module):
    """A pre-norm block: self-attention and feed-forward, each with a residual connection."""

    def __init__(self, config: Config):
        c = config
        head = c.d_model // c.n_heads
        self.attention = Attention(c.d_model, c.n_heads, head, std=c.std, scale=head**-0.5, bias=(c.qkv_bias, True))
        self.attention_norm = LayerNorm(c.d_model, c.epsilon)
        self.mlp = MLP(c.d_model, c.d_ff, c.activation, bias=True, std=(c.std, c.std))
        self.mlp_norm = LayerNorm(c.d_model, c.epsilon)

    def __call__(self, x: Float[Array, "B T D"], config: Config, key: Array | None) -> Float[Array, "B T D"]:
        keys = [None] * 3 if key is None else list(jax.random.split(key, 3))
        dtype, rate = jnp.dtype(config.compute), config.dropout
        y, _ = self.attention(self.attention_norm(x, dtype), Plan(rate=config.attention_dropout), None, keys[0])
        x = save_for_backward(x + dropout(y, rate, keys[1]))
        # As in transformers, there is no dropout inside the feed-forward network.
        return x + dropout(self.mlp(self.mlp_norm(x, dtype), 0.0, None), rate, keys[2])


class ViT(nnx.Module):
    """A ViT: pixels [B, C, height, width] in, vectors [B, 1 + patches, D] out, the class token's first."""

    def __init__(self, config: Config):
        c = config
        self.patches = Linear((c.n_channels, *c.patch_size), (c.d_model,), c.std, bias=True)
        self.first = normal(c.d_model, std=c.std)
        self.positions = normal(1 + math.prod(c.grid), c.d_model, std=c.std)
        self.layers = stacked(Layer(c), c.n_layers)
        self.norm = LayerNorm(c.d_model, c.epsilon)
        size = c.pooler_size or c.d_model
        self.pooler = Linear((c.d_model,), (size,), c.std, bias=True) if c.pooler else None
        self.config = config

    def __call__(self, pixels: Float[Array, "B C height width"], key: Array | None = None) -> Float[Array, "B S D"]:
        c = self.config
        x = self.embed(pixels)
        keys = (None, None) if key is None else tuple(jax.random.split(key))
        x = dropout(x, c.dropout, keys[0])

        def body(layer: Layer, x: Array, key: Array | None) -> Array:
            return few_rows_at_a_time(lambda x, key: layer(x, c, key), x, key)

        x = run(body, self.layers, x, keys[1], scan=c.scan, remat=c.remat)
        return self.norm(x, jnp.dtype(c.compute))

    def embed(self, pixels: Float[Array, "B C height width"]) -> Float[Array, "B S D"]:
        """Embed patches, prepend the class token and add positions, in f32."""
        c, (high, wide) = self.config, self.config.patch_size
        b, channels, height, width = pixels.shape
        if (height, width) != c.image_size and not c.interpolate:
            raise ValueError(
                f"expected images of {c.image_size[0]} × {c.image_size[1]} pixels, got {height} × {width}; "
                "set interpolate=True to accept other sizes"
            )
        # A remainder at the right and bottom edges is dropped, as by a convolution whose stride is the patch size.
        rows, columns = height // high, width // wide
        cropped = pixels[:, :, : rows * high, : columns * wide].astype(jnp.dtype(c.compute))
        # [B, C, rows · high, columns · wide] to [B, rows, columns, C, high, wide]: patches do not overlap, so the
        # convolution of the checkpoint is a matmul over (C, high, wide).
        patches = cropped.reshape(b, channels, rows, high, columns, wide).transpose(0, 2, 4, 1, 3, 5)
        x = self.patches(patches.reshape(b, rows * columns, channels, high, wide)).astype(jnp.float32)
        first = jnp.broadcast_to(self.first[...].astype(jnp.float32), (b, 1, c.d_model))
        return jnp.concatenate([first, x], axis=1) + self.positions_for(rows, columns)

    def positions_for(self, rows: int, columns: int) -> Float[Array, "S D"]:
        """The learned position embeddings, resized if the grid differs; the class token's is unchanged."""
        table = self.positions[...].astype(jnp.float32)
        if (rows, columns) == self.config.grid:
            return table
        grid = table[1:].reshape(*self.config.grid, -1)
        matrices = (bicubic(old, new) for old, new in zip(self.config.grid, (rows, columns)))
        # Bicubic interpolation is separable: one matrix for each axis.
        resized = jnp.einsum("yY,xX,YXD->yxD", *matrices, grid)
        return jnp.concatenate([table[:1], resized.reshape(rows * columns, -1)])


def resized(model: ViT, image_size: tuple[int, int]) -> ViT:
    """Convert a model to another image size, by interpolating its position embeddings once."""
    config = dataclasses.replace(model.config, image_size=image_size)
    positions = model.positions_for(*config.grid).astype(model.positions.dtype)
    # The new model is abstract and only provides the shapes; all values come from the old one.
    weights = {**leaves(model), "positions": positions}
    return map_leaves(lambda path, _: weights[path], ViT(config))


def bicubic(old: int, new: int, a: float = -0.75) -> Float[Array, "new old"]:
    """The matrix that resizes `old` samples to `new` like torch's bicubic interpolation without antialiasing."""
    position = (jnp.arange(new) + 0.5) * (old / new) - 0.5  # position of each new sample among the old ones
    base = jnp.floor(position)
    matrix = jnp.zeros((new, old))
    # Each new sample is a weighted sum of four neighbours; beyond the ends, the outermost sample is repeated.
    for step in range(-1, 3):
        distance = jnp.abs(position - (base + step))
        # Keys' cubic convolution kernel, for distances up to 1 and from 1 to 2.
        near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
        far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
        index = jnp.clip(base + step, 0, old - 1).astype(jnp.int32)
        matrix = matrix.at[jnp.arange(new), index].add(jnp.where(distance <= 1, near, far))
    return matrix


def flops(config: Config, pixels: tuple[int, int] | None = None) -> float:
    """Floating-point operations of the matmuls in the forward pass for one image."""
    c = config
    height, width = pixels or c.image_size
    # Sequence length n: one class token, then the patches.
    n = 1 + (height // c.patch_size[0]) * (width // c.patch_size[1])
    # Multiply-adds: projections, feed-forward, then attention scores and weighted sums of values.
    layer = n * (4 * c.d_model**2 + 2 * c.d_model * c.d_ff + 2 * n * c.d_model)
    return 2.0 * (c.n_layers * layer + n * math.prod(c.patch_size) * c.n_channels * c.d_model)


PRESETS: dict[str, Config] = {
    "vit-tiny": Config(image_size=(48, 48), patch_size=(8, 8), d_model=96, d_ff=384, n_layers=3, n_heads=4, std=0.1),
    "vit-mini": Config(image_size=(64, 64), patch_size=(8, 8), d_model=128, d_ff=512, n_layers=4, n_heads=4),
    "vit-small-patch16-224": Config(d_model=384, d_ff=1536, n_layers=12, n_heads=6),
    "vit-base-patch16-224": Config(),
    "vit-base-patch32-224": Config(patch_size=(32, 32)),
    "vit-large-patch16-224": Config(d_model=1024, d_ff=4096, n_layers=24, n_heads=16),
}
