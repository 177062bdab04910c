"""The T5 encoder-decoder: T5 1.0 and 1.1, Flan-T5, mT5, umT5, ByT5 and LongT5 differ only in their Config."""

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int, Shaped

from flaxen.nn.attention import Attention, AttentionPlan, CrossAttention, LayerCache, Source
from flaxen.nn.blockwise import Plan
from flaxen.nn.hardware import few_rows_at_a_time, few_tokens_at_a_time
from flaxen.nn.layers import ACTIVATIONS, MLP, Embedding, RMSNorm, dropout
from flaxen.nn.local import LocalPlan, TransientGlobalAttention, plan_global, plan_local
from flaxen.nn.loss import Sums, cross_entropy
from flaxen.nn.param import round_up, stacked
from flaxen.nn.position import RelativeBias
from flaxen.nn.stack import LONG, run, save_for_backward

Mask = Bool[Array, "B S"] | Int[Array, "B S"]  # True for real tokens; or segment numbers of texts packed into one row
ATTENTION = ("full", "local", "transient-global")


@dataclass(frozen=True)
class Config:
    """T5 configuration. The defaults are those of the checkpoint t5-small."""

    vocab_size: int = 32128
    d_model: int = 512
    d_head: int = 64
    d_ff: int = 2048
    n_layers: int = 6
    n_decoder_layers: int = 6
    n_heads: int = 8
    n_buckets: int = 32
    max_distance: int = 128
    bias_per_layer: bool = False  # umT5: every layer has its own relative bias
    attention: str = "full"  # encoder attention: full, local or transient-global
    radius: int = 127  # local and transient-global attention: number of tokens seen on each side
    global_block: int = 16  # transient-global attention: tokens summed into one global token, which all tokens see
    activation: str = "relu"
    gated: bool = False
    tied: bool = True  # use the embedding table as the output head
    scaled: bool = True  # scale hidden states by d_model^-0.5 before the head, as T5 1.0's tied head requires
    epsilon: float = 1e-6
    dropout: float = 0.1
    factor: float = 1.0  # multiplies all initial standard deviations
    pad_id: int = 0
    eos_ids: tuple[int, ...] = (1,)
    start_id: int = 0
    family: str = "t5"  # model_type in config.json: t5, mt5, umt5 or longt5
    compute: str = "float32"  # dtype of matmuls and activations; the residual stream is always f32
    scan: bool = True
    remat: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "d_head", "d_ff", "n_layers", "n_decoder_layers", "n_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.attention not in ATTENTION:
            raise ValueError(f"attention must be one of {', '.join(ATTENTION)}, got {self.attention!r}")
        if self.radius < 1 or self.global_block < 1:
            raise ValueError(f"radius and global_block must be at least 1, got {self.radius} and {self.global_block}")
        # A LocalPlan holds one bias for all layers.
        if self.bias_per_layer and self.attention != "full":
            raise ValueError(f"bias_per_layer requires full attention, got {self.attention} attention")
        if self.family == "umt5" and not self.bias_per_layer:
            raise ValueError("family umt5 requires bias_per_layer=True")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {self.activation!r}")
        # The encoder halves the buckets twice: for keys before and after the query, then for exact and logarithmic
        # distances.
        if self.n_buckets < 4 or self.n_buckets % 4:
            raise ValueError(f"n_buckets must be a positive multiple of 4, got {self.n_buckets}")
        # A decoder has n_buckets / 2 exact distances; the logarithmic buckets need a range beyond them.
        if self.max_distance <= self.n_buckets // 2:
            raise ValueError(f"max_distance must be greater than n_buckets / 2, got {self.max_distance}")
        if self.compute not in ("float32", "bfloat16"):
            raise ValueError(f"compute must be one of float32, bfloat16, got {self.compute!r}")
        for name in ("pad_id", "start_id"):
            if not 0 <= getattr(self, name) < self.vocab_size:
                raise ValueError(f"{name}={getattr(self, name)} is not in the vocabulary of {self.vocab_size} tokens")

    def for_vocabulary(self, size: int, pad_id: int, eos_id: int) -> "Config":
        """Adapt to a tokenizer's vocabulary. Decoder inputs begin with the padding token."""
        return dataclasses.replace(self, vocab_size=round_up(size), pad_id=pad_id, eos_ids=(eos_id,), start_id=pad_id)


