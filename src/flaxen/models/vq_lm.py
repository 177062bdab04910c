"""Transformer-VQ: a language model whose attention sees all the past at a cost linear in its length."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from flaxen.models.vq_config import Config
from flaxen.nn import codebook, full, vq
from flaxen.nn.codebook import Codebook
from flaxen.nn.hardware import target
from flaxen.nn.layers import MLP, Embedding, Linear, RMSNorm, dropout, keep_mask, unit_rms
from flaxen.nn.loss import Sums, cross_entropy
from flaxen.nn.matmul import contract
from flaxen.nn.param import constant, stacked
from flaxen.nn.position import sinusoids
from flaxen.nn.stack import KEPT, kept, unstack
from flaxen.nn.vq import Cache, Seen

EPSILON = 1e-6  # of every norm


class State(NamedTuple):
    """All that the model remembers of what it has read; its size does not grow with it."""

    position: Int[Array, "B"]  # tokens read, of the document if they are kept apart
    seen: Seen
    caches: tuple[Cache, ...]  # of the one or two attentions of a layer, with a layer axis first


class Learning(NamedTuple):
    """What quantisation adds to a loss."""

    error: Float[Array, ""]  # the sum of squared distances of keys to their codes
    surrogate: Float[Array, ""]  # 0, with the gradient that codebooks learn from


class Noise(NamedTuple):
    """Keys of dropout: for this chunk of a sequence, and for all of the sequence, so that what is remembered of it was
    made by the same network."""

    chunk: Array
    sequence: Array


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

    def project(self, x: Float[Array, "B T D"], c: Config) -> tuple[Array, Array, Array, Array | None]:
        """Queries [B, N, G, T, H], keys [B, N, T, H], values [B, N, T, V] and the gate [B, T, …]."""
        x = self.norm(x, jnp.dtype(c.compute))
        if not (isinstance(self.q, Linear) and isinstance(self.kvg, Linear)):  # one has an adapter
            return self.parts(kept(self.q(x)), kept(self.kvg(x)), c)
        # One product: the two share their left operand, and the one of queries is thin.
        weight = jnp.concatenate([self.q.weight[...], self.kvg.weight[...]], axis=1)
        q, kvg = jnp.split(kept(contract(x, weight, 1)), [c.n_heads * c.d_k], axis=-1)
        return self.parts(q, kvg, c)

    def parts(self, q: Float[Array, "B T _"], kvg: Float[Array, "B T _"], c: Config) -> tuple:
        """What `project` gives, out of its two products."""
        x, b, t, n, scale = q, *q.shape[:2], c.key_heads, c.d_k**-0.25
        k, v, g = jnp.split(kvg, [n * c.d_k, n * (c.d_k + c.d_v)], axis=-1)
        q = unit_rms(q.reshape(b, t, n, -1, c.d_k), EPSILON).astype(x.dtype) * scale
        k = unit_rms(k.reshape(b, t, n, c.d_k), EPSILON).astype(x.dtype) * scale
        v, gate = v.reshape(b, t, n, c.d_v).swapaxes(1, 2), None
        if c.heads == "shga":
            v, gate = jax.nn.silu(v), jax.nn.silu(g)
        return q.transpose(0, 2, 3, 1, 4).astype(jnp.float32), k.swapaxes(1, 2).astype(jnp.float32), v, gate

    def biased(self, q: Float[Array, "B N G T H"], c: Config) -> tuple[Array, Array]:
        """Queries as they meet keys, and as they meet distances."""
        shape, scale = (*q.shape[1:3], 1, c.d_k), c.d_k**-0.25
        return q + scale * self.content[...].reshape(shape), q + scale * self.distance[...].reshape(shape)

    def table(self, c: Config, key: Array | None = None) -> Float[Array, "N G E H"]:
        """What distances C, C - 1, … 0 are known by."""
        waves = sinusoids(jnp.arange(c.window, -1, -1), c.d_model, c.wavelength)
        r = self.r(dropout(waves, c.position_drop, key).astype(jnp.dtype(c.compute))).astype(jnp.float32)
        r = r.reshape(c.window + 1, c.key_heads, -1, c.d_k) * c.d_k**-0.25
        return r.transpose(1, 2, 0, 3)

    def output(self, y: Float[Array, "B N G T V"], gate: Array | None) -> Float[Array, "B T D"]:
        y = y.transpose(0, 3, 1, 2, 4).reshape(y.shape[0], y.shape[3], -1)
        return self.o(y if gate is None else y * gate)

    def __call__(
        self, x: Float[Array, "B T D"], seen: Seen, cache: Cache, weights: Float[Array, "B T"] | None, c: Config,
        noise: Noise | None,
    ) -> tuple[Float[Array, "B T D"], Cache, Learning]:  # fmt: skip
        """`weights` says which tokens codebooks learn from; without, they learn nothing."""
        chunk, sequence = (None, None) if noise is None else noise
        on_table, on_layer = (None, None) if sequence is None else jax.random.split(sequence)
        q, k, v, gate = self.project(x, c)
        queries, distant = self.biased(q, c)
        table = self.table(c, on_table)
        learning = Learning(jnp.zeros(()), jnp.zeros(()))
        if c.attention == "full":
            y = full.attend(queries, distant, k, v, table, seen.documents[:, c.window :], c.law)
        else:
            z, chosen = self.codebook.nearest(k)
            if weights is not None:
                learning = Learning(codebook.error(k, chosen, weights), self.codebook.surrogate(k, z, weights))
            parallel = c.form == "parallel" or (c.form == "auto" and not target().rows_in_sequence and not c.rounded)
            law = c.reading if weights is None else c.law
            y, cache = vq.attend(
                queries, distant, z, chosen, v, table, self.codebook.vectors(), seen, cache, law, parallel
            )
        y = dropout(self.output(y, gate), c.dropout, chunk)
        if on_layer is not None and c.layer_drop:
            keep = keep_mask(on_layer, jnp.arange(len(x), dtype=jnp.uint32), c.layer_drop)
            y = y * (keep / (1 - c.layer_drop)).astype(y.dtype)[:, None, None]
        return x + y, cache, learning


class Layer(nnx.Module):
    """Two gated units, or attention and a feed-forward network."""

    def __init__(self, config: Config):
        c = config
        self.first = Unit(c)
        self.second = Unit(c) if c.heads == "shga" else None
        self.norm = None if c.heads == "shga" else RMSNorm(c.d_model, EPSILON, bias=True)
        self.mlp = None if c.heads == "shga" else MLP(c.d_model, c.d_ff, "relu2")

    def __call__(
        self, x: Float[Array, "B T D"], seen: Seen, caches: tuple[Cache, ...], weights: Array | None, c: Config,
        noise: Noise | None,
    ) -> tuple[Float[Array, "B T D"], tuple[Cache, ...], Learning]:  # fmt: skip
        noises: list[Noise | None] = [None, None]
        if noise is not None:
            noises = list(map(Noise, jax.random.split(noise.chunk), jax.random.split(noise.sequence)))
        x, cache, learning = self.first(x, seen, caches[0], weights, c, noises[0])
        if self.second is None:
            y = self.feed(x, c)
            return x + dropout(y, c.dropout, None if noises[1] is None else noises[1].chunk), (cache,), learning
        x, other, more = self.second(kept(x), seen, caches[1], weights, c, noises[1])
        return x, (cache, other), jax.tree.map(jnp.add, learning, more)

    def feed(self, x: Float[Array, "B T D"], c: Config) -> Float[Array, "B T D"]:
        """What the feed-forward network adds."""
        assert self.norm is not None
        assert self.mlp is not None
        return self.mlp(self.norm(x, jnp.dtype(c.compute)), 0.0, None)


class VQLM(nnx.Module):
    """Token ids in, hidden states out, and a state to go on with; `output` turns hidden states into logits."""

    def __init__(self, config: Config):
        c = config
        self.embedding = Embedding(c.vocab_size, c.d_model, 1.0)
        self.scale = constant(value=0.0) if c.absolute else None
        self.layers = stacked(Layer(c), c.n_layers)
        self.norm = RMSNorm(c.d_model, EPSILON, bias=True) if c.norm_out else None
        self.head = None if c.tied else Embedding(c.vocab_size, c.d_model, c.d_model**-0.5)
        self.bias = constant(c.vocab_size, value=0.0)  # of logits
        self.config = config

    def __call__(
        self,
        ids: Int[Array, "B T"],
        state: State | None = None,
        valid: Bool[Array, "B T"] | None = None,
        weights: Float[Array, "B T"] | None = None,
        documents: Int[Array, "B T"] | None = None,
        noise: Noise | None = None,
    ) -> tuple[Float[Array, "B T D"], State, Learning]:
        """Hidden states of a multiple of `block` tokens. `valid` is False for padding at the left."""
        c = self.config
        if ids.shape[1] % c.block:
            raise ValueError(f"{ids.shape[1]} tokens are no multiple of the block, {c.block}")
        state = empty(c, len(ids)) if state is None else state
        documents = number_documents(c, ids, state, valid) if documents is None else documents
        positions = place(c, state, documents)
        keys = (None, None) if noise is None else tuple(jax.random.split(noise.chunk))
        x = dropout(self.embed(ids, positions), c.embedding_dropout, keys[0])
        now = state.seen.followed(documents)
        noises = None
        if noise is not None:
            every = lambda key: jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(c.n_layers))  # noqa: E731
            noises = Noise(every(keys[1]), every(noise.sequence))

        policy = None if c.remat else jax.checkpoint_policies.save_only_these_names(KEPT)

        def body(x: Array, xs: tuple[Layer, Any, Any]) -> tuple[Array, tuple]:
            layer, caches, noise = xs
            x, caches, learning = layer(x, now, caches, weights, c, noise)
            return x, (caches, learning)

        body = jax.checkpoint(body, policy=policy, prevent_cse=not c.scan)
        if c.scan:
            x, (caches, learning) = lax.scan(body, x, (self.layers, state.caches, noises))
        else:
            made = []
            for i, layer in enumerate(unstack(self.layers)):
                x, one = body(x, (layer, *jax.tree.map(lambda a, i=i: a[i], (state.caches, noises))))
                made.append(one)
            caches, learning = jax.tree.map(lambda *a: jnp.stack(a), *made)
        hidden = x if self.norm is None else self.norm(x, jnp.dtype(c.compute))
        after = State(positions[:, -1] + 1, now.after(c.law), caches)
        return hidden, lax.stop_gradient(after), Learning(*map(jnp.sum, learning))

    def embed(self, ids: Int[Array, "*B"], positions: Int[Array, "*B"]) -> Float[Array, "*B D"]:
        c = self.config
        x = self.embedding(ids).astype(jnp.float32)
        if self.scale is not None:
            x = x + self.scale[...] * sinusoids(positions, c.d_model, c.wavelength)
        return x.astype(jnp.dtype(c.compute))

    def output(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """Logits, in f32."""
        logits = self.output_head.logits(hidden.astype(jnp.float32)) + self.bias[...]
        return logits * self.config.logit_scale

    def logits(
        self, ids: Int[Array, "B T"], source: None = None, valid: Bool[Array, "B T"] | None = None
    ) -> Float[Array, "B T V"]:
        """Of whole sequences, of any length. `valid` is False for padding at the left."""
        padding = -ids.shape[1] % self.config.block
        valid = jnp.pad(jnp.ones(ids.shape, bool) if valid is None else valid, ((0, 0), (padding, 0)))
        hidden, _, _ = self(jnp.pad(ids, ((0, 0), (padding, 0))), valid=valid)
        return self.output(hidden[:, padding:])

    def loss(
        self,
        ids: Int[Array, "B T"],
        labels: Int[Array, "B T"],
        state: State | None = None,
        *,
        commit: float = 0.0,
        noise: Noise | None = None,
        documents: Int[Array, "B T"] | None = None,
        learn: bool = False,
    ) -> tuple[Sums, State, Learning]:
        """Sums over labels that are not negative. With `learn`, their gradient is of the loss, of `commit` times the
        error of quantisation, and what codebooks learn from; their value is of the loss alone."""
        weights = (labels >= 0).astype(jnp.float32)
        hidden, state, learning = self(ids, state, None, weights if learn else None, documents, noise)
        flat = hidden.reshape(-1, hidden.shape[-1]).astype(jnp.float32) * self.config.logit_scale
        bias = self.bias[...] * self.config.logit_scale
        table, wanted = self.output_head.weight[...], jnp.maximum(labels, 0).reshape(-1)
        sums = cross_entropy(flat, table, wanted, weights.reshape(-1), bias=bias)
        added = commit * learning.error + learning.surrogate
        return sums._replace(loss=sums.loss + added - lax.stop_gradient(added)), state, learning

    @property
    def output_head(self) -> Embedding:
        return self.embedding if self.head is None else self.head


def recast(model: VQLM, config: Config) -> VQLM:
    """The same weights, computed as another configuration says."""
    return jax.tree.unflatten(jax.tree.structure(VQLM(config)), jax.tree.leaves(model))


def empty(config: Config, rows: int) -> State:
    """What is remembered before anything is read."""
    c = config
    # Full attention remembers nothing here: it is trained on whole sequences.
    window, codes = (c.window, c.n_codes) if c.attention == "vq" else (0, 0)
    one = Cache.empty(rows, c.key_heads, window, codes, c.d_k, c.d_v)
    # An array for each: they may be given away one by one.
    every = [jax.tree.map(lambda a: jnp.broadcast_to(a, (c.n_layers, *a.shape)), one) for _ in range(c.units)]
    return State(jnp.zeros(rows, jnp.int32), Seen.nothing(rows, c.window), tuple(every))


def number_documents(
    config: Config, ids: Int[Array, "B T"], state: State, valid: Bool[Array, "B T"] | None
) -> Int[Array, "B T"]:
    """Each end token, which also stands before a text, begins the next document; padding is of none."""
    valid = jnp.ones(ids.shape, bool) if valid is None else valid
    begins = jnp.isin(ids, jnp.asarray(config.eos_ids, jnp.int32)) & valid
    number = state.seen.documents[:, -1:] + jnp.cumsum(begins, axis=1, dtype=jnp.int32)
    # A text that begins without an end token is of the first document all the same.
    number = number + jnp.any((number == 0) & valid, axis=1, keepdims=True)
    return jnp.where(valid, number, 0)


def place(config: Config, state: State, documents: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """The position of each token in its sequence, or in its document if these are kept apart."""
    real = documents > 0
    count = state.position[:, None] + jnp.cumsum(real, axis=1, dtype=jnp.int32) - 1
    if not config.documents:
        return jnp.maximum(count, 0)
    before = jnp.concatenate([state.seen.documents[:, -1:], documents[:, :-1]], axis=1)
    begins = lax.cummax(jnp.where(real & (documents != before), count, 0), axis=1)
    return jnp.maximum(count - begins, 0)


def state_bytes(state: State) -> int:
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(state))


def fit_codebooks(model: VQLM, ids: Int[Array, "B T"], key: Array) -> VQLM:
    """Codebooks made from the keys of some text, layer after layer: none of their codes is then far from all keys."""
    c = model.config
    state = empty(c, len(ids))
    documents = number_documents(c, ids, state, None)
    now = state.seen.followed(documents)
    x, fitted = model.embed(ids, place(c, state, documents)), []

    def fit(unit: Unit, key: Array) -> Unit:
        k = unit.project(x, c)[1].swapaxes(0, 1).reshape(c.key_heads, -1, c.d_k)
        sums, counts = codebook.fit(k, c.n_codes, key)
        found = {"sum": sums, "count": counts}
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: found.get(path[-2].name, leaf) if path[0].name == "codebook" else leaf, unit
        )

    for i, layer in enumerate(unstack(model.layers)):
        caches = jax.tree.map(lambda a, i=i: a[i], state.caches)
        keys = jax.random.split(jax.random.fold_in(key, i))
        layer.first = fit(layer.first, keys[0])
        if layer.second is not None:
            x, _, _ = layer.first(x, now, caches[0], None, c, None)
            layer.second = fit(layer.second, keys[1])
            x, _, _ = layer.second(x, now, caches[1], None, c, None)
        else:
            x, _, _ = layer(x, now, caches, None, c, None)
        fitted.append(layer)
    layers = jax.tree.map(lambda *a: jnp.stack(a), *fitted)
    return _with_layers(model, layers)


def _with_layers(model: VQLM, layers: Layer) -> VQLM:
    leaves, tree = jax.tree.flatten(model)
    copy = jax.tree.unflatten(tree, leaves)
    copy.layers = layers
    return copy
