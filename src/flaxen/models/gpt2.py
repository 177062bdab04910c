"""GPT-2: a language model or, with cross-attention, the decoder of a captioner."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int

from flaxen.nn.attention import AttentionPlan, JointAttention, JointCrossAttention, LayerCache, Source
from flaxen.nn.blockwise import Plan
from flaxen.nn.hardware import few_rows_at_a_time
from flaxen.nn.layers import ACTIVATIONS, MLP, Embedding, LayerNorm, dropout
from flaxen.nn.loss import Sums, cross_entropy
from flaxen.nn.param import round_up, stacked
from flaxen.nn.stack import run, save_for_backward


@dataclass(frozen=True)
class Config:
    """GPT-2 configuration. The defaults are those of the checkpoint gpt2."""

    vocab_size: int = 50257
    n_positions: int = 1024
    d_model: int = 768
    d_ff: int = 3072
    n_layers: int = 12
    n_heads: int = 12
    activation: str = "gelu_new"
    cross: bool = False  # cross-attention to an encoder
    epsilon: float = 1e-5
    scaled: bool = True  # scale scores by 1 / sqrt(head size)
    inverse_layer: bool = False  # also scale scores by 1 / layer number, counted from 1
    tied: bool = True  # use the embedding table as the output head
    dropout: float = 0.1  # after attention and feed-forward
    embedding_dropout: float = 0.1
    attention_dropout: float = 0.1
    std: float = 0.02  # initial standard deviation of the weights
    pad_id: int = 50256
    eos_ids: tuple[int, ...] = (50256,)
    start_id: int = 50256
    compute: str = "float32"
    scan: bool = True
    remat: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "n_positions", "d_model", "d_ff", "n_layers", "n_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.d_model % self.n_heads:
            raise ValueError(f"d_model={self.d_model} must be a multiple of n_heads={self.n_heads}")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {self.activation!r}")
        for name in ("pad_id", "start_id"):
            if not 0 <= getattr(self, name) < self.vocab_size:
                raise ValueError(f"{name}={getattr(self, name)} is not in the vocabulary of {self.vocab_size} tokens")
        if self.compute not in ("float32", "bfloat16"):
            raise ValueError(f"compute must be one of float32, bfloat16, got {self.compute!r}")

    def for_vocabulary(self, size: int, pad_id: int, eos_id: int) -> "Config":
        """Adapt to a tokenizer's vocabulary. The end-of-sequence token also starts every text."""
        rows = round_up(size)
        return dataclasses.replace(self, vocab_size=rows, pad_id=pad_id, eos_ids=(eos_id,), start_id=eos_id)

    def score_scales(self) -> Float[Array, "L"] | None:
        """Scale factor of each layer's attention scores, in addition to 1 / sqrt(head size); None if all are 1."""
        return 1.0 / (1.0 + jnp.arange(self.n_layers)) if self.inverse_layer else None


class Layer(nnx.Module):
    """A pre-norm block: self-attention, cross-attention if there is an encoder, feed-forward; each with a residual."""

    def __init__(self, config: Config):
        c = config
        # Projections into the residual stream are initialised smaller in deeper models, because more layers add to it.
        std = (c.std, c.std * (2 * c.n_layers) ** -0.5)
        scale = (c.d_model // c.n_heads) ** -0.5 if c.scaled else 1.0
        self.attention = JointAttention(c.d_model, c.n_heads, std, scale)
        self.attention_norm = LayerNorm(c.d_model, c.epsilon)
        self.cross = JointCrossAttention(c.d_model, c.n_heads, std, scale) if c.cross else None
        self.cross_norm = LayerNorm(c.d_model, c.epsilon) if c.cross else None
        self.mlp = MLP(c.d_model, c.d_ff, c.activation, bias=True, std=std)
        self.mlp_norm = LayerNorm(c.d_model, c.epsilon)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        plan: AttentionPlan,
        source: Source | None,
        cache: LayerCache | None,
        config: Config,
        key: Array | None,
    ) -> tuple[Float[Array, "B T D"], LayerCache | None]:
        keys = [None] * 5 if key is None else list(jax.random.split(key, 5))
        dtype, rate = jnp.dtype(config.compute), config.dropout
        own, seen = cache or (None, None)
        y, own = self.attention(self.attention_norm(x, dtype), plan, own, keys[0])
        x = save_for_backward(x + dropout(y, rate, keys[1]))
        if self.cross is not None and self.cross_norm is not None and source is not None:
            y, seen = self.cross(self.cross_norm(x, dtype), source, seen, keys[2])
            x = save_for_backward(x + dropout(y, rate, keys[3]))
        # Unlike T5, GPT-2 has no dropout inside the feed-forward network.
        x = x + dropout(self.mlp(self.mlp_norm(x, dtype), 0.0, None), rate, keys[4])
        return x, None if cache is None else LayerCache(own, seen)