def _presets() -> dict[str, Config]:
    v1 = Config()
    v1_1 = dataclasses.replace(v1, activation="gelu_new", gated=True, tied=False, scaled=False)

    def size(
        base: Config, d: int, ff: int, layers: int, heads: int, decoder: int = 0, head: int = 64, **more: Any
    ) -> Config:
        depth: dict[str, Any] = {"n_layers": layers, "n_decoder_layers": decoder or layers}
        return dataclasses.replace(base, d_model=d, d_ff=ff, n_heads=heads, d_head=head, **depth, **more)

    table = {
        "t5-small": v1,
        "t5-base": size(v1, 768, 3072, 12, 12),
        "t5-large": size(v1, 1024, 4096, 24, 16),
        "t5-3b": size(v1, 1024, 16384, 24, 32, head=128),
        "t5-11b": size(v1, 1024, 65536, 24, 128, head=128),
        "t5-v1_1-mini": size(v1_1, 256, 512, 4, 4),  # not published by Google: small enough for a laptop
        "t5-v1_1-small": size(v1_1, 512, 1024, 8, 6),
        "t5-v1_1-base": size(v1_1, 768, 2048, 12, 12),
        "t5-v1_1-large": size(v1_1, 1024, 2816, 24, 16),
        "t5-v1_1-xl": size(v1_1, 2048, 5120, 24, 32),
        "t5-v1_1-xxl": size(v1_1, 4096, 10240, 24, 64),
    }
    for name in ("small", "base", "large", "xl", "xxl"):
        table[f"flan-t5-{name}"] = table[f"t5-v1_1-{name}"]
        table[f"mt5-{name}"] = dataclasses.replace(table[f"t5-v1_1-{name}"], vocab_size=250112)
    for name in ("small", "base", "xl", "xxl"):
        umt5 = dataclasses.replace(table[f"mt5-{name}"], vocab_size=256384, bias_per_layer=True, family="umt5")
        table[f"umt5-{name}"] = umt5
    # ByT5's encoder is three times as deep as its decoder.
    for name, d, ff, layers, decoder, heads in (
        ("small", 1472, 3584, 12, 4, 6),
        ("base", 1536, 3968, 18, 6, 12),
        ("large", 1536, 3840, 36, 12, 16),
        ("xl", 2560, 6720, 36, 12, 32),
        ("xxl", 4672, 12352, 36, 12, 64),
    ):
        table[f"byt5-{name}"] = size(v1_1, d, ff, layers, heads, decoder, vocab_size=384)
    for kind, attention in (("local", "local"), ("tglobal", "transient-global")):
        for name in ("mini", "small", "base", "large", "xl"):  # Google published base, large and xl
            long = dataclasses.replace(table[f"t5-v1_1-{name}"], attention=attention, family="longt5")
            table[f"long-t5-{kind}-{name}"] = long
    return table


PRESETS = _presets()


class Layer(nnx.Module):
    """A pre-norm block: self-attention, cross-attention in a decoder, feed-forward; each with a residual connection."""

    def __init__(self, config: Config, decoder: bool):
        c = config
        norm = partial(RMSNorm, c.d_model, c.epsilon, c.factor)
        sizes = (c.d_model, c.n_heads, c.d_head, c.factor)
        has_global = c.attention == "transient-global" and not decoder
        self.attention = TransientGlobalAttention(*sizes, c.epsilon) if has_global else Attention(*sizes)
        self.attention_norm = norm()
        self.bias = relative_bias(c, decoder) if c.bias_per_layer else None
        self.cross: CrossAttention | None = CrossAttention(*sizes) if decoder else None
        self.cross_norm: RMSNorm | None = norm() if decoder else None
        self.mlp, self.mlp_norm = MLP(c.d_model, c.d_ff, c.activation, c.gated, c.factor), norm()

    def __call__(
        self,
        x: Float[Array, "B T D"],
        plan: AttentionPlan,
        source: Source | None,
        cache: LayerCache | None,
        rate: float,
        dtype: DTypeLike,
        key: Array | None,
    ) -> tuple[Float[Array, "B T D"], LayerCache | None]:
        # Dropout of self-attention weights and output, of cross-attention weights and output, and of the feed-forward
        # network.
        keys = [None] * 5 if key is None else list(jax.random.split(key, 5))
        own, seen = cache or (None, None)
        short = x.size < LONG  # for long inputs, save less for the backward pass, which then recomputes a few matmuls
        y, own = self.attention(self.attention_norm(x, dtype), plan, own, keys[0])
        x = x + dropout(y, rate, keys[1])
        x = save_for_backward(x) if short else x
        if self.cross is not None and self.cross_norm is not None and source is not None:
            y, seen = self.cross(self.cross_norm(x, dtype), source, seen, keys[2])
            x = save_for_backward(x + dropout(y, rate, keys[3]))

        def feed_forward(x: Array, key: Array | None) -> Array:
            inner, outer = (None, None) if key is None else jax.random.split(key)
            return x + dropout(self.mlp(self.mlp_norm(x, dtype), rate, inner, short), rate, outer)

        x = few_tokens_at_a_time(feed_forward, x, keys[4], checkpoint=not short)
        return x, None if cache is None else LayerCache(own, seen)


