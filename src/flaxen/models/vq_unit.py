"""One layer of a Transformer-VQ. Training, prefill and decoding share this code and differ in plan and cache."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from flaxen.models.vq_config import Config
from flaxen.nn import codebook
from flaxen.nn.codebook import Codebook
from flaxen.nn.layers import MLP, Linear, RMSNorm, dropout, keep_mask, unit_rms
from flaxen.nn.matmul import contract
from flaxen.nn.param import constant
from flaxen.nn.position import sinusoids
from flaxen.nn.stack import save_for_backward
from flaxen.nn.vq_plan import HeadInputs, VQPlan

EPSILON = 1e-6  # epsilon of all RMS norms


class QuantisationLoss(NamedTuple):
    """Quantisation losses, summed over tokens and heads."""

    error: Float[Array, "*L"]  # commitment loss: squared distances between keys and their codes
    surrogate: Float[Array, "*L"]  # 0 in value; its gradient carries the EMA update of the codebook

    @staticmethod
    def nothing() -> "QuantisationLoss":
        """Zero losses, for passes that do not update codebooks."""
        return QuantisationLoss(jnp.zeros(()), jnp.zeros(()))


class DropoutKeys(NamedTuple):
    """PRNG keys for dropout: one for this chunk of a sequence, and one for the whole sequence.

    Dropout of distances and of layers is the same for a whole sequence, so that every chunk reads a cache that was
    computed by the same network.
    """

    chunk: Array
    sequence: Array

    def split(self) -> tuple["DropoutKeys", "DropoutKeys"]:
        """Keys for the two halves of a layer."""
        first, second = map(DropoutKeys, jax.random.split(self.chunk), jax.random.split(self.sequence))
        return first, second


class Unit(nnx.Module):
    """An attention unit with its residual connection: norm, projections, attention, gate (shga only), projection."""

    def __init__(self, config: Config):
        c = config
        queries, std = c.n_heads * c.d_k, c.d_model**-0.5
        gate = c.n_heads * c.d_v if c.heads == "shga" else 0
        self.norm = RMSNorm(c.d_model, EPSILON, bias=True)
        self.q = Linear((c.d_model,), (queries,), std)
        self.kvg = Linear((c.d_model,), (c.key_heads * (c.d_k + c.d_v) + gate,), std)
        self.r = Linear((c.d_model,), (queries,), std)
        self.o = Linear((c.n_heads * c.d_v,), (c.d_model,), (c.n_heads * c.d_v) ** -0.5)
        self.content = constant(queries, value=0.0)
        self.distance = constant(queries, value=0.0)
        self.codebook = Codebook(c.key_heads, c.n_codes, c.d_k)
        self.config = config

    def __call__(
        self,
        x: Float[Array, "B T D"],
        plan: VQPlan,
        cache: Any,
        noise: DropoutKeys | None = None,
        table: Float[Array, "N Q E H"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Any, QuantisationLoss]:
        """Add the unit's output to x; also return the new cache and the quantisation losses.

        `table` is the result of `self.table()`, if the caller has computed it already.
        """
        c = self.config
        chunk, sequence = (None, None) if noise is None else noise
        on_table, on_layer = (None, None) if sequence is None else jax.random.split(sequence)
        q, k, v, gate = self.project(x)
        queries, distant = self.biased(q)
        table = self.table(on_table) if table is None else table
        learning = QuantisationLoss.nothing()
        if c.attention == "full":
            heads = HeadInputs(queries, distant, k, v, table)
        else:
            z, chosen = self.codebook.nearest(k)
            if plan.weights is not None:
                error, surrogate = codebook.error(k, chosen, plan.weights), self.codebook.surrogate(k, z, plan.weights)
                learning = QuantisationLoss(error, surrogate)
            heads = HeadInputs(queries, distant, chosen, v, table, z, self.codebook.vectors())
        y, cache = plan.attend(heads, cache)
        y = dropout(self.output(y, gate), c.dropout, chunk)
        # LayerDrop skips the unit for whole rows. Its cache and its codebook are still updated.
        if on_layer is not None and c.layer_drop:
            keep = keep_mask(on_layer, jnp.arange(len(x), dtype=jnp.uint32), c.layer_drop)
            # Scaled up like dropout, so that nothing has to be scaled when not training.
            y = y * (keep / (1 - c.layer_drop)).astype(y.dtype)[:, None, None]
        return x + y, cache, learning

    def project(self, x: Float[Array, "B T D"]) -> tuple[Array, Array, Array, Array | None]:
        """Queries [B, N, Q, T, H], keys [B, N, T, H], values [B, N, T, U] and the gate [B, T, N · Q · U].

        RMS norm and the factor d_k^(-1/4) give queries and keys the norm d_k^(1/4). Scores are then √d_k times a cosine
        and need no further scale.
        """
        c = self.config
        x = self.norm(x, jnp.dtype(c.compute))
        if x.shape[1] > 1 and isinstance(self.q, Linear) and isinstance(self.kvg, Linear):
            # One matmul instead of two: both have the same left operand, and the query weight is narrow.
            weight = jnp.concatenate([self.q.weight[...], self.kvg.weight[...]], axis=1)
            q, kvg = jnp.split(save_for_backward(contract(x, weight, 1)), [c.n_heads * c.d_k], axis=-1)
        else:  # for one token, concatenating weights costs more than it saves; an adapter has no single weight
            q, kvg = save_for_backward(self.q(x)), save_for_backward(self.kvg(x))
        b, t, n, scale = *x.shape[:2], c.key_heads, c.d_k**-0.25
        k, v, g = jnp.split(kvg, [n * c.d_k, n * (c.d_k + c.d_v)], axis=-1)
        q = unit_rms(q.reshape(b, t, n, -1, c.d_k), EPSILON).astype(x.dtype) * scale
        k = unit_rms(k.reshape(b, t, n, c.d_k), EPSILON).astype(x.dtype) * scale
        v, gate = v.reshape(b, t, n, c.d_v).swapaxes(1, 2), None
        if c.heads == "shga":
            v, gate = jax.nn.silu(v), jax.nn.silu(g)
        return q.transpose(0, 2, 3, 1, 4).astype(jnp.float32), k.swapaxes(1, 2).astype(jnp.float32), v, gate

    def biased(self, q: Float[Array, "B N Q T H"]) -> tuple[Array, Array]:
        """Queries with the content bias, to multiply by keys, and with the distance bias, to multiply by the table.

        These are the biases u and v of Transformer-XL.
        """
        d_k = self.config.d_k
        shape, scale = (*q.shape[1:3], 1, d_k), d_k**-0.25
        return q + scale * self.content[...].reshape(shape), q + scale * self.distance[...].reshape(shape)

    def table(self, key: Array | None = None) -> Float[Array, "N Q E H"]:
        """Embeddings of the distances W, W - 1, … 0: projected sinusoids, with dropout if there is a key."""
        c = self.config
        waves = sinusoids(jnp.arange(c.window, -1, -1), c.d_model, c.wavelength)
        r = self.r(dropout(waves, c.position_drop, key).astype(jnp.dtype(c.compute))).astype(jnp.float32)
        r = r.reshape(c.window + 1, c.key_heads, -1, c.d_k) * c.d_k**-0.25
        return r.transpose(1, 2, 0, 3)

    def output(self, y: Float[Array, "B N Q T U"], gate: Array | None) -> Float[Array, "B T D"]:
        """Merge the heads, apply the gate if there is one, and project to the model width."""
        y = y.transpose(0, 3, 1, 2, 4).reshape(y.shape[0], y.shape[3], -1)
        return self.o(y if gate is None else y * gate)


class Layer(nnx.Module):
    """Two gated attention units (shga), or one attention unit and a feed-forward network (mqa, mha)."""

    def __init__(self, config: Config):
        c = config
        self.first = Unit(c)
        self.second = Unit(c) if c.heads == "shga" else None
        self.norm = None if c.heads == "shga" else RMSNorm(c.d_model, EPSILON, bias=True)
        self.mlp = None if c.heads == "shga" else MLP(c.d_model, c.d_ff, "relu2")
        self.config = config

    @property
    def units(self) -> list[Unit]:
        return [self.first] if self.second is None else [self.first, self.second]

    def __call__(
        self,
        x: Float[Array, "B T D"],
        plan: VQPlan,
        caches: Sequence[Any],
        noise: DropoutKeys | None = None,
        tables: Sequence[Array | None] = (None, None),
    ) -> tuple[Float[Array, "B T D"], tuple[Any, ...], QuantisationLoss]:
        noises = (None, None) if noise is None else noise.split()
        x, cache, learning = self.first(x, plan, caches[0], noises[0], tables[0])
        if self.second is None:
            return self.feed(x, noises[1]), (cache,), learning
        x, other, more = self.second(save_for_backward(x), plan, caches[1], noises[1], tables[1])
        return x, (cache, other), jax.tree.map(jnp.add, learning, more)

    def feed(self, x: Float[Array, "B T D"], noise: DropoutKeys | None = None) -> Float[Array, "B T D"]:
        """Add the output of the feed-forward network to x, if there is one."""
        if self.mlp is None or self.norm is None:
            return x
        y = self.mlp(self.norm(x, jnp.dtype(self.config.compute)), 0.0, None)
        return x + dropout(y, self.config.dropout, None if noise is None else noise.chunk)