class GPT2(nnx.Module):
    """GPT-2: token ids in, hidden states out; `output_head` turns them into logits of the next token."""

    def __init__(self, config: Config):
        c = config
        self.embedding = Embedding(c.vocab_size, c.d_model, c.std)
        self.positions = Embedding(c.n_positions, c.d_model, c.std)
        self.layers = stacked(Layer(c), c.n_layers)
        self.norm = LayerNorm(c.d_model, c.epsilon)
        self.head = None if c.tied else Embedding(c.vocab_size, c.d_model, c.std)
        self.config = config

    def __call__(
        self,
        ids: Int[Array, "B T"],
        source: Float[Array, "B S D"] | None = None,
        valid: Bool[Array, "B T"] | None = None,
        key: Array | None = None,
    ) -> Float[Array, "B T D"]:
        """Compute hidden states. `valid` is False for padding, on either side: positions count only real tokens."""
        c = self.config
        if ids.shape[1] > c.n_positions:
            raise ValueError(f"{ids.shape[1]} tokens exceed the {c.n_positions} positions of this GPT-2")
        keys = (None, None) if key is None else tuple(jax.random.split(key))
        x = dropout(self.embed(ids, self.count(ids, valid)), c.embedding_dropout, keys[0])
        plan = Plan(valid, causal=True, rate=c.attention_dropout)
        cross = Plan(rate=c.attention_dropout)

        def body(layer: Any, x: Array, key: Array | None) -> Array:
            # `run` slices any pytree by layer: here the weights together with the score scale of the layer, or None.
            block, scale = layer

            def some_rows(x: Array, rows: Any, source: Array | None, key: Array | None) -> Array:
                self_plan = plan.of(rows)._replace(scale=scale)
                cross_source = None if source is None else Source(source, cross._replace(scale=scale))
                return block(x, self_plan, cross_source, None, c, key)[0]

            return few_rows_at_a_time(some_rows, x, key, plan.rows(), source)

        x = run(body, (self.layers, c.score_scales()), x, keys[1], scan=c.scan, remat=c.remat)
        return self.norm(x, jnp.dtype(c.compute))

    def count(self, ids: Int[Array, "B T"], valid: Bool[Array, "B T"] | None) -> Int[Array, "B T"]:
        """The position of each token among the real tokens of its row."""
        if valid is None:
            return jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        # Padding before the first real token would get position -1.
        return jnp.maximum(jnp.cumsum(valid, axis=1) - 1, 0)

    def embed(self, ids: Int[Array, "*B"], positions: Int[Array, "*B"]) -> Float[Array, "*B D"]:
        """Sum of token and position embeddings, in f32."""
        return (self.embedding(ids) + self.positions(positions)).astype(jnp.float32)

    def logits(
        self,
        ids: Int[Array, "B T"],
        source: Float[Array, "B S D"] | None = None,
        valid: Bool[Array, "B T"] | None = None,
    ) -> Float[Array, "B T V"]:
        return self.output_head.logits(self(ids, source, valid))

    def loss(
        self,
        inputs: Int[Array, "B T"],
        labels: Int[Array, "B T"],
        source: Float[Array, "B S D"] | None = None,
        *,
        smoothing: float = 0.0,
        z_loss: float = 0.0,
        key: Array | None = None,
    ) -> tuple[Float[Array, ""], Sums]:
        """Mean loss over non-negative labels, and the loss sums. `labels[:, t]` is the token after `inputs[:, t]`."""
        hidden = self(inputs, source, key=key)
        weights = (labels >= 0).astype(jnp.float32).reshape(-1)
        # Any valid id will do for an ignored label: its weight is 0.
        labels = jnp.maximum(labels, 0).reshape(-1)
        flat = hidden.reshape(-1, hidden.shape[-1])
        sums = cross_entropy(flat, self.output_head.weight[...], labels, weights, smoothing, z_loss)
        return sums.loss / jnp.maximum(sums.weight, 1.0), sums

    @property
    def output_head(self) -> Embedding:
        return self.embedding if self.head is None else self.head


def flops(config: Config, length: int, source: int = 0) -> float:
    """Floating-point operations of the matmuls in the forward pass for one example."""
    c = config
    # Multiply-adds of one layer: projections, feed-forward, then attention scores and weighted sums of values.
    layer = length * (4 * c.d_model**2 + 2 * c.d_model * c.d_ff + 2 * length * c.d_model)
    if c.cross:
        # Cross-attention: q and o for each token, k and v for each vector of the source.
        layer += length * (2 * c.d_model**2 + 2 * source * c.d_model) + source * 2 * c.d_model**2
    return 2.0 * (c.n_layers * layer + length * c.d_model * c.vocab_size)


PRESETS: dict[str, Config] = {
    "gpt2-tiny": Config(d_model=96, d_ff=384, n_layers=2, n_heads=4, n_positions=64, std=0.1),
    "gpt2-mini": Config(d_model=128, d_ff=512, n_layers=4, n_heads=4, n_positions=128),
    "gpt2": Config(),
    "gpt2-medium": Config(d_model=1024, d_ff=4096, n_layers=24, n_heads=16),
    "gpt2-large": Config(d_model=1280, d_ff=5120, n_layers=36, n_heads=20),
    "gpt2-xl": Config(d_model=1600, d_ff=6400, n_layers=48, n_heads=25),
}