def relative_bias(config: Config, decoder: bool) -> RelativeBias:
    """The relative position bias of an encoder (bidirectional) or a decoder."""
    c = config
    return RelativeBias(c.n_heads, c.n_buckets, c.max_distance, not decoder, c.factor * c.d_model**-0.5)


class Stack(nnx.Module):
    """An encoder or decoder: its layers, their shared relative bias (unless each has its own) and the final norm."""

    def __init__(self, config: Config, decoder: bool):
        c = config
        self.layers = stacked(Layer(c, decoder), c.n_decoder_layers if decoder else c.n_layers)
        self.bias = None if c.bias_per_layer else relative_bias(c, decoder)
        # The relative bias of the global tokens. Checkpoints contain this name, so it cannot be changed.
        self.side_bias = relative_bias(c, decoder) if c.attention == "transient-global" and not decoder else None
        self.norm = RMSNorm(c.d_model, c.epsilon, c.factor)
        self.config, self.causal = config, decoder

    def plan(self, length: int, mask: Array | None, batch: int) -> Plan | LocalPlan:
        """Masks and relative bias for all layers; without the bias if each layer has its own."""
        c = self.config
        if self.bias is None or self.causal or c.attention == "full":
            # All distances (key - query) between two of T tokens: 1 - T to T - 1.
            bias = None if self.bias is None else self.bias(jnp.arange(1 - length, length))
            return Plan(None, bias, self.causal, c.dropout).seeing(mask, mask)
        # Local attention pads queries and keys and recognises padding by segment 0, so it needs segments even without a
        # mask.
        segments = jnp.ones((batch, length), jnp.int32) if mask is None else mask.astype(jnp.int32)
        global_tokens = None if self.side_bias is None else plan_global(self.side_bias, segments, c.global_block)
        return plan_local(self.bias, segments, c.radius, c.dropout, global_tokens)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        mask: Shaped[Array, "B T"] | None,
        source: tuple[Float[Array, "B S D"], Plan] | None,
        key: Array | None,
    ) -> Float[Array, "B T D"]:
        c, dtype = self.config, jnp.dtype(self.config.compute)
        length = x.shape[1]
        plan = self.plan(length, mask, len(x))
        keys = (None, None, None) if key is None else tuple(jax.random.split(key, 3))
        x = dropout(x.astype(jnp.float32), c.dropout, keys[0])
        encoded, cross = source or (None, Plan())

        def body(layer: Layer, x: Array, key: Array | None) -> Array:
            layer_plan = plan
            # umT5: only the bias differs between layers, so they share the rest of the plan.
            if layer.bias is not None and isinstance(plan, Plan):
                layer_plan = plan._replace(bias=layer.bias(jnp.arange(1 - length, length)))

            def some_rows(x: Array, rows: Any, encoded: Array | None, cross_rows: Any, key: Array | None) -> Array:
                source = None if encoded is None else Source(encoded, cross.of(cross_rows))
                return layer(x, layer_plan.of(rows), source, None, c.dropout, dtype, key)[0]

            return few_rows_at_a_time(some_rows, x, key, plan.rows(), encoded, cross.rows())

        x = run(body, self.layers, x, keys[1], scan=c.scan, remat=c.remat)
        return dropout(self.norm(x, dtype), c.dropout, keys[2])


