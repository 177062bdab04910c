"""One layer of a Transformer-VQ, written once: training, prefill and decoding differ in the plan and the cache."""

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

EPSILON = 1e-6  # of every norm


class QuantisationLoss(NamedTuple):
    """What quantisation adds to a loss."""

    error: Float[Array, "*L"]  # the sum of squared distances of keys to their codes
    surrogate: Float[Array, "*L"]  # 0, with the gradient that codebooks learn from

    @staticmethod
    def nothing() -> "QuantisationLoss":
        return QuantisationLoss(jnp.zeros(()), jnp.zeros(()))


class DropoutKeys(NamedTuple):
    """Keys of dropout: for this chunk of a sequence, and for all of the sequence, so that what is remembered of it was
    made by the same network."""

    chunk: Array
    sequence: Array

    def split(self) -> tuple["DropoutKeys", "DropoutKeys"]:
        """One for each half of a layer."""
        first, second = map(DropoutKeys, jax.random.split(self.chunk), jax.random.split(self.sequence))
        return first, second


class Unit(nnx.Module):
    """Norm, attention, a gate if heads are shga, and the way back into the residual stream."""

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
        """x with what the unit adds, and the plan's cache behind it. `table` is that of distances, if it is at hand."""
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
        if on_layer is not None and c.layer_drop:
            keep = keep_mask(on_layer, jnp.arange(len(x), dtype=jnp.uint32), c.layer_drop)
            y = y * (keep / (1 - c.layer_drop)).astype(y.dtype)[:, None, None]
        return x + y, cache, learning

    def project(self, x: Float[Array, "B T D"]) -> tuple[Array, Array, Array, Array | None]:
        """Queries [B, N, G, T, H], keys [B, N, T, H], values [B, N, T, U] and the gate [B, T, N · G · U].

        Queries and keys have norm d_k^(1/4), so that scores of d_k^(1/2) times a cosine need no scale.
        """
        c = self.config
        x = self.norm(x, jnp.dtype(c.compute))
        if x.shape[1] > 1 and isinstance(self.q, Linear) and isinstance(self.kvg, Linear):
            # One matmul: the two share their left operand, and the one of queries is thin.
            weight = jnp.concatenate([self.q.weight[...], self.kvg.weight[...]], axis=1)
            q, kvg = jnp.split(save_for_backward(contract(x, weight, 1)), [c.n_heads * c.d_k], axis=-1)
        else:  # for one token the joined weights are not worth their copy; with an adapter there are none
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
        """Queries as they meet keys, and as they meet distances."""
        d_k = self.config.d_k
        shape, scale = (*q.shape[1:3], 1, d_k), d_k**-0.25
        return q + scale * self.content[...].reshape(shape), q + scale * self.distance[...].reshape(shape)

    def table(self, key: Array | None = None) -> Float[Array, "N Q E H"]:
        """What distances C, C - 1, … 0 are known by."""
        c = self.config
        waves = sinusoids(jnp.arange(c.window, -1, -1), c.d_model, c.wavelength)
        r = self.r(dropout(waves, c.position_drop, key).astype(jnp.dtype(c.compute))).astype(jnp.float32)
        r = r.reshape(c.window + 1, c.key_heads, -1, c.d_k) * c.d_k**-0.25
        return r.transpose(1, 2, 0, 3)

    def output(self, y: Float[Array, "B N Q T U"], gate: Array | None) -> Float[Array, "B T D"]:
        y = y.transpose(0, 3, 1, 2, 4).reshape(y.shape[0], y.shape[3], -1)
        return self.o(y if gate is None else y * gate)


class Layer(nnx.Module):
    """Two gated units, or attention and a feed-forward network."""

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
        """x with what the feed-forward network adds, if there is one."""
        if self.mlp is None or self.norm is None:
            return x
        y = self.mlp(self.norm(x, jnp.dtype(self.config.compute)), 0.0, None)
        return x + dropout(y, self.config.dropout, None if noise is None else noise.chunk)