class T5(nnx.Module):
    """The T5 encoder-decoder. Token ids are int32; `valid` is True for real tokens, None if all tokens are real.

    Several examples can be packed into one row: then `valid` holds their segment numbers 1, 2, … (0 is padding), and
    `target_segments` those of their targets.
    """

    def __init__(self, config: Config):
        self.embedding = Embedding(config.vocab_size, config.d_model, std=config.factor)
        self.encoder = Stack(config, decoder=False)
        self.decoder = Stack(config, decoder=True)
        # With this std, initial logits have a standard deviation near 1. Hugging Face initialises an untied head with
        # std 1, so its initial logits have a standard deviation near sqrt(d_model).
        head = Embedding(config.vocab_size, config.d_model, std=config.factor * config.d_model**-0.5)
        self.head = None if config.tied else head
        self.config = config

    def encode(
        self, ids: Int[Array, "B S"], valid: Mask | None = None, key: Array | None = None
    ) -> Float[Array, "B S D"]:
        return self.encoder(self.embedding(ids), valid, None, key)

    def decode(
        self,
        ids: Int[Array, "B T"],
        source: Float[Array, "B S D"],
        valid: Mask | None = None,
        key: Array | None = None,
        segments: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Compute the hidden states from which the head computes logits."""
        cross = Plan(rate=self.config.dropout).seeing(segments, valid)
        return self.scale(self.decoder(self.embedding(ids), segments, (source, cross), key))

    def logits(
        self,
        input_ids: Int[Array, "B S"],
        decoder_ids: Int[Array, "B T"],
        valid: Bool[Array, "B S"] | None = None,
    ) -> Float[Array, "B T V"]:
        return self.output_head.logits(self.decode(decoder_ids, self.encode(input_ids, valid), valid))

    def loss(
        self,
        input_ids: Int[Array, "B S"],
        labels: Int[Array, "B T"],
        valid: Mask | None = None,
        target_segments: Int[Array, "B T"] | None = None,
        *,
        smoothing: float = 0.0,
        z_loss: float = 0.0,
        key: Array | None = None,
    ) -> tuple[Float[Array, ""], Sums]:
        """Mean loss over non-negative labels, and the loss sums. Decoder inputs are the labels shifted right by one."""
        keys = (None, None) if key is None else tuple(jax.random.split(key))
        weights = (labels >= 0).astype(jnp.float32)
        # Ignored labels become padding, as in transformers, because the decoder reads them too.
        labels = jnp.where(labels >= 0, labels, self.config.pad_id)
        shifted = jnp.pad(labels[:, :-1], ((0, 0), (1, 0)), constant_values=self.config.start_id)
        if target_segments is not None:
            # In packed rows every target begins with the start token.
            begins = target_segments != jnp.pad(target_segments[:, :-1], ((0, 0), (1, 0)))
            shifted = jnp.where(begins, self.config.start_id, shifted)
        encoded = self.encode(input_ids, valid, keys[0])
        hidden = self.decode(shifted, encoded, valid, keys[1], target_segments)
        flat = hidden.reshape(-1, hidden.shape[-1])
        sums = cross_entropy(
            flat, self.output_head.weight[...], labels.reshape(-1), weights.reshape(-1), smoothing, z_loss
        )
        return sums.loss / jnp.maximum(sums.weight, 1.0), sums

    @property
    def output_head(self) -> Embedding:
        return self.embedding if self.head is None else self.head

    def scale(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """Scale hidden states by d_model^-0.5 if the configuration says so."""
        # T5 1.0's head is the embedding table, whose entries start with a standard deviation of 1. Unscaled, the logits
        # of normalised hidden states would start near sqrt(d_model).
        return hidden * jnp.asarray(self.config.d_model**-0.5, hidden.dtype) if self.config.scaled else hidden


def encoder_flops(config: Config, source: int) -> float:
    """Floating-point operations of the matmuls in the encoder's forward pass for one example."""
    c, inner = config, config.n_heads * config.d_head
    feed_forward = (3 if c.gated else 2) * c.d_model * c.d_ff
    # Multiply-adds per layer. A query that sees n keys costs 2 · n · inner: half for scores, half for the weighted sum
    # of values.
    seen, n_global = source, 0
    if c.attention != "full":
        n_global = source // c.global_block if c.attention == "transient-global" else 0
        seen = min(source, 2 * c.radius + 1) + n_global
    # Four projections per token, and keys and values of the global tokens.
    layer = source * (4 * c.d_model * inner + feed_forward + 2 * seen * inner) + n_global * 2 * c.d_model * inner
    return 2.0 * c.n_layers * layer


def flops(config: Config, source: int, target: int) -> float:
    """Floating-point operations of the matmuls in the forward pass for one example."""
    c, inner = config, config.n_heads * config.d_head
    feed_forward = (3 if c.gated else 2) * c.d_model * c.d_ff
    # Four projections of self-attention, and q and o of cross-attention; its k and v are those of the source.
    decoder = target * (6 * c.d_model * inner + feed_forward + 2 * (target + source) * inner)
    decoder += source * 2 * c.d_model * inner
    head = target * c.d_model * c.vocab_size
    return encoder_flops(c, source) + 2.0 * (c.n_decoder_layers * decoder + head)
